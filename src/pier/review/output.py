"""What a critic has to write, and the check that it did: the JSON fits its schema, and all evidence exists.

A finding cites a step of the trial's trajectory, or a file with a line and perhaps a quote. What is cited is looked up
in what the critic was shown, on the host: a step that the trajectory lacks, a line past the end of a file or a quote
that is not there is a problem that the critic hears of. Nothing below is resolved through a link.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator

from pier.task.load import describe
from pier.tree import Tree, TreeError

INPUT = "/critique/input"
"""Where a critic finds what it reviews: `trial` and `task` below it, each read-only."""

OUTPUT_LIMIT = 1 << 20
_FILE_LIMIT = 64 << 20
_PROBLEMS = 12
_NEAR = 3
"""A quote may be this many lines away from the line that is cited."""

Outcomes = Literal["pass", "fail", "not_applicable"]
Severity = Literal["low", "medium", "high"]
Schema: TypeAlias = type[BaseModel]


class Evidence(BaseModel):
    """Where a finding can be seen: a step of the trajectory (`step_id`), or a file and a line."""

    model_config = ConfigDict(extra="ignore")

    step: int | None = None
    file: str | None = Field(default=None, description="below trial/ or task/")
    line: int | None = Field(default=None, ge=1)
    quote: str | None = Field(default=None, description="a few words of that line, as they are")

    @model_validator(mode="after")
    def _has_a_place(self) -> Evidence:
        if self.step is None and not self.file:
            raise ValueError("expected a step or a file")
        return self

    @property
    def place(self) -> str:
        """The place as text for people."""
        if self.step is not None:
            return f"step {self.step}" + (f" of {self.file}" if self.file else "")
        return f"{self.file}:{self.line}" if self.line else str(self.file)


class CriterionAnswer(BaseModel):
    """The answer to one criterion."""

    model_config = ConfigDict(extra="ignore")

    outcome: Outcomes
    explanation: str = Field(min_length=1)


class CritiqueFinding(BaseModel):
    """One thing that the critic found."""

    model_config = ConfigDict(extra="ignore")

    criterion: str = ""
    severity: Severity = "medium"
    summary: str = Field(min_length=1)
    evidence: list[Evidence] = Field(min_length=1)


class _Output(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())

    findings: list[CritiqueFinding] = Field(default_factory=list)


class CritiqueOutput(_Output):
    """datacurve pier's required fields, with findings."""

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


class TaskCheckOutput(_Output):
    pass


class JobAnalysisOutput(_Output):
    job_summary: str = Field(min_length=1)


Kind = Literal["critique", "analysis", "check", "job"]
_MODELS: dict[Kind, Schema] = {
    "critique": CritiqueOutput,
    "analysis": AnalysisOutput,
    "check": TaskCheckOutput,
    "job": JobAnalysisOutput,
}
OUTPUTS: dict[Kind, str] = {
    "critique": "critique-result.json",
    "analysis": "analysis.json",
    "check": "check-result.json",
    "job": "job-analysis.json",
}
"""The file that a critic writes, in the directory of artifacts."""


def schema_of(kind: Kind, criteria: tuple[str, ...], causes: tuple[str, ...]) -> Schema:
    """The model of what a critic must write: an answer to each criterion, and one of the causes if there are any."""
    fields: dict[str, Any] = {}
    if criteria:
        answers: dict[str, Any] = {
            f"criterion_{number}": (CriterionAnswer, Field(alias=name)) for number, name in enumerate(criteria)
        }
        fields["checks"] = (create_model("Checks", **answers), ...)
    if causes:
        fields["cause"] = (Literal[causes], ...)
    base = _MODELS[kind]
    return create_model(base.__name__, __base__=base, **fields) if fields else base


@dataclass(frozen=True, slots=True)
class Checked:
    """A critic's output: `value` with the cited paths in one form, or the reasons why it is not accepted."""

    value: dict[str, Any] | None = None
    problems: tuple[str, ...] = ()


