"""A job as a directory: made, found again, opened by its one owner, and repaired after a crash."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from pier.errors import JobError
from pier.files import read_journal
from pier.job.config import JobConfig
from pier.job.files import explained
from pier.job.identity import KEY, make_key, read_key
from pier.job.layout import CONFIG, LOCK, RETRIES, to_disk, write_config, write_lock
from pier.job.ledger import JOURNAL, VERSION, Ledger, not_a_job
from pier.job.load import parse, read_file
from pier.job.outcome import read_outcome, size_of
from pier.job.owner import OWNER, current_owner, owning
from pier.job.plan import Plan, PlannedTrial
from pier.job.planning import NOT_ASKED, MakePlan, Warn, plan_job


@dataclass(slots=True)
class Job:
    """An open job. `disk` is the configuration as it stands on disk; `continued` says that it was there before."""

    directory: Path
    config: JobConfig
    disk: dict[str, Any]
    ledger: Ledger
    continued: bool = False
    stopped: str | None = None
    """Why its runner began no further trial though some are owed, if it was not interrupted."""
    left_out: int = 0
    """How many trials of an earlier job cannot be graded again, since they kept no state."""

    def trial_path(self, trial: PlannedTrial) -> Path:
        return self.directory / trial.name

    def set_aside(self, trial: PlannedTrial, number: int) -> str | None:
        """Move a try that does not count out of the way, and say where it is; None if it left nothing."""
        place = self.directory / RETRIES
        kept = place / f"{trial.name}.{number}"
        try:
            place.mkdir(exist_ok=True)
            while kept.exists():
                number += 1
                kept = place / f"{trial.name}.{number}"
            self.trial_path(trial).rename(kept)
        except FileNotFoundError:
            return None
        return f"{RETRIES}/{kept.name}"


@contextmanager
def open_for(
    config: JobConfig,
    env: Mapping[str, str],
    *,
    yes: bool = False,
    check: Callable[[], None] = lambda: None,
    warn: Warn = lambda _: None,
) -> Iterator[Job]:
    """The job that `config` asks for: continued if it is there already, else made, after `check` had its say. `warn` is
    called with warnings about its tasks."""
    with _open(config, *plan_job(config, env, yes=yes, warn=warn), check) as job:
        yield job


@contextmanager
def open_regrade(source: Path, config: JobConfig, env: Mapping[str, str]) -> Iterator[Job]:
    """The job that grades again what the job in `source` has kept."""
    from pier.job.regrade import plan_regrade

    plan, without = plan_regrade(source, config)
    with _open(config, lambda _: plan, to_disk(config, env), lambda: None) as job:
        job.left_out = without
        yield job


@contextmanager
def _open(config: JobConfig, make_plan: MakePlan, disk: dict[str, Any], check: Callable[[], None]) -> Iterator[Job]:
    asked = _asked(disk)
    directory = _find_directory(config, asked, make_plan)
    if directory is None:
        check()
    with explained(directory or Path(config.jobs_dir)):
        directory = directory or _make_directory(config)
    disk |= {"job_name": directory.name, "jobs_dir": str(directory.parent.resolve())}
    with owning(directory):
        with explained(directory):
            continued = _is_job(directory)
            ledger = Ledger.read(directory) if continued else Ledger.create(directory, asked)
            plan = make_plan(make_key(directory))
            _refuse_foreign(directory, ledger, plan)
            if ledger.plan != plan or not (size_of(directory, CONFIG) and size_of(directory, LOCK)):
                write_config(directory, disk)
                write_lock(directory, disk, plan)
                ledger.adopt_plan(plan)
        yield from _opened(Job(directory, config, disk, ledger, continued))


def _opened(job: Job) -> Iterator[Job]:
    try:
        with explained(job.directory):
            mend(job)
        yield job
    finally:
        job.ledger.close()


@contextmanager
def open_existing(directory: Path) -> Iterator[Job]:
    """The job in `directory`, with the plan that it has."""
    if not (directory / JOURNAL).is_file():
        raise not_a_job(directory)
    config, disk = read_config(directory)
    with owning(directory):
        yield from _opened(Job(directory, config, disk, Ledger.read(directory), True))


def read_config(directory: Path) -> tuple[JobConfig, dict[str, Any]]:
    """The configuration of the job in `directory`, and the same as it stands on disk."""
    disk = read_file(directory / CONFIG)
    return parse(disk, str(directory / CONFIG)), disk


def mend(job: Job) -> None:
    """Bring the ledger and the trial directories together again after a runner that died, or a file that was lost.

    A try whose result was sealed counts though its end was never written down; one without a result is set aside and
    owed again; so is a finished one whose result is gone or torn.
    """
    ledger, place = job.ledger, str(job.directory)
    for trial in ledger.plan.trials:
        if trial.id in ledger.open:
            outcome = read_outcome(job.trial_path(trial))
            if outcome is not None and not outcome.cancelled:
                ledger.end(trial.id, outcome)
            else:
                ledger.again(trial.id, "interrupted", job.set_aside(trial, ledger.tries.get(trial.id, 1)))
        elif (known := ledger.outcomes.get(trial.id)) is not None:
            if not _is_whole(f"{place}/{trial.name}", known.size):
                ledger.again(trial.id, "lost", job.set_aside(trial, ledger.tries.get(trial.id, 1)))
        elif trial.id in ledger.tries and (job.directory / trial.name).exists():
            ledger.again(trial.id, "interrupted", job.set_aside(trial, ledger.tries[trial.id]))


def _is_whole(trial: str, size: int) -> bool:
    """Whether a trial's result is there and, if its size is not the one that was written down, can be read."""
    try:
        found = os.stat(f"{trial}/result.json").st_size  # noqa: PTH116 - one for each of ten thousand trials
    except OSError:
        return False
    return (found == size and size > 0) or read_outcome(Path(trial)) is not None


