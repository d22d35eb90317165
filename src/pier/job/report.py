"""Prints jobs: lists, the state of one with the next command, logs, and comparisons."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from pier.errors import JobError, UsageError
from pier.figures import Interval, compare, describe
from pier.job.directory import result_of
from pier.job.ledger import current_owner
from pier.job.plan import NOT_IDENTIFYING
from pier.job.progress import describe_outcome, first_line, means, print_columns, print_report
from pier.job.view import LOG, RESULT, TRIAL_LOG, JobView, ResultGroup, TrialRow, has_finished, rewards_by_task
from pier.tree import Tree, TreeError
from pier.trial.record import printable


def print_jobs(views: Sequence[JobView], jobs_dir: Path, *, as_json: bool) -> None:
    """Print a list of jobs."""
    if as_json:
        click.echo(json.dumps([_job_row(view) for view in views], indent=2))
        return
    if not views:
        click.echo(f"{jobs_dir} holds no jobs; try: pier run TASKS")
        return
    rows: list[tuple[str, ...]] = []
    for view in views:
        totals = view.totals
        mean = "-" if totals.mean.value is None else f"{totals.mean.value:.3f}"
        cost = str(totals.cost) if totals.done else "-"
        rows.append((view.name, view.state, f"{totals.done}/{view.n_trials}", str(totals.verdicts), mean, cost))
    print_columns(rows, ("job", "state", "trials", "verdicts", "mean reward", "cost"))


def _job_row(view: JobView) -> dict[str, Any]:
    totals = view.totals
    return {
        "name": view.name,
        "state": view.state,
        "done": totals.done,
        "total": view.n_trials,
        "verdicts": totals.verdicts,
        "mean": totals.mean.value,
        "cost_usd": totals.cost.total,
        "cost_known_usd": totals.cost.known,
        "cost_trials_unknown": totals.cost.unknown,
        "created_at": view.created_at,
    }


def print_job(view: JobView, *, trials: bool, as_json: bool) -> None:
    """Print the state of a job."""
    if as_json:
        click.echo(json.dumps(_job_data(view), indent=2))
        return
    if view.owner:
        click.echo(f"being run by {view.owner}")
    elif view.state in ("empty", "broken", "unfinished"):
        click.echo(f"state: {view.state}")
    for problem in view.problems:
        click.echo(problem, err=True)
    if trials:
        print_columns([(row.name, _describe_row(row)) for group in view.groups for row in group.trials])
    print_report(view)


def _job_data(view: JobView) -> dict[str, Any]:
    metrics = [each.get("type") for each in (view.config or {}).get("metrics") or () if isinstance(each, dict)]
    running = sum(row.state == "running" for row in view.trials)
    known = [name for name in metrics if name in ("mean", "sum", "min", "max")]
    rows = [
        {
            "name": row.name,
            "task": row.task,
            "agent": row.agent,
            "model": row.model,
            "attempt": row.attempt,
            "state": row.state,
            "rewards": row.outcome.rewards if row.outcome else None,
            "cost_usd": row.outcome.cost if row.outcome else None,
            "says": _describe_row(row),
        }
        for group in view.groups
        for row in group.trials
    ]
    owner = str(view.owner) if view.owner else None
    more = {"directory": str(view.directory), "owner": owner, "state": view.state, "problems": view.problems}
    return {**result_of(view, known, running), **more, "trials": rows}


def _describe_row(row: TrialRow) -> str:
    if row.outcome is not None:
        return describe_outcome(row.outcome)
    return first_line(row.problem) if row.problem else row.state


_STAMPED = re.compile(r"(\d{4}-\d\d-\d\dT\S+) (.*)")
_POLL = 0.2


def print_log(view: JobView, trial: str | None, *, follow: bool, as_json: bool) -> None:
    """Print the log of a job, or of one of its trials; with `follow`, until the job or that trial has ended."""
    path = f"{view.trial(trial).directory.name}/{TRIAL_LOG}" if trial else LOG
    with Tree(view.directory.resolve()) as tree:
        reader = _LogReader(tree, path)
        ended = False
        while True:
            over = not follow or _has_ended(view, tree, trial)
            for line in reader.read(last=not follow or (over and ended)):
                stamped = _STAMPED.fullmatch(line)
                at, text = stamped.groups() if stamped else (None, line)
                click.echo(json.dumps({"at": at, "text": text}) if as_json else printable(line))
            if not follow or (over and ended):
                break
            ended = over  # check twice: a trial that is about to be retried has a result for a moment
            time.sleep(_POLL)
        if not reader.found:
            raise JobError(
                f"{view.directory / path}: no such file", hint=f"pier job show {view.directory}", code="no-log"
            )


def _has_ended(view: JobView, tree: Tree, trial: str | None) -> bool:
    if trial and tree.find(f"{trial}/{RESULT}"):
        return True
    return current_owner(view.directory) is None if view.is_ours or view.owner else has_finished(tree)


class _LogReader:
    """Reads new lines of a log; starts over if the file was replaced."""

    def __init__(self, tree: Tree, path: str) -> None:
        self._tree, self._path = tree, path
        self._inode, self._position = 0, 0
        self.found = False

    def read(self, *, last: bool) -> Iterator[str]:
        """Yield the new complete lines; with `last`, also an incomplete one."""
        try:
            stream = self._tree.open(self._path)
        except FileNotFoundError:
            return
        except TreeError as error:
            raise JobError(str(error), code="no-log") from None
        with stream:
            inode = os.fstat(stream.fileno()).st_ino
            if inode != self._inode:
                self._inode, self._position = inode, 0
            self.found = True
            stream.seek(self._position)
            for line in stream:
                if not line.endswith(b"\n") and not last:
                    return
                self._position += len(line)
                yield line.decode(errors="replace").rstrip("\n")


def print_comparison(views: Sequence[JobView], *, as_json: bool) -> None:
    """Compare the agents of jobs with the first of them, and print the differences."""
    first, *rest = comparison_sides(views)
    rewards = rewards_by_task(first.trials)
    compared = [(side, compare(rewards, rewards_by_task(side.trials))) for side in rest]
    differing = config_differences(views)
    if as_json:
        others = [{**side_data(side), "against_first": asdict(result)} for side, result in compared]
        data = {"first": side_data(first), "others": others, "configuration": differing}
        click.echo(json.dumps(data, indent=2))
        return
    shown = [(*_side_cells(side), _difference(result.difference, result.interval)) for side, result in compared]
    rows = [(*_side_cells(first), "-"), *shown]
    print_columns(rows, ("", "verdicts", "mean reward (95%)", "cost", "difference (95%)"))
    for side, result in compared:
        ties = result.n_paired - result.wins - result.losses
        test = "" if result.p_value is None else f" (sign test: p = {result.p_value:.3g})"
        click.echo(
            f"\n{side.key} against {first.key}: {result.n_paired} tasks with verdicts in both, "
            f"{result.wins} better, {result.losses} worse, {ties} equal{test}"
        )
        changed = [row for row in result.tasks if row.difference != 0 and (row.first, row.second) != (None, None)]
        cells = [
            (
                row.task,
                *("-" if value is None else f"{value:.3f}" for value in (row.first, row.second)),
                _difference(row.difference, row.interval),
            )
            for row in sorted(changed, key=lambda row: (row.difference is None, row.difference or 0.0, row.task))
        ]
        if cells:
            print_columns(cells, ("task", first.key, side.key, "difference (95%)"))
    if differing:
        click.echo()
        shown = (["-" if value is None else json.dumps(value) for value in values] for values in differing.values())
        headings = ("configuration", *_job_names(views))
        print_columns([(key, *cells) for key, cells in zip(differing, shown, strict=True)], headings)


def _job_names(views: Sequence[JobView]) -> list[str]:
    """Return the names of jobs, or their directories if names are not unique."""
    names = [view.name for view in views]
    return names if len({*names}) == len(names) else [str(view.directory) for view in views]


def comparison_sides(views: Sequence[JobView]) -> list[ResultGroup]:
    """Return a group for each agent and model of each job, over all datasets. A job's only agent is labelled with the
    job's name."""
    sides: list[ResultGroup] = []
    for name, view in zip(_job_names(views), views, strict=True):
        agents = dict.fromkeys((group.agent, group.model) for group in view.groups)
        if not agents:
            reason = "; ".join(view.problems) or "the job has no trials"
            raise UsageError(f"cannot compare {view.directory}: {reason}", hint=f"pier job show {view.directory}")
        for agent, model in agents:
            own = f"{agent} {model}" if model else agent
            label = name if len(agents) == 1 else own if len(views) == 1 else f"{name}: {own}"
            rows = tuple(row for row in view.trials if (row.agent, row.model) == (agent, model))
            sides.append(ResultGroup(label, agent, model, "", rows))
    if len(sides) < 2:
        raise UsageError("nothing to compare: expected two jobs, or one job with several agents", hint="pier job list")
    return sides


