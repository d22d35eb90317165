"""The output of a critic, and its check: the JSON fits its schema, and all evidence exists.

A finding cites a step of the trial's trajectory, or a file with a line and optionally a quote. Evidence is looked up on
the host, in the files that the critic saw; a missing step, line, file or quote is a problem that the critic has to
correct. Accepted evidence is normalized: `file` begins with `trial/` or `task/`, and is the trajectory for a step;
`line` is the line that contains the quote. No symbolic link is followed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator

from pier.job.view import step_places
from pier.task.load import describe
from pier.tree import Tree, TreeError

INPUT = "/critique/input"
"""Directory of the read-only mounts `trial`, `task` and `job` in the critic's sandbox."""

TRAJECTORY = "agent/trajectory.json"
OUTPUT_LIMIT = 1 << 20
_FILE_LIMIT = 64 << 20
_PROBLEMS = 12
_NEAR = 3
"""Maximum distance in lines between a quote and the cited line."""

Schema: TypeAlias = type[BaseModel]


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore")


class Evidence(_Part):
    """Evidence for a finding: a step of the trajectory (`step_id`), or a file and a line."""

    step: int | None = None
    file: str | None = Field(default=None, description="below trial/ or task/")
    line: int | None = Field(default=None, ge=1)
    quote: str | None = Field(default=None, description="a few words of that step or line, verbatim")

    @model_validator(mode="after")
    def _has_a_place(self) -> Evidence:
        if self.step is None and not self.file:
            raise ValueError("expected a step or a file")
        return self

    @property
    def place(self) -> str:
        """The place in readable form."""
        where = f"{self.file}:{self.line}" if self.line else str(self.file)
        if self.step is None:
            return where
        return f"step {self.step}" + (f" of {where}" if self.file and where != f"trial/{TRAJECTORY}" else "")


class CriterionAnswer(_Part):
    outcome: Literal["pass", "fail", "not_applicable"]
    explanation: str = Field(min_length=1)


class CritiqueFinding(_Part):
    criterion: str = ""
    severity: Literal["low", "medium", "high"] = "medium"
    summary: str = Field(min_length=1)
    evidence: list[Evidence] = Field(min_length=1)


class _Output(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())

    findings: list[CritiqueFinding] = Field(default_factory=list)


class CritiqueOutput(_Output):
    """The required fields of datacurve pier, with findings."""

    rating: Literal["good", "bad"]
    feedback: str = Field(min_length=1)
    tag: str | None = None
    tags: list[str] = Field(default_factory=list, description="a few short labels")

    @model_validator(mode="after")
    def _has_a_tag(self) -> CritiqueOutput:
        if not (self.tag or any(self.tags)):
            raise ValueError("expected tags: a list with at least one label")
        return self


class AnalysisOutput(_Output):
    summary: str = Field(min_length=1)


class JobAnalysisOutput(_Output):
    job_summary: str = Field(min_length=1)


Kind = Literal["critique", "analysis", "check", "job"]
_MODELS: dict[Kind, Schema] = {
    "critique": CritiqueOutput,
    "analysis": AnalysisOutput,
    "check": _Output,
    "job": JobAnalysisOutput,
}
OUTPUTS: dict[Kind, str] = {
    "critique": "critique-result.json",
    "analysis": "analysis.json",
    "check": "check-result.json",
    "job": "job-analysis.json",
}
"""Name of the critic's output file, in the directory of artifacts."""


def schema_of(kind: Kind, criteria: tuple[str, ...], causes: tuple[str, ...]) -> Schema:
    """The model of a critic's output: an answer to each criterion, and one of `causes` if there are any."""
    fields: dict[str, Any] = {}
    if criteria:
        answers: dict[str, Any] = {
            f"criterion_{number}": (CriterionAnswer, Field(alias=name)) for number, name in enumerate(criteria)
        }
        fields["checks"] = (create_model("Checks", **answers), ...)
    if causes:
        fields["cause"] = (Literal[causes], ...)
    return create_model("Review", __base__=_MODELS[kind], **fields)


@dataclass(frozen=True, slots=True)
class Checked:
    """A checked output: its `value` with normalized evidence, or the problems in it."""

    value: dict[str, Any] | None = None
    problems: tuple[str, ...] = ()


def check_output(data: bytes, schema: Schema, places: Mapping[str, Path]) -> Checked:
    """Check a critic's output. `places` are the host's directories that it saw, by their names below `INPUT`."""
    try:
        output = schema.model_validate(json.loads(data))
    except ValidationError as error:
        return Checked(problems=tuple(describe(error).split("; ")[:_PROBLEMS]))
    except (ValueError, RecursionError) as error:
        return Checked(problems=(f"the output is not JSON: {error}",))
    assert isinstance(output, _Output)
    known = _Places(places)
    problems = [
        f"findings[{number}].evidence[{place}]: {problem}"
        for number, finding in enumerate(output.findings)
        for place, evidence in enumerate(finding.evidence)
        for problem in known.problems(evidence)
    ]
    if problems:
        return Checked(problems=tuple(problems[:_PROBLEMS]))
    try:
        return Checked(output.model_dump(mode="json", by_alias=True, exclude_none=True))
    except (ValueError, RecursionError) as error:
        return Checked(problems=(f"the output has an invalid value: {error}",))


