"""Finds the trials to review: those of a job or a workspace, or a single one; of pier, Harbor or datacurve pier.

`root` is the directory of the trials. Results of reviews are written below it.
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
    """A finished trial."""

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
        """Whether the trial passed, errored (any error), or failed (a verdict below 1)."""
        outcome = self.outcome
        if only == "passed" or outcome is None:
            return only == "passed" and self.passed
        return outcome.fault is not None if only == "errored" else not self.passed and outcome.rewards is not None


@dataclass(frozen=True, slots=True)
class Source:
    """The finished trials below `root`. `single` means that the user named one trial."""

    root: Path
    trials: tuple[SourceTrial, ...]
    single: bool = False


@dataclass(frozen=True, slots=True)
class TrialFilter:
    """A filter of trials. `passing=False` selects every trial that did not pass."""

    names: Sequence[str] = ()
    tasks: Sequence[str] = ()
    agents: Sequence[str] = ()
    models: Sequence[str] = ()
    only: Only | None = None
    passing: bool | None = None
    seed: int | None = None
    limit: int | None = None

    def apply(self, trials: Iterable[SourceTrial]) -> list[SourceTrial]:
        """The matching trials, shuffled if there is a seed. `UsageError` for unknown names."""
        found = list(trials)
        if unknown := set(self.names) - {trial.name for trial in found}:
            raise UsageError(f"unknown trial {min(unknown)!r}", hint="pier job show JOB --trials", code="no_trial")
        if self.names:
            by_name = {trial.name: trial for trial in found}
            found = [by_name[name] for name in dict.fromkeys(self.names)]
        found = [trial for trial in found if self._matches(trial)]
        if self.seed is not None:
            random.Random(self.seed).shuffle(found)
        return found if self.limit is None else found[: self.limit]

    def _matches(self, trial: SourceTrial) -> bool:
        return (
            (not self.tasks or any(fnmatchcase(name, glob) for glob in self.tasks for name in _forms(trial.task)))
            and (not self.agents or any(name.lower() in _forms(trial.agent) for name in self.agents))
            and (not self.models or any(name.lower() in _forms(trial.model or "") for name in self.models))
            and (self.only is None or trial.is_of(self.only))
            and (self.passing is None or trial.passed == self.passing)
        )


def _forms(name: str) -> set[str]:
    """The accepted spellings of a name: in full, and without the prefix up to its first or last slash."""
    name = name.lower()
    return {name, name.partition("/")[2] or name, name.rpartition("/")[2]}


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
    root = found.directory.resolve()
    if found.state == "empty":
        about = f"{root} is not a job, a trial or a workspace"
        raise JobError(about, code="not-a-job", hint="pier job list, or pier capture")
    with Tree(root) as tree:
        directories = {entry.path for entry in tree.listed() if entry.kind == "directory"}
    rows = [row for row in found.trials if row.outcome is not None and row.name in directories]
    trials = (SourceTrial(row.name, root / row.name, row.task, row.agent, row.model, row.outcome) for row in rows)
    return Source(root, tuple(trials))


def find_result(directory: Path) -> TrialResult | None:
    """The result of a trial; None if it is missing or broken."""
    with contextlib.suppress(JobError):
        return read_result(directory)
    return None


def task_directory(result: TrialResult, root: Path) -> Path | None:
    """The directory of a trial's task on this machine; None if the path is not a task of that name.

    Harbor stores paths as typed, relative to the working directory or the parent of `jobs`. The path in a trial's file
    is not trusted: only a task outside of private directories is shown to a critic."""
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
