"""Looking at jobs without touching them: one line for each, or all about one."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from pier.errors import JobError, UsageError
from pier.job.directory import cost_of, groups_of, read_config, result_of
from pier.job.ledger import JOURNAL, Ledger, Outcome, current_owner
from pier.job.progress import print_columns, print_report, tell
from pier.job.results import Mean


@dataclass(frozen=True, slots=True)
class JobRow:
    """One job in a list."""

    name: str
    state: str
    done: int
    total: int
    verdicts: int
    mean: float | None
    cost_usd: float | None
    created_at: str


def list_jobs(jobs_dir: Path) -> list[JobRow]:
    """The jobs in a directory, newest first."""
    if not jobs_dir.is_dir():
        raise UsageError(f"{jobs_dir}: no such directory", hint="pier run -p TASKS")
    rows = [_row(path) for path in jobs_dir.iterdir() if (path / JOURNAL).is_file()]
    return sorted((row for row in rows if row is not None), key=lambda row: row.created_at, reverse=True)


def _row(directory: Path) -> JobRow | None:
    try:
        ledger = Ledger.read(directory)
    except JobError:
        return None
    done = [ledger.outcomes[id] for id in ledger.plan.by_id if id in ledger.outcomes]
    mean = Mean()
    for outcome in done:
        mean.add(outcome.rewards)
    return JobRow(
        name=directory.name,
        state=_state(ledger),
        done=len(done),
        total=len(ledger.plan.trials),
        verdicts=sum(outcome.rewards is not None for outcome in done),
        mean=mean.value,
        cost_usd=cost_of(done).total,
        created_at=ledger.created_at,
    )


def _state(ledger: Ledger) -> str:
    if current_owner(ledger.directory):
        return "running"
    return "interrupted" if any(True for _ in ledger.owed()) else "done"


def print_jobs(rows: list[JobRow], jobs_dir: Path, *, as_json: bool) -> None:
    """Print a list of jobs."""
    if as_json:
        click.echo(json.dumps([asdict(row) for row in rows], indent=2))
        return
    if not rows:
        click.echo(f"{jobs_dir} holds no jobs; try: pier run -p TASKS")
        return
    shown: list[tuple[str, ...]] = []
    for row in rows:
        mean = "-" if row.mean is None else f"{row.mean:.3f}"
        cost = "-" if row.cost_usd is None else f"${row.cost_usd:.4f}"
        shown.append((row.name, row.state, f"{row.done}/{row.total}", str(row.verdicts), mean, cost))
    print_columns(shown, ("job", "state", "trials", "verdicts", "mean reward", "cost"))


def show_job(directory: Path, *, trials: bool, as_json: bool) -> None:
    """Print where a job stands."""
    ledger = Ledger.read(directory)
    owner = current_owner(directory)
    if as_json:
        config, _ = read_config(directory)
        rows = [
            {"name": name, "task": task, "rewards": outcome.rewards if outcome else None, "says": _says(outcome)}
            for group in groups_of(ledger)
            for name, task, outcome in group.trials
        ]
        shown = {**result_of(ledger, config), "directory": str(directory), "owner": owner, "trials": rows}
        click.echo(json.dumps(shown, indent=2))
        return
    if owner:
        click.echo(f"being run by {owner}")
    if ledger.lost_lines:
        click.echo(f"{ledger.lost_lines} lines of {directory / JOURNAL} could not be read", err=True)
    if trials:
        print_columns([(name, _says(outcome)) for group in groups_of(ledger) for name, _, outcome in group.trials])
    print_report(directory, ledger)


def _says(outcome: Outcome | None) -> str:
    return "not done" if outcome is None else tell(outcome)