def check_output(data: bytes, schema: Schema, places: Mapping[str, Path]) -> Checked:
    """Check what a critic wrote. `places` are the directories of this machine that it saw, by their names below
    `INPUT`."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        return Checked(problems=(f"it is not JSON: {error}",))
    try:
        output = schema.model_validate(value)
    except ValidationError as error:
        return Checked(problems=tuple(describe(error).split("; ")[:_PROBLEMS]))
    assert isinstance(output, _Output)
    known = _Places(places)
    problems = [
        f"findings[{number}].evidence[{place}]: {problem}"
        for number, finding in enumerate(output.findings)
        for place, evidence in enumerate(finding.evidence)
        if (problem := known.problem(evidence)) is not None
    ]
    if problems:
        return Checked(problems=tuple(problems[:_PROBLEMS]))
    try:
        return Checked(output.model_dump(mode="json", by_alias=True, exclude_none=True))
    except (ValueError, RecursionError) as error:
        return Checked(problems=(f"it holds a value that cannot be kept: {error}",))


@dataclass(slots=True)
class _Places:
    """Looks up evidence in the directories that the critic saw."""

    places: Mapping[str, Path]
    _steps: dict[str, frozenset[int]] = field(default_factory=dict)
    _lines: dict[str, list[str] | None] = field(default_factory=dict)

    def problem(self, evidence: Evidence) -> str | None:
        """Why the evidence does not hold; None if it does. Its file gets the form `trial/...` or `task/...`."""
        if evidence.file:
            found = self._locate(evidence.file)
            if found is None:
                return f"there is no file {evidence.file!r} below {INPUT}"
            evidence.file = found
        if evidence.step is not None:
            return self._step_problem(evidence.step, evidence.file)
        return self._line_problem(str(evidence.file), evidence.line, evidence.quote)

    def _locate(self, file: str) -> str | None:
        path = PurePosixPath(file.removeprefix(f"{INPUT}/").removeprefix("./"))
        if path.is_absolute() or ".." in path.parts or "\0" in file:
            return None
        named = bool(path.parts) and path.parts[0] in self.places
        for name in (str(path),) if named else (f"{place}/{path}" for place in self.places):
            if self._kind(name) == "file":
                return name
        return None

    def _kind(self, name: str) -> str | None:
        place, _, inside = name.partition("/")
        try:
            with Tree(self.places[place].resolve()) as tree:
                found = tree.find(inside) if inside else None
        except OSError:
            return None
        return found.kind if found else None

    def _step_problem(self, step: int, file: str | None) -> str | None:
        files = [file] if file and file.endswith("trajectory.json") else self._trajectories()
        if not files:
            return f"step {step} does not exist: the trial has no trajectory, so cite a file and a line"
        if any(step in self._steps_of(name) for name in files):
            return None
        known = sorted(set().union(*(self._steps_of(name) for name in files)))
        range_ = f"{known[0]} to {known[-1]}" if known else "none"
        return f"step {step} does not exist: the steps of {', '.join(files)} are {range_}"

    def _trajectories(self) -> list[str]:
        if "trial" not in self.places:
            return []
        with Tree(self.places["trial"].resolve()) as tree:
            names = ["agent/trajectory.json", *(f"{e.path}/agent/trajectory.json" for e in tree.listed("steps"))]
            return [f"trial/{name}" for name in names if (found := tree.find(name)) and found.kind == "file"]

    def _steps_of(self, name: str) -> frozenset[int]:
        if name not in self._steps:
            try:
                steps = json.loads(self._read(name))["steps"]
                self._steps[name] = frozenset(
                    step.get("step_id", number) for number, step in enumerate(steps, 1) if isinstance(step, dict)
                )
            except (OSError, TreeError, ValueError, TypeError, KeyError, RecursionError):
                self._steps[name] = frozenset()
        return self._steps[name]

    def _line_problem(self, name: str, line: int | None, quote: str | None) -> str | None:
        if line is None and quote is None:
            return None
        if name not in self._lines:
            try:
                self._lines[name] = self._read(name).decode(errors="replace").split("\n")
            except (OSError, TreeError):
                self._lines[name] = None
        lines = self._lines[name]
        if lines is None:
            return f"{name} cannot be read or has more than {_FILE_LIMIT >> 20} MB"
        if line is not None and line > len(lines):
            return f"{name} has {len(lines)} lines, so there is no line {line}"
        near = lines if line is None else lines[max(line - 1 - _NEAR, 0) : line + _NEAR]
        if quote and _plain(quote) not in _plain("\n".join(near)):
            return f"the quote {quote[:80]!r} is not in {name}" + (f" near line {line}" if line else "")
        return None

    def _read(self, name: str) -> bytes:
        place, _, inside = name.partition("/")
        with Tree(self.places[place].resolve()) as tree:
            return tree.read(inside, _FILE_LIMIT)


def _plain(text: str) -> str:
    return " ".join(text.split())
