"""Creates, finds, opens and repairs the directory of a job, and writes the files that other programs read.

`config.json`, `lock.json` and `result.json` have Harbor's shapes. They are derived from the ledger, so they can be
regenerated.

    <job>/config.json      the settings, without secrets
    <job>/lock.json        the plan: every trial with the digest of its task
    <job>/result.json      counts, metrics and the rewards of each trial
    <job>/job.log          the events as text
    <job>/journal.jsonl    the authoritative record (`pier.job.ledger`)
    <job>/.retries/        the directories of tries that no longer count
    <job>/<trial>/         one directory per trial
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import click

from pier import __version__
from pier.agent.contract import pack_spec
from pier.beneath import remove
from pier.errors import JobError, PierError
from pier.figures import Summary, describe
from pier.files import read_journal, write, write_json
from pier.job.config import JobConfig
from pier.job.ledger import (
    JOURNAL,
    OWNER,
    VERSION,
    Ledger,
    current_owner,
    not_a_job,
    now,
    owning,
    read_outcome,
    size_of,
)
from pier.job.load import parse, read_file, to_disk
from pier.job.plan import KEY, NOT_IDENTIFYING, MakePlan, Plan, PlannedTrial, Warn, make_key, plan_job, read_key
from pier.job.view import CONFIG, LOCK, RESULT, JobView, ResultGroup
from pier.trial.result import lock_row


def is_full(error: BaseException) -> bool:
    """Whether an error means that a disk is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def explained(directory: Path) -> Iterator[None]:
    """Turn an `OSError`, also one inside an exception group, into a `JobError` with a hint."""
    try:
        yield
    except (OSError, BaseExceptionGroup) as error:
        cause = _system_error(error)
        if cause is None:
            raise
        full = is_full(cause)
        raise JobError(
            f"the disk of {directory} is full" if full else f"cannot write the job's files: {cause}",
            hint=f"{'free some space' if full else 'fix that'}, then run the same command again",
            code="disk-full" if full else "job-files",
            blame="infra",
        ) from error


def _system_error(error: BaseException) -> OSError | None:
    if isinstance(error, BaseExceptionGroup):
        return next((found for each in error.exceptions if (found := _system_error(each))), None)
    return error if isinstance(error, OSError) else None


RETRIES = ".retries"
_REMOVED = ".removed"


def write_lock(directory: Path, config: dict[str, Any], plan: Plan) -> None:
    """Write the plan as a Harbor lock."""

    @cache
    def row(task_index: int, agent_index: int) -> str:
        task, agent = plan.tasks[task_index], plan.agents[agent_index]
        git = {"git_url": task.git_url, "git_commit_id": task.git_commit_id}
        reference = {"path": task.git_path or task.path, **git}
        return json.dumps(lock_row(task.name, task.digest, task.source, reference, {**config, "agent": agent}))

    rows = [row(trial.task, trial.agent) for trial in plan.trials]
    head = {
        "schema_version": 3,
        "created_at": now(),
        "pier": {"version": __version__, "packs": _packs(plan.agents)},
        "harbor": {"version": None},
        "n_concurrent_trials": config["n_concurrent_trials"],
        "retry": config["retry"],
    }
    body = json.dumps(head)[:-1] + ', "trials": [\n' + ",\n".join(rows) + "\n]}\n"
    write(directory / LOCK, body)


def _packs(agents: Iterable[dict[str, Any]]) -> dict[str, dict[str, str | None]]:
    """Return the packages of the agents' packs by agent name, without unknown agents."""
    packs: dict[str, dict[str, str | None]] = {}
    for agent in agents:
        name = agent.get("import_path") or agent.get("name") or ""
        with contextlib.suppress(PierError):
            if spec := pack_spec(name):
                packs[name] = {"source": spec.source, "package": spec.package, "version": spec.version}
    return packs


def write_result(ledger: Ledger, config: JobConfig, running: int = 0, *, durable: bool = False) -> None:
    """Write the state of the job as Harbor's `result.json`."""
    result = result_of(JobView.of(ledger), [metric.type for metric in config.metrics], running)
    write(ledger.directory / RESULT, json.dumps(result, indent=2) + "\n", durable=durable)


