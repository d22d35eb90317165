"""The content of `pier view PATH`: a directory of jobs, one job, one trial, a workspace, or a single trajectory file.

All of them are read as jobs with trials, so every page works for each. Names come from URLs: a name that is not an
entry of the directory finds nothing, and no link is followed.
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

Kind = Literal["jobs", "job", "trial", "trajectory"]


class NotFoundError(UsageError):
    """A page was asked for that does not exist."""

    code = "not_found_page"


@dataclass(frozen=True, slots=True)
class Library:
    """Where jobs are read from. `only` is the one trial that is shown, if the path was a trial outside of a job;
    `file` is the trajectory, if the path was one."""

    root: Path
    kind: Kind
    names: tuple[str, ...] = ()
    """The jobs that are shown; empty for all in `root`."""
    loose: bool = False
    """Whether the jobs are directories of trials that are not jobs."""
    trial_name: str | None = None
    only: bool = False
    file: Path | None = None

    @classmethod
    def open(cls, path: Path) -> Library:
        """The library at a path; `UsageError` if there is nothing that can be shown."""
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
        """The path of the page that shows what was asked for."""
        if self.kind == "jobs":
            return "/"
        tail = f"/{self.trial_name}" if self.trial_name else ""
        return f"/jobs/{self.names[0]}{tail}"

    def job_names(self) -> list[str]:
        """The names of all directories that may be jobs."""
        if self.names:
            return list(self.names)
        with os.scandir(self.root) as entries:
            return sorted(entry.name for entry in entries if entry.name[0] != "." and entry.is_dir())

    def job(self, name: str) -> JobView:
        """A job; `NotFoundError` if there is none of this name."""
        if not is_plain_name(name) or (self.names and name not in self.names):
            raise NotFoundError(f"{self.root} has no job {name}")
        try:
            return JobView.of_trials(self.root / name) if self.loose else JobView.open(self.root / name)
        except (JobError, OSError) as error:
            raise NotFoundError(str(error)) from error

    def trial(self, job: str, name: str, *, known: bool = False) -> TrialView:
        """A trial; `NotFoundError` if there is none of this name. One that is `known` to be in the job is opened
        without reading the job."""
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
        """A stamp that changes when a job does. Trials of other programs are looked at one by one only if `deep`."""
        directory = self.root / name
        parts = [_stamp(directory / file) for file in (JOURNAL, RESULT, LOCK, CONFIG)]
        owner = current_owner(directory) if parts[0] else None
        parts.append(str(owner or ""))
        if deep and not parts[0]:
            with os.scandir(directory) as entries:
                names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
            parts += [f"{each}={_stamp(directory / each / RESULT)}" for each in names]
        return "|".join(parts)


def _stamp(path: Path) -> str:
    try:
        status = path.lstat()
    except OSError:
        return ""
    return f"{status.st_ino}.{status.st_size}.{status.st_mtime_ns}"


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
