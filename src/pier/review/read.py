"""Reads the results of reviews, for the command line and the viewer.

No file is trusted: a missing, broken or oversized one is a value that is missing, never an error, and no link is
followed. Runs of datacurve pier read the same. Texts come from models that saw hostile text: escape them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from pier.files import is_plain_name
from pier.review.output import CriterionAnswer, CritiqueFinding
from pier.review.publish import ANALYSIS, CRITIQUES
from pier.tree import Tree, TreeError

_LIMIT = 8 << 20
_TEXT_LIMIT = 1 << 20
Status = Literal["completed", "failed", "running"]


@dataclass(frozen=True, slots=True)
class Critique:
    """What one critic said about one trial."""

    run: str
    trial: str
    directory: Path
    status: Status
    rating: str | None = None
    feedback: str | None = None
    tags: tuple[str, ...] = ()
    checks: dict[str, CriterionAnswer] = field(default_factory=dict)
    findings: tuple[CritiqueFinding, ...] = ()
    agent: str | None = None
    model: str | None = None
    cost_usd: float | None = None
    error: str | None = None
    markdown: str | None = None
    more: dict[str, Any] = field(default_factory=dict)
    """Further keys of its JSON."""


@dataclass(frozen=True)
class CritiqueRun:
    """One critic over the trials of a job."""

    root: Path
    name: str
    agent: str | None = None
    model: str | None = None
    criteria: tuple[str, ...] = ()
    started_at: str | None = None
    finished_at: str | None = None
    n_items: int = 0
    n_failed: int = 0

    @property
    def directory(self) -> Path:
        return self.root / CRITIQUES / self.name

    @cached_property
    def critiques(self) -> tuple[Critique, ...]:
        """All critiques of the run that were begun, by the name of the trial."""
        with Tree(self.root.resolve()) as tree:
            place = f"{CRITIQUES}/{self.name}"
            names = [entry.path.rpartition("/")[2] for entry in tree.listed(place) if entry.kind == "directory"]
            return tuple(_critique(tree, self, name) for name in names)

    @property
    def cost_usd(self) -> float | None:
        known = [critique.cost_usd for critique in self.critiques]
        return None if any(cost is None for cost in known) else sum(cost or 0.0 for cost in known)


def list_runs(root: Path) -> list[CritiqueRun]:
    """The critique runs of a job, the newest name first."""
    try:
        with Tree(root.resolve()) as tree:
            names = [entry.path.rpartition("/")[2] for entry in tree.listed(CRITIQUES) if entry.kind == "directory"]
            return [_run(tree, root, name) for name in sorted(names, reverse=True)]
    except OSError:
        return []


def read_run(root: Path, name: str) -> CritiqueRun | None:
    """One run; None if there is none of this name."""
    if not is_plain_name(name):
        return None
    try:
        with Tree(root.resolve()) as tree:
            found = tree.find(f"{CRITIQUES}/{name}")
            return _run(tree, root, name) if found is not None and found.kind == "directory" else None
    except OSError:
        return None


def read_critique(root: Path, run: str, trial: str) -> Critique | None:
    """What one run says about one trial."""
    found = read_run(root, run)
    if found is None or not is_plain_name(trial):
        return None
    with Tree(root.resolve()) as tree:
        place = tree.find(f"{CRITIQUES}/{run}/{trial}")
        return _critique(tree, found, trial) if place is not None and place.kind == "directory" else None


def critiques_of(root: Path, trial: str) -> list[Critique]:
    """What all runs say about one trial, the newest first."""
    found = (read_critique(root, run.name, trial) for run in list_runs(root))
    return [critique for critique in found if critique is not None]


@dataclass(frozen=True, slots=True)
class HeatRow:
    """The answers about one trial, in the order of the criteria; None where there is none."""

    trial: str
    rating: str | None
    outcomes: tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Trials against criteria."""

    criteria: tuple[str, ...]
    rows: tuple[HeatRow, ...]