def result_of(view: JobView, metrics: Sequence[str] = (), running: int = 0) -> dict[str, Any]:
    """Return the state of a job as Harbor's `JobResult`, with additional fields in `pier`."""
    totals = view.totals
    stats = {
        "n_completed_trials": totals.done,
        "n_errored_trials": totals.errors.total(),
        "n_running_trials": running,
        "n_pending_trials": max(view.n_trials - totals.done - running, 0),
        "n_cancelled_trials": 0,
        "n_retries": view.n_retries,
        "n_input_tokens": totals.tokens.input,
        "n_cache_tokens": totals.tokens.cached,
        "n_output_tokens": totals.tokens.output,
        "cost_usd": totals.cost.total,
        "evals": {group.key: _eval_stats(group, metrics) for group in view.groups},
    }
    known_cost = {"cost": {"known_usd": totals.cost.known, "trials_unknown": totals.cost.unknown}}
    return {
        "id": view.id,
        "started_at": view.created_at,
        "updated_at": view.finished_at or now(),
        "finished_at": view.finished_at,
        "n_total_trials": view.n_trials,
        "stats": stats,
        "pier": {"faults_by_blame": totals.errors, **(known_cost if totals.cost.unknown else {})},
    }


def _eval_stats(group: ResultGroup, metrics: Sequence[str]) -> dict[str, Any]:
    rewards: dict[str, dict[float, list[str]]] = defaultdict(lambda: defaultdict(list))
    faults: dict[str, list[str]] = defaultdict(list)
    for row in group.trials:
        if row.outcome is None:
            continue
        for key, value in (row.outcome.rewards or {}).items():
            rewards[key][value].append(row.name)
        if row.outcome.fault is not None:
            faults[row.outcome.fault.type].append(row.name)
    summary, steps = group.summary, group.totals.steps
    return {
        "n_trials": summary.n_verdicts,
        "n_errors": group.totals.errors.total(),
        "metrics": [_metric(summary, metric) for metric in metrics or ("mean",)],
        "pass_at_k": summary.pass_at_k,
        "reward_stats": rewards,
        "exception_stats": faults,
        "pier": {**describe(summary), "steps": {"graded": steps[0], "total": steps[1]} if steps else None},
    }


def _metric(summary: Summary, name: str) -> dict[str, float]:
    values = {"mean": summary.mean, "sum": summary.total, "min": summary.low, "max": summary.high}[name]
    return {name: next(iter(values.values()))} if len(values) == 1 else dict(values)


@dataclass(slots=True)
class OpenJob:
    """An open job. `disk` is the configuration on disk; `continued` is set if the job existed before."""

    directory: Path
    config: JobConfig
    disk: dict[str, Any]
    ledger: Ledger
    continued: bool = False
    stopped: str | None = None
    """The exhausted limit, if the runner stopped before all trials had run."""
    left_out: int = 0
    """Number of trials that cannot be regraded, since they kept no state."""

    def trial_path(self, trial: PlannedTrial) -> Path:
        return self.directory / trial.name

    def set_aside(self, trial: PlannedTrial, number: int) -> str | None:
        """Move the directory of a try that no longer counts to `.retries` and return its path; None if it is
        missing."""
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
    check: Callable[[Plan], None] = lambda _: None,
    warn: Warn = lambda _: None,
) -> Iterator[OpenJob]:
    """Open the job for `config`: an existing one, or a new one after `check`. `warn` is called with warnings about its
    tasks."""
    with _open(config, *plan_job(config, env, yes=yes, warn=warn), check) as job:
        yield job


@contextmanager
def open_regrade(source: Path, config: JobConfig, env: Mapping[str, str]) -> Iterator[OpenJob]:
    """Open the job that regrades the kept states of the job in `source`."""
    from pier.job.specs import plan_regrade

    plan, without = plan_regrade(source, config)
    with _open(config, lambda _: plan, to_disk(config, env), lambda _: None) as job:
        job.left_out = without
        yield job


@contextmanager
def _open(
    config: JobConfig, make_plan: MakePlan, disk: dict[str, Any], check: Callable[[Plan], None]
) -> Iterator[OpenJob]:
    counted = {key: value for key, value in disk.items() if key not in NOT_IDENTIFYING}
    asked = hashlib.sha256(json.dumps(counted, sort_keys=True).encode()).hexdigest()[:16]
    directory = _find_directory(config, asked, make_plan)
    if directory is None:
        check(make_plan(b""))
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
                write_json(directory / CONFIG, disk)
                write_lock(directory, disk, plan)
                ledger.adopt_plan(plan)
        yield from _opened(OpenJob(directory, config, disk, ledger, continued))


def _opened(job: OpenJob) -> Iterator[OpenJob]:
    try:
        with explained(job.directory):
            repair(job)
        yield job
    finally:
        job.ledger.close()


