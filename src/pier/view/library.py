"""The content of `pier view PATH`: a directory of jobs, one job, one trial, a workspace, or a single trajectory file.

All of them are read as jobs with trials, so every page works for each. Names come from URLs: they must be entries of
the directory, and no link is followed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pier.errors import JobError, UsageError
from pier.files import is_plain_name
from pier.job.ledger import JOURNAL, current_owner
from pier.job.view import CONFIG, LOCK, RESULT, JobView, TrialView, open_place
from pier.tree import Tree, TreeError, open_regular
from pier.view.files import file_stamp

Kind = Literal["jobs", "job", "trial", "trajectory"]


class NotFoundError(UsageError):
    """The requested page does not exist."""

    code = "not_found_page"


@dataclass(frozen=True, slots=True)
class Library:
    """The jobs that the viewer shows."""

    root: Path
    kind: Kind
    names: tuple[str, ...] = ()
    """The jobs in `root` to show; empty for all."""
    loose: bool = False
    """Whether the jobs are plain directories of trials."""
    trial_name: str | None = None
    only: bool = False
    """Whether `trial_name` is the only trial to show, since it belongs to no job."""
    file: Path | None = None
    """The trajectory file, if the path was one."""

    @classmethod
    def open(cls, path: Path) -> Library:
        """The library at a path; `UsageError` if it holds nothing to show."""
        path = path.absolute()
        if path.is_file():
            _check_trajectory(path)
            return cls(path.parent.parent, "trajectory", (path.parent.name,), True, path.stem, True, path)
        if not path.is_dir():
            raise UsageError(f"{path}: no such file or directory", hint="pier view jobs")
        path = path.resolve()
        found = open_place(path)
        if isinstance(found, TrialView):
            only = not _is_job(path.parent)
            return cls(path.parent.parent, "trial", (path.parent.name,), only, path.name, only)
        if found.is_job or found.directory != path or (found.state != "empty" and not _holds_jobs(path)):
            return cls(found.directory.parent, "job", (found.directory.name,), not found.is_job)
        return cls(path, "jobs")

    @property
    def start(self) -> str:
        """The path of the first page."""
        if self.kind == "jobs":
            return "/"
        tail = f"/{self.trial_name}" if self.trial_name else ""
        return f"/jobs/{self.names[0]}{tail}"

    def job_names(self) -> list[str]:
        """The names of all candidate job directories."""
        if self.names:
            return list(self.names)
        with os.scandir(self.root) as entries:
            return sorted(entry.name for entry in entries if entry.name[0] != "." and entry.is_dir())

    def job(self, name: str) -> JobView:
        """A job; `NotFoundError` if the name is unknown."""
        if not is_plain_name(name) or (self.names and name not in self.names):
            raise NotFoundError(f"{self.root} has no job {name}")
        try:
            return JobView.of_trials(self.root / name) if self.loose else JobView.open(self.root / name)
        except (JobError, OSError) as error:
            raise NotFoundError(str(error)) from error

    def trial(self, job: str, name: str, *, known: bool = False) -> TrialView:
        """A trial; `NotFoundError` if the name is unknown. With `known` the trial is opened without reading its job."""
        if self.file is not None:
            if (job, name) != (self.names[0], self.trial_name):
                raise NotFoundError(f"{self.root} has no trial {name}")
            return TrialView(self.file.parent, name, name, "unknown", None, None, "done")
        known_job = is_plain_name(job) and (not self.names or job in self.names)
        if not known_job or not is_plain_name(name) or (self.only and name != self.trial_name):
            raise NotFoundError(f"{job} has no trial {name}")
        try:
            if self.only or (known and self._is_directory(job, name)):
                return TrialView.open(self.root / job / name)
            return self.job(job).trial(name)
        except (JobError, UsageError, OSError) as error:
            raise NotFoundError(str(error)) from error

    def _is_directory(self, job: str, name: str) -> bool:
        with Tree(self.root / job) as tree:
            found = tree.find(name)
        return found is not None and found.kind == "directory"

    def stamp(self, name: str, *, deep: bool) -> str:
        """A stamp that changes when a job does. Jobs of other programs have no journal; with `deep` their stamps cover
        the result of every trial."""
        directory = self.root / name
        parts = [file_stamp(directory / file) for file in (JOURNAL, RESULT, LOCK, CONFIG)]
        owner = current_owner(directory) if parts[0] else None
        parts.append(str(owner or ""))
        if deep and not parts[0]:
            with os.scandir(directory) as entries:
                names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
            parts += [f"{each}={file_stamp(directory / each / RESULT)}" for each in names]
        return "|".join(parts)


def _is_job(path: Path) -> bool:
    try:
        return JobView.open(path).state != "empty"
    except JobError:
        return False


def _holds_jobs(path: Path) -> bool:
    return any(_is_job(each) for each in path.iterdir() if each.name[0] != "." and each.is_dir())


def _check_trajectory(path: Path) -> None:
    from pier.trajectory.paged import scan

    try:
        with open_regular(path) as stream:
            found = scan(stream)
    except (OSError, TreeError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {error}", hint=f"pier trajectory validate {path}") from error
    if not len(found):
        raise UsageError(f"{path}: expected a trajectory with steps", hint=f"pier trajectory validate {path}")