def heat_map(run: CritiqueRun) -> HeatMap:
    """The answers of one run."""
    criteria = tuple(dict.fromkeys((*run.criteria, *(name for each in run.critiques for name in each.checks))))
    return HeatMap(
        criteria,
        tuple(
            HeatRow(
                each.trial,
                each.rating,
                tuple(each.checks[name].outcome if name in each.checks else None for name in criteria),
            )
            for each in run.critiques
        ),
    )


@dataclass(frozen=True, slots=True)
class TrialAnalysis:
    """Why a trial ended the way it did."""

    trial: str
    summary: str
    cause: str | None = None
    checks: dict[str, CriterionAnswer] = field(default_factory=dict)
    findings: tuple[CritiqueFinding, ...] = ()
    model: str | None = None
    cost_usd: float | None = None


@dataclass(frozen=True, slots=True)
class CauseCount:
    """A cause, and the trials that have it."""

    cause: str
    count: int
    trials: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class JobAnalysis:
    """Why the trials of a job ended the way they did."""

    summary: str
    causes: tuple[CauseCount, ...] = ()
    model: str | None = None
    cost_usd: float | None = None
    trials: frozenset[str] = frozenset()
    """The trials that it is about."""


def read_analysis(directory: Path) -> TrialAnalysis | None:
    """The analysis in a trial's directory."""
    value = _file(directory, ANALYSIS)
    if value is None or not isinstance(value.get("summary"), str):
        return None
    about = _table(value.get("pier"))
    return TrialAnalysis(
        trial=_text(value.get("trial_name")) or directory.name,
        summary=value["summary"],
        cause=_text(value.get("cause")),
        checks=_checks(value),
        findings=_findings(value),
        model=_text(about.get("model")),
        cost_usd=_number(about.get("cost_usd")),
    )