def _side_cells(side: ResultGroup) -> tuple[str, ...]:
    verdicts = f"{side.summary.n_verdicts}/{side.summary.n_trials}"
    return (side.key, verdicts, means(side.summary), str(side.totals.cost) if side.totals.done else "-")


def _difference(value: float | None, interval: Interval | None) -> str:
    if value is None:
        return "-"
    return f"{value:+.3f}" + (f" ({interval.low:+.3f} to {interval.high:+.3f})" if interval else "")


def side_data(side: ResultGroup) -> dict[str, Any]:
    cost = {"known_usd": side.totals.cost.known, "trials_unknown": side.totals.cost.unknown}
    return {"name": side.key, "agent": side.agent, "model": side.model, **describe(side.summary), "cost": cost}


def config_differences(views: Sequence[JobView]) -> dict[str, list[Any]]:
    """Return the keys in which the configurations of jobs differ, with the value of each job; None if it is not set."""
    flat = [_flatten(view.config or {}) for view in views]
    keys = dict.fromkeys(key for each in flat for key in each if key.partition(".")[0] not in NOT_IDENTIFYING)
    values = {key: {json.dumps(each[key]) for each in flat if each.get(key) not in (None, [], {})} for key in keys}
    return {key: [each.get(key) for each in flat] for key in keys if len(values[key]) > 1}


def _flatten(value: Any, key: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        return {
            k: v for name, each in value.items() for k, v in _flatten(each, f"{key}.{name}" if key else name).items()
        }
    if isinstance(value, list) and len(value) == 1:
        return _flatten(value[0], key)
    return {key: value}
