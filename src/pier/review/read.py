"""Reads the results of reviews, for the command line and the viewer.

    <root>/.critiques/RUN/config.json, result.json, prompt.md, rubric.json
    <root>/.critiques/RUN/TRIAL/critique-metadata.json, critique-config.json, critique.log, agent/, artifacts/
    <root>/TRIAL/analysis.json, analysis.md          one trial
    <root>/analysis.json, analysis.md                the job

No file is trusted: a missing, broken or oversized file reads as a missing value, never as an error, and no link is
followed. Runs of datacurve pier have the same layout. Texts come from models that saw hostile text: escape them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AliasPath, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import PydanticUseDefault

from pier.figures import mean, total_cost
from pier.files import is_plain_name
from pier.review.output import CriterionAnswer, CritiqueFinding
from pier.tree import Tree

CRITIQUES = ".critiques"
ANALYSIS = "analysis.json"
READ_LIMIT = 8 << 20


def _fitting(model: type[BaseModel]) -> BeforeValidator:
    """A validator that drops the rows of a list or object that do not fit a model."""

    def fits(row: Any) -> bool:
        try:
            model.model_validate(row)
        except ValidationError:
            return False
        return True

    def fitting(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: row for name, row in value.items() if fits(row)}
        return [row for row in value if fits(row)] if isinstance(value, list) else value

    return BeforeValidator(fitting)


def _trial_names(value: Any) -> Any:
    rows = [row.get("trial_name") for row in value if isinstance(row, dict)] if isinstance(value, list) else []
    return [name for name in rows if isinstance(name, str)]


Checks = Annotated[dict[str, CriterionAnswer], _fitting(CriterionAnswer)]
Findings = Annotated[tuple[CritiqueFinding, ...], _fitting(CritiqueFinding)]
Money = Annotated[float | None, Field(strict=True)]


class _FromFile(BaseModel):
    """A model whose fields fall back to their defaults if a value has the wrong type."""

    model_config = ConfigDict(extra="ignore", frozen=True, protected_namespaces=())

    @field_validator("*", mode="wrap")
    @classmethod
    def _or_default(cls, value: Any, handler: Any) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticUseDefault from None


class Critique(_FromFile):
    """The critique of one trial. `more` has the remaining keys of its JSON."""

    run: str
    trial: str
    directory: Path
    status: Literal["completed", "failed", "running"]
    rating: Literal["good", "bad"] | None = None
    feedback: str | None = None
    tags: tuple[str, ...] = ()
    checks: Checks = {}
    findings: Findings = ()
    agent: str | None = None
    model: str | None = None
    cost_usd: Money = None
    error: str | None = None
    markdown: str | None = None
    more: dict[str, Any] = {}


class CritiqueRun(_FromFile):
    """One critic over the trials of a job."""

    root: Path
    name: str
    agent: str | None = None
    model: str | None = Field(None, validation_alias=AliasPath("config", "agent", "model_name"))
    criteria: tuple[str, ...] = Field((), validation_alias=AliasPath("config", "pier", "criteria"))
    started_at: str | None = Field(None, validation_alias=AliasPath("result", "started_at"))
    finished_at: str | None = Field(None, validation_alias=AliasPath("result", "finished_at"))
    n_items: int = Field(0, validation_alias=AliasPath("result", "n_items"))
    n_failed: int = Field(0, validation_alias=AliasPath("result", "n_failed"))

    @property
    def directory(self) -> Path:
        return self.root / CRITIQUES / self.name

    @cached_property
    def critiques(self) -> tuple[Critique, ...]:
        """All started critiques of the run, by name of the trial."""
        with Tree(self.root.resolve()) as tree:
            return tuple(_critique(tree, self, name) for name in _directories(tree, f"{CRITIQUES}/{self.name}"))

    @property
    def cost_usd(self) -> float | None:
        return total_cost(critique.cost_usd for critique in self.critiques)


def _directories(tree: Tree, below: str) -> list[str]:
    return [entry.path.rpartition("/")[2] for entry in tree.listed(below) if entry.kind == "directory"]


def list_runs(root: Path) -> list[CritiqueRun]:
    """The critique runs of a job, newest name first."""
    try:
        with Tree(root.resolve()) as tree:
            return [_run(tree, root, name) for name in sorted(_directories(tree, CRITIQUES), reverse=True)]
    except OSError:
        return []


def read_run(root: Path, name: str) -> CritiqueRun | None:
    """The run with a name; None if unknown."""
    return next((run for run in list_runs(root) if run.name == name), None)


def critiques_of(root: Path, trial: str) -> list[Critique]:
    """The critiques of one trial in all runs, newest first."""
    runs = list_runs(root) if is_plain_name(trial) else []
    if not runs:
        return []
    with Tree(root.resolve()) as tree:
        found = ((run, tree.find(f"{CRITIQUES}/{run.name}/{trial}")) for run in runs)
        return [_critique(tree, run, trial) for run, entry in found if entry and entry.kind == "directory"]


def _run(tree: Tree, root: Path, name: str) -> CritiqueRun:
    config = tree.read_object(f"{CRITIQUES}/{name}/config.json", READ_LIMIT) or {}
    result = tree.read_object(f"{CRITIQUES}/{name}/result.json", READ_LIMIT) or {}
    agent = _table(config, "agent")
    values = {"root": root, "name": name, "agent": agent.get("name") or agent.get("import_path")}
    return CritiqueRun.model_validate({**values, "config": config, "result": result})


def _table(value: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = value.get(key)
    return found if isinstance(found, dict) else {}


def _critique(tree: Tree, run: CritiqueRun, trial: str) -> Critique:
    place = f"{CRITIQUES}/{run.name}/{trial}"
    metadata = tree.read_object(f"{place}/critique-metadata.json", READ_LIMIT)
    value = tree.read_object(f"{place}/artifacts/critique-result.json", READ_LIMIT) or {}
    exception, usage = _table(metadata or {}, "exception_info"), _table(metadata or {}, "agent_result")
    tags = value.get("tags")
    named = [value.get("tag"), *(tags if isinstance(tags, list) else [tags])]
    known = {key: value.pop(key, None) for key in ("rating", "feedback", "checks", "findings", "tag", "tags")}
    return Critique.model_validate(
        known
        | {
            "run": run.name,
            "trial": trial,
            "directory": run.directory / trial,
            "status": "running" if metadata is None else "failed" if exception else "completed",
            "tags": list(dict.fromkeys(tag for tag in named if isinstance(tag, str) and tag)),
            "agent": run.agent,
            "model": run.model,
            "cost_usd": usage.get("cost_usd"),
            "error": exception.get("exception_message"),
            "markdown": tree.read_text(f"{place}/artifacts/critique-result.md", READ_LIMIT),
            "more": value,
        }
    )


@dataclass(frozen=True, slots=True)
class HeatRow:
    """The answers about one trial, in the order of the criteria; None if missing."""

    trial: str
    rating: str | None
    outcomes: tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class HeatMap:
    """The answers of one run: trials by criteria."""

    criteria: tuple[str, ...]
    rows: tuple[HeatRow, ...]


def heat_map(run: CritiqueRun) -> HeatMap:
    criteria = tuple(dict.fromkeys((*run.criteria, *(name for each in run.critiques for name in each.checks))))
    rows = [HeatRow(each.trial, each.rating, tuple(map(_answers(each).get, criteria))) for each in run.critiques]
    return HeatMap(criteria, tuple(rows))


@dataclass(frozen=True, slots=True)
class Agreement:
    """The agreement of several critics. `shares` has, for the verdict (a rating or a cause) and each criterion, the
    share of pairs of critics with the same answer, over all trials that both reviewed. `disputed` are the trials with
    different verdicts."""

    critics: tuple[str, ...]
    n_trials: int
    shares: dict[str, float]
    disputed: tuple[str, ...]


Answers = Mapping[str, Mapping[str, str | None]]
"""The answers of one critic: for each trial, by name of the question."""


def agreement(critics: Mapping[str, Answers], verdict: str) -> Agreement:
    """Compare critics. `verdict` is the question whose answers decide whether a trial is disputed."""
    trials = dict.fromkeys(trial for answers in critics.values() for trial in answers)
    pairs = [
        (trial, one[trial], other[trial])
        for trial in trials
        for one, other in combinations(critics.values(), 2)
        if trial in one and trial in other
    ]
    same: dict[str, list[bool]] = {verdict: []}
    for _, one, other in pairs:
        for question in one:
            if question in other:
                same.setdefault(question, []).append(one[question] == other[question])
    return Agreement(
        critics=tuple(critics),
        n_trials=len({trial for trial, _, _ in pairs}),
        shares={question: share for question, row in same.items() if (share := mean(row)) is not None},
        disputed=tuple(dict.fromkeys(trial for trial, one, other in pairs if one[verdict] != other[verdict])),
    )


def compare_runs(runs: Iterable[CritiqueRun]) -> Agreement:
    """Compare the critiques of several runs."""
    done = {run.name: [each for each in run.critiques if each.status == "completed"] for run in runs}
    answers = {name: {each.trial: _answers(each) for each in found} for name, found in done.items()}
    return agreement(answers, "rating")


def _answers(critique: Critique) -> dict[str, str | None]:
    """The rating and the outcome of each criterion."""
    return {"rating": critique.rating, **{name: check.outcome for name, check in critique.checks.items()}}


class TrialAnalysis(_FromFile):
    """The analysis of one trial. `agreement` has the share of agreeing pairs of `answers`, by cause and criterion."""

    trial: str
    summary: str
    cause: str | None = None
    checks: Checks = {}
    findings: Findings = ()
    model: str | None = Field(None, validation_alias=AliasPath("pier", "model"))
    cost_usd: Money = Field(None, validation_alias=AliasPath("pier", "cost_usd"))
    agreement: dict[str, float] = {}
    answers: tuple[dict[str, Any], ...] = ()

    def as_file(self) -> dict[str, Any]:
        """The analysis in the format of its file."""
        value = self.model_dump(mode="json", exclude={"trial", "model", "cost_usd"}, exclude_defaults=True)
        about = {"model": self.model, "cost_usd": self.cost_usd}
        return {"trial_name": self.trial, "checks": {}, **value, "pier": about}


class CauseCount(BaseModel):
    """A cause and its trials."""

    cause: str
    count: int
    trials: tuple[str, ...]


class JobAnalysis(_FromFile):
    """The analysis of a job. `trials` are the trials that it covers."""

    summary: str = Field(validation_alias="job_summary")
    causes: Annotated[tuple[CauseCount, ...], _fitting(CauseCount)] = ()
    model: str | None = Field(None, validation_alias=AliasPath("pier", "model"))
    cost_usd: Money = Field(None, validation_alias=AliasPath("pier", "cost_usd"))
    trials: Annotated[tuple[str, ...], BeforeValidator(_trial_names)] = ()


def read_analysis(directory: Path) -> TrialAnalysis | None:
    """The analysis of a trial; None if it has none."""
    value = _analysis(directory, "summary")
    return TrialAnalysis.model_validate({**value, "trial": directory.name}) if value else None


def read_job_analysis(root: Path) -> JobAnalysis | None:
    """The analysis of a job; None if it has none."""
    value = _analysis(root, "job_summary")
    return JobAnalysis.model_validate(value) if value else None


def _analysis(directory: Path, key: str) -> dict[str, Any] | None:
    try:
        with Tree(directory.resolve()) as tree:
            value = tree.read_object(ANALYSIS, READ_LIMIT)
    except OSError:
        return None
    return value if value and isinstance(value.get(key), str) else None