def read_job_analysis(root: Path) -> JobAnalysis | None:
    """The analysis in a job's directory."""
    value = _file(root, ANALYSIS)
    if value is None or not isinstance(value.get("job_summary"), str):
        return None
    about, rows = _table(value.get("pier")), value.get("causes")
    causes = [
        CauseCount(str(row.get("cause")), row["count"], tuple(map(str, row["trials"])))
        for row in (rows if isinstance(rows, list) else ())
        if isinstance(row, dict) and isinstance(row.get("count"), int) and isinstance(row.get("trials"), list)
    ]
    trials = value.get("trials")
    names = (_text(_table(row).get("trial_name")) for row in (trials if isinstance(trials, list) else ()))
    return JobAnalysis(
        summary=value["job_summary"],
        causes=tuple(causes),
        model=_text(about.get("model")),
        cost_usd=_number(about.get("cost_usd")),
        trials=frozenset(name for name in names if name is not None),
    )


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far several critics agree: the share of pairs of critics that gave the same answer, over all trials that
    both reviewed. `disputed` are the trials with different ratings."""

    runs: tuple[str, ...]
    rating: float | None
    by_criterion: dict[str, float]
    disputed: tuple[str, ...]
    n_trials: int


def agreement(runs: Iterable[CritiqueRun]) -> Agreement:
    """Compare the critiques of several runs."""
    runs = tuple(runs)
    tables = [{each.trial: each for each in run.critiques if each.status == "completed"} for run in runs]
    trials = list(dict.fromkeys(name for table in tables for name in table))
    shared = [name for name in trials if sum(name in table for table in tables) > 1]
    ratings = {name: [table[name].rating for table in tables if name in table] for name in shared}
    answers: dict[str, list[list[str]]] = {}
    for name in shared:
        found = [table[name].checks for table in tables if name in table]
        for criterion in dict.fromkeys(key for checks in found for key in checks):
            row = [str(checks[criterion].outcome) for checks in found if criterion in checks]
            answers.setdefault(criterion, []).append(row)
    return Agreement(
        runs=tuple(run.name for run in runs),
        rating=_share(ratings.values()),
        by_criterion={name: share for name, rows in answers.items() if (share := _share(rows)) is not None},
        disputed=tuple(name for name, row in ratings.items() if len(set(row)) > 1),
        n_trials=len(shared),
    )


def _share(rows: Iterable[list[Any]]) -> float | None:
    """The share of pairs within rows that are equal."""
    same = total = 0
    for row in rows:
        for place, one in enumerate(row):
            for other in row[place + 1 :]:
                total += 1
                same += one == other
    return same / total if total else None


def _run(tree: Tree, root: Path, name: str) -> CritiqueRun:
    config = _json(tree, f"{CRITIQUES}/{name}/config.json") or {}
    result = _json(tree, f"{CRITIQUES}/{name}/result.json") or {}
    agent, about = _table(config.get("agent")), _table(config.get("pier"))
    criteria = about.get("criteria")
    return CritiqueRun(
        root=root,
        name=name,
        agent=_text(agent.get("name")) or _text(agent.get("import_path")),
        model=_text(agent.get("model_name")),
        criteria=tuple(map(str, criteria)) if isinstance(criteria, list) else (),
        started_at=_text(result.get("started_at")),
        finished_at=_text(result.get("finished_at")),
        n_items=_count(result.get("n_items")),
        n_failed=_count(result.get("n_failed")),
    )


def _critique(tree: Tree, run: CritiqueRun, trial: str) -> Critique:
    place = f"{CRITIQUES}/{run.name}/{trial}"
    metadata = _json(tree, f"{place}/critique-metadata.json")
    value = _json(tree, f"{place}/artifacts/critique-result.json") or {}
    exception = _table((metadata or {}).get("exception_info"))
    usage = _table((metadata or {}).get("agent_result"))
    status: Status = "running" if metadata is None else "failed" if exception else "completed"
    rating = value.get("rating")
    tags = value.get("tags")
    named = [value.get("tag"), *(tags if isinstance(tags, list) else [tags])]
    known = ("rating", "feedback", "tag", "tags", "checks", "findings")
    return Critique(
        run=run.name,
        trial=trial,
        directory=run.directory / trial,
        status=status,
        rating=rating if rating in ("good", "bad") else None,
        feedback=_text(value.get("feedback")),
        tags=tuple(dict.fromkeys(tag for tag in named if isinstance(tag, str) and tag)),
        checks=_checks(value),
        findings=_findings(value),
        agent=run.agent,
        model=run.model,
        cost_usd=_number(usage.get("cost_usd")),
        error=_text(exception.get("exception_message")),
        markdown=_read_text(tree, f"{place}/artifacts/critique-result.md"),
        more={key: each for key, each in value.items() if key not in known},
    )


def _checks(value: dict[str, Any]) -> dict[str, CriterionAnswer]:
    found: dict[str, CriterionAnswer] = {}
    for name, row in _table(value.get("checks")).items():
        try:
            found[name] = CriterionAnswer.model_validate(row)
        except ValidationError:
            continue
    return found


def _findings(value: dict[str, Any]) -> tuple[CritiqueFinding, ...]:
    rows, found = value.get("findings"), []
    for row in rows if isinstance(rows, list) else ():
        try:
            found.append(CritiqueFinding.model_validate(row))
        except ValidationError:
            continue
    return tuple(found)


def _file(directory: Path, name: str) -> dict[str, Any] | None:
    try:
        with Tree(directory.resolve()) as tree:
            return _json(tree, name)
    except OSError:
        return None


def _json(tree: Tree, path: str) -> dict[str, Any] | None:
    try:
        value = json.loads(tree.read(path, _LIMIT))
    except (OSError, TreeError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _read_text(tree: Tree, path: str) -> str | None:
    try:
        return tree.read(path, _TEXT_LIMIT).decode(errors="replace")
    except (OSError, TreeError):
        return None


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