def _asked(disk: dict[str, Any]) -> str:
    asked = {key: value for key, value in disk.items() if key not in NOT_ASKED}
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]


def _find_directory(config: JobConfig, asked: str, make_plan: MakePlan) -> Path | None:
    """The directory of the job if it is there: by name, else an unfinished one of the same command."""
    base = Path(config.jobs_dir)
    if config.job_name:
        return base / config.job_name if (base / config.job_name).is_dir() else None
    for directory in sorted(base.iterdir(), reverse=True) if base.is_dir() else ():
        if (ledger := _unfinished(directory, asked)) is None:
            continue
        if ledger.outcomes.keys() <= make_plan(read_key(directory)).by_id.keys():
            return directory
        click.echo(f"{directory} is unfinished and had other secrets or files: pier job resume {directory}", err=True)
    return None


def _unfinished(directory: Path, asked: str) -> Ledger | None:
    """The ledger of an unfinished job of the same command that is not running. Other entries are skipped."""
    try:
        head = next(read_journal(directory / JOURNAL), None)
        if not isinstance(head, dict) or head.get("asked") != asked or current_owner(directory):
            return None
        ledger = Ledger.read(directory)
    except (OSError, JobError):
        return None
    return ledger if ledger.finished_at is None else None


def _make_directory(config: JobConfig) -> Path:
    base = Path(config.jobs_dir)
    base.mkdir(parents=True, exist_ok=True)
    if config.job_name:
        (base / config.job_name).mkdir(exist_ok=True)
        return base / config.job_name
    stamp = datetime.now().strftime("%Y-%m-%d__%H-%M-%S")
    for name in (stamp, *(f"{stamp}-{number}" for number in range(2, 1000))):
        try:
            (base / name).mkdir()
        except FileExistsError:
            continue
        return base / name
    raise JobError(f"{base}: a thousand jobs began within this second")


def _is_job(directory: Path) -> bool:
    """Whether a job was begun in `directory`. Something else that is there is not written over."""
    if next(read_journal(directory / JOURNAL), None) is not None:
        return True
    others = [path.name for path in directory.iterdir() if path.name not in (OWNER, JOURNAL, KEY)]
    if others:
        raise JobError(
            f"{directory} exists and is not a job of pier's: it holds {others[0]} and no {JOURNAL}",
            hint="choose another --job-name",
            code="not-a-job",
        )
    return False


def _refuse_foreign(directory: Path, ledger: Ledger, plan: Plan) -> None:
    foreign = [id for id in ledger.outcomes if id not in plan.by_id]
    if foreign and ledger.version < VERSION:
        raise JobError(
            f"{directory} was begun by an earlier version of pier, which did not count all values, files and secrets "
            "as part of a trial's identity, so its trials cannot be matched with this command",
            hint=f"continue it as it is: pier job resume {directory}; or choose another --job-name",
            code="job-older",
        )
    if foreign:
        name = ledger.plan.by_id[foreign[0]].name if foreign[0] in ledger.plan.by_id else foreign[0]
        raise JobError(
            f"{directory} holds {len(foreign)} finished trials that this command does not ask for, such as {name}",
            hint=f"choose another --job-name, or continue the job as it is: pier job resume {directory}",
            code="job-differs",
        )