@contextmanager
def open_existing(directory: Path) -> Iterator[OpenJob]:
    """Open the job in `directory` with its present plan."""
    if not (directory / JOURNAL).is_file():
        raise not_a_job(directory)
    config, disk = read_config(directory)
    with owning(directory):
        yield from _opened(OpenJob(directory, config, disk, Ledger.read(directory), True))


def read_config(directory: Path) -> tuple[JobConfig, dict[str, Any]]:
    """Return the configuration of the job in `directory`, parsed and as stored."""
    disk = read_file(directory / CONFIG)
    return parse(disk, str(directory / CONFIG)), disk


def repair(job: OpenJob) -> None:
    """Reconcile the ledger with the trial directories after a runner died or files were lost.

    A try with a complete result counts even if its end was not recorded. A try without a result, or with a missing or
    torn one, is set aside and owed again.
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
    """Whether a trial's result exists and has the recorded size or is at least readable."""
    try:
        actual = os.stat(f"{trial}/result.json").st_size  # noqa: PTH116 - called for each of ten thousand trials
    except OSError:
        return False
    return (actual == size and size > 0) or read_outcome(Path(trial)) is not None


def _find_directory(config: JobConfig, asked: str, make_plan: MakePlan) -> Path | None:
    """Return the existing directory of the job: by name, else an unfinished job of the same command."""
    base = Path(config.jobs_dir)
    if config.job_name:
        return base / config.job_name if (base / config.job_name).is_dir() else None
    for directory in sorted(base.iterdir(), reverse=True) if base.is_dir() else ():
        if (ledger := _unfinished(directory, asked)) is None:
            continue
        if ledger.outcomes.keys() <= make_plan(read_key(directory)).by_id.keys():
            return directory
        click.echo(
            f"not continuing {directory}, whose secrets or files differ; to continue it: pier job resume {directory}",
            err=True,
        )
    return None


def _unfinished(directory: Path, asked: str) -> Ledger | None:
    """Return the ledger in `directory` if it is an unfinished job of the same command that is not running."""
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
    directory, number = base / stamp, 1
    while True:
        try:
            directory.mkdir()
            return directory
        except FileExistsError:
            number += 1
            directory = base / f"{stamp}-{number}"


def _is_job(directory: Path) -> bool:
    """Whether `directory` contains a job. Raises `JobError` if it contains other files instead."""
    if next(read_journal(directory / JOURNAL), None) is not None:
        return True
    others = [path.name for path in directory.iterdir() if path.name not in (OWNER, JOURNAL, KEY)]
    if others:
        raise JobError(
            f"{directory} exists and is not a pier job: it contains {others[0]} and no {JOURNAL}",
            hint="choose another --job-name",
            code="not-a-job",
        )
    return False


def _refuse_foreign(directory: Path, ledger: Ledger, plan: Plan) -> None:
    foreign = [id for id in ledger.outcomes if id not in plan.by_id]
    if foreign and ledger.version < VERSION:
        raise JobError(
            f"{directory} was created by an earlier version of pier, whose trial identities ignore some values, files "
            "and secrets, so its trials cannot be matched with this command",
            hint=f"continue it with its old settings: pier job resume {directory}; or choose another --job-name",
            code="job-older",
        )
    if foreign:
        name = ledger.plan.by_id[foreign[0]].name if foreign[0] in ledger.plan.by_id else foreign[0]
        raise JobError(
            f"{directory} contains {len(foreign)} finished trials that are not part of this command, such as {name}",
            hint=f"choose another --job-name, or continue with the job's settings: pier job resume {directory}",
            code="job-differs",
        )


def remove_job(directory: Path) -> None:
    """Remove the directory of a job. Raises `JobError` if it is not clearly a job, or the job is running."""
    path, view = directory.resolve(), JobView.open(directory)
    if not view.is_ours and not view.n_planned and not all((path / name).is_file() for name in (JOURNAL, OWNER)):
        raise JobError(
            f"{directory} was not removed: it has no journal, result or lock of a job",
            code="not-a-job",
            hint=f"rm -r {directory}, if you are sure",
        )
    doomed = path.with_name(f".{path.name}.{os.urandom(4).hex()}{_REMOVED}")
    with explained(directory):
        with owning(directory):
            path.rename(doomed)
        for each in {doomed, *path.parent.glob(f".*{_REMOVED}")}:  # also leftovers of interrupted removals
            remove(str(each))