@dataclass(slots=True)
class _Places:
    """Looks up evidence in the directories that the critic saw."""

    places: Mapping[str, Path]
    _steps: dict[str, dict[int, str]] = field(default_factory=dict)
    _lines: dict[str, list[str]] = field(default_factory=dict)

    def problems(self, evidence: Evidence) -> Iterator[str]:
        """The problems of a piece of evidence, which is normalized if there are none."""
        if evidence.file:
            located = self._locate(evidence.file)
            if located is None:
                yield f"there is no file {evidence.file!r} below {INPUT}"
                return
            evidence.file = located
        if evidence.step is not None:
            yield from self._step_problems(evidence, evidence.step)
        elif evidence.line is not None or evidence.quote:
            yield from self._line_problems(evidence, str(evidence.file))

    def _locate(self, file: str) -> str | None:
        path = PurePosixPath(file.removeprefix(f"{INPUT}/"))
        if path.is_absolute() or ".." in path.parts or "\0" in file or not path.parts:
            return None
        names = [str(path)] if path.parts[0] in self.places else [f"{place}/{path}" for place in self.places]
        return next((name for name in names if self._is_file(name)), None)

    def _is_file(self, name: str) -> bool:
        place, _, inside = name.partition("/")
        try:
            with Tree(self.places[place].resolve()) as tree:
                found = tree.find(inside) if inside else None
        except OSError:
            return False
        return found is not None and found.kind == "file"

    def _step_problems(self, evidence: Evidence, step: int) -> Iterator[str]:
        if evidence.file and evidence.file.endswith("trajectory.json"):
            files = [evidence.file]
        else:
            trial = self.places.get("trial")
            files = [f"trial/{name}" for name in find_trajectories(trial)] if trial else []
        having_step = [name for name in files if step in self._steps_of(name)]
        if not files:
            yield f"step {step} does not exist: the trial has no trajectory, so cite a file and a line"
        elif not having_step:
            known = sorted(set().union(*(self._steps_of(name) for name in files)))
            steps = f"{known[0]} to {known[-1]}" if known else "none"
            yield f"step {step} does not exist: the steps of {', '.join(files)} are {steps}"
        elif matches := [name for name in having_step if _plain(evidence.quote or "") in self._steps_of(name)[step]]:
            evidence.file, evidence.line = matches[0], None
        else:
            yield f"the quote {str(evidence.quote)[:80]!r} is not in step {step} of {', '.join(having_step)}"

    def _steps_of(self, name: str) -> dict[int, str]:
        """The texts of a trajectory's steps, both plain and as encoded JSON, by step id."""
        if name not in self._steps:
            try:
                steps = enumerate(json.loads(self._read(name))["steps"], 1)
                rows = [(step.get("step_id", number), step) for number, step in steps if isinstance(step, dict)]
                self._steps[name] = {
                    number: _plain(" ".join((*_texts(step), json.dumps(step))))
                    for number, step in rows
                    if isinstance(number, int)
                }
            except (OSError, TreeError, ValueError, TypeError, KeyError, RecursionError):
                self._steps[name] = {}
        return self._steps[name]

    def _line_problems(self, evidence: Evidence, name: str) -> Iterator[str]:
        if name not in self._lines:
            try:
                self._lines[name] = self._read(name).decode(errors="replace").split("\n")
            except (OSError, TreeError):
                yield f"{name} cannot be read or is larger than {_FILE_LIMIT >> 20} MB"
                return
        lines, line, quote = self._lines[name], evidence.line, _plain(evidence.quote or "")
        if line is not None and line > len(lines):
            yield f"{name} has {len(lines)} lines, so there is no line {line}"
            return
        start, end = (0, len(lines)) if line is None else (max(line - 1 - _NEAR, 0), line + _NEAR)
        matches = [number for number, text in enumerate(lines[start:end], start + 1) if quote in _plain(text)]
        if matches and quote:
            evidence.line = min(matches, key=lambda number: abs(number - (line or 0)))
        elif quote not in _plain("\n".join(lines[start:end])):
            where = f" near line {line}" if line else ""
            yield f"the quote {str(evidence.quote)[:80]!r} is not in {name}{where}"

    def _read(self, name: str) -> bytes:
        place, _, inside = name.partition("/")
        with Tree(self.places[place].resolve()) as tree:
            return tree.read(inside, _FILE_LIMIT)


def find_trajectories(trial: Path) -> list[str]:
    """The trajectory files of a trial and of its steps."""
    with Tree(trial.resolve()) as tree:
        names = [f"{place}{TRAJECTORY}" for place in step_places(tree)]
        return [name for name in names if (found := tree.find(name)) and found.kind == "file"]


def _texts(value: Any) -> Iterator[str]:
    """All texts in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)


def _plain(text: str) -> str:
    return " ".join(text.split())
