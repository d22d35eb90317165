"""Finds the trials that a review is about: of a job, a workspace, or a single one; of pier, Harbor or datacurve pier.

`root` is the directory that holds the trials. Results of reviews are written there, next to what was reviewed.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from pier.errors import JobError, TaskError, UsageError
from pier.home import private_directories
from pier.job.ledger import Outcome
from pier.job.view import WORKSPACE_TRIALS, JobView, TrialView, open_place
from pier.task import load_task
from pier.tree import Tree
from pier.trial.result import TrialResult, read_result

Only = Literal["passed", "failed", "errored"]


@dataclass(frozen=True, slots=True)
class SourceTrial:
    """A finished trial that can be reviewed."""

    name: str
    directory: Path
    task: str
    agent: str
    model: str | None
    outcome: Outcome | None

    @property
    def passed(self) -> bool:
        rewards = self.outcome.rewards if self.outcome and self.outcome.fault is None else None
        return bool(rewards) and all(value >= 1 for value in (rewards or {}).values())

    def is_of(self, only: Only) -> bool:
        """Whether it counts as passed, as errored (any error), or as failed (a verdict below 1)."""
        outcome = self.outcome
        if only == "passed" or outcome is None:
            return only == "passed" and self.passed
        return outcome.fault is not None if only == "errored" else not self.passed and outcome.rewards is not None


@dataclass(frozen=True, slots=True)
class Source:
    """The finished trials below `root`. `single` if one trial was named rather than all of them."""

    root: Path
    trials: tuple[SourceTrial, ...]
    single: bool = False


@dataclass(frozen=True, slots=True)
class TrialFilter:
    """Which trials of a source are wanted. `passing` False means every trial that did not pass."""

    names: Sequence[str] = ()
    tasks: Sequence[str] = ()
    agents: Sequence[str] = ()
    models: Sequence[str] = ()
    only: Only | None = None
    passing: bool | None = None
    seed: int | None = None
    limit: int | None = None

    def apply(self, trials: Iterable[SourceTrial]) -> list[SourceTrial]:
        """The wanted trials, shuffled with the seed if there is one. `UsageError` for names that none has."""
        found = list(trials)
        if unknown := set(self.names) - {trial.name for trial in found}:
            raise UsageError(f"unknown trial {min(unknown)!r}", hint="pier job show JOB --trials", code="no_trial")
        if self.names:
            by_name = {trial.name: trial for trial in found}
            found = [by_name[name] for name in dict.fromkeys(self.names)]
        found = [trial for trial in found if self._takes(trial)]
        if self.seed is not None:
            random.Random(self.seed).shuffle(found)
        return found if self.limit is None else found[: self.limit]

    def _takes(self, trial: SourceTrial) -> bool:
        return (
            (not self.tasks or any(fnmatchcase(name, glob) for glob in self.tasks for name in _forms(trial.task)))
            and (not self.agents or bool(_forms(trial.agent) & _lower(self.agents)))
            and (not self.models or bool(_forms(trial.model or "") & _lower(self.models)))
            and (self.only is None or trial.is_of(self.only))
            and (self.passing is None or trial.passed == self.passing)
        )


def _forms(name: str) -> set[str]:
    """A name as users may write it: whole, and without what stands before its first or last slash."""
    name = name.lower()
    return {name, name.partition("/")[2] or name, name.rpartition("/")[2]}


def _lower(names: Iterable[str]) -> set[str]:
    return {name.lower() for name in names}


def open_source(path: Path) -> Source:
    """The trials of a job, a workspace, a directory of trials, or one trial."""
    if not path.is_dir():
        raise UsageError(f"{path}: no such directory", hint="pier job list")
    found = open_place(path)
    if isinstance(found, TrialView):
        directory = path.resolve()
        trial = SourceTrial(directory.name, directory, found.task, found.agent, found.model, found.outcome)
        return Source(directory.parent, (trial,), single=True)
    around = (place / WORKSPACE_TRIALS for place in path.resolve().parents)
    if not found.is_job and found.directory == path and (trials := next(filter(Path.is_dir, around), None)):
        found = JobView.of_trials(trials)
    return _source(found)


def _source(view: JobView) -> Source:
    root = view.directory.resolve()
    if view.state == "empty":
        about = f"{root} is not a job, a trial or a workspace"
        raise JobError(about, code="not-a-job", hint="pier job list, or pier capture")
    with Tree(root) as tree:
        real = {entry.path for entry in tree.listed() if entry.kind == "directory"}
    rows = [row for row in view.trials if row.outcome is not None and row.name in real]
    trials = (SourceTrial(row.name, root / row.name, row.task, row.agent, row.model, row.outcome) for row in rows)
    return Source(root, tuple(trials))


def find_result(directory: Path) -> TrialResult | None:
    """The result of a trial; None if it has none that can be read."""
    with contextlib.suppress(JobError):
        return read_result(directory)
    return None


def task_directory(result: TrialResult, root: Path) -> Path | None:
    """The directory of a trial's task on this machine, if it is still there and is a task of that name. Harbor keeps
    paths as they were typed: they count from here, or from where `jobs` is. What a trial's files say is not trusted
    further: nothing but a task is shown to a critic."""
    reference = result.config.get("task")
    path = reference.get("path") if isinstance(reference, dict) else None
    if not isinstance(path, str) or not path or "\0" in path:
        return None
    for base in (Path.cwd(), root.parent.parent):
        try:
            task = load_task(base / path, verify=False)
        except (TaskError, OSError, ValueError):
            continue
        private = any(task.path.is_relative_to(path.resolve()) for path in private_directories())
        if task.name == result.task_name and not private:
            return task.path
    return None
