"""The numbers of a job as tables and charts need them: how each trial stands, one cell per task and agent, spreads.

The definitions of mean, interval and cost are those of `pier.job.results`.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from pier.job.results import Interval, Summary, Totals, confidence, main_reward
from pier.job.view import JobView, TrialRow, rewards_by_task

Standing = Literal["passed", "partial", "failed", "error", "running", "pending", "unfinished", "broken"]
"""`error` is a trial without a verdict because of a fault; `partial` has a main reward between 0 and 1."""

FAILURES: tuple[Standing, ...] = ("failed", "partial", "error", "broken")


def standing_of(row: TrialRow) -> Standing:
    """How a trial stands, in one word."""
    if row.outcome is None:
        return row.state if row.state != "done" else "unfinished"
    value = main_reward(row.outcome.rewards)
    if row.outcome.rewards is None:
        return "error" if row.outcome.fault else "unfinished"
    if value is None:
        return "partial"
    return "passed" if value >= 1 else "partial" if value > 0 else "failed"


@dataclass(frozen=True, slots=True)
class GridCell:
    """The trials of one agent with one model on one task. `cost` and `seconds` are means over trials that ended."""

    task: str
    dataset: str
    agent: str
    model: str | None
    n_trials: int
    n_verdicts: int
    n_passed: int
    n_open: int
    mean: float | None
    interval: Interval | None
    cost: float | None
    seconds: float | None
    errors: dict[str, int]


def grid(rows: Iterable[TrialRow]) -> list[GridCell]:
    """One cell for each task and agent, in the order of the trials."""
    groups: dict[tuple[str, str, str, str | None], list[TrialRow]] = defaultdict(list)
    for row in rows:
        groups[row.task, row.dataset, row.agent, row.model].append(row)
    return [_cell(*key, each) for key, each in groups.items()]


def _cell(task: str, dataset: str, agent: str, model: str | None, rows: Sequence[TrialRow]) -> GridCell:
    outcomes = [row.outcome for row in rows if row.outcome is not None]
    totals = Totals.of(outcomes)
    values = [value for each in outcomes if (value := main_reward(each.rewards)) is not None]
    return GridCell(
        task=task,
        dataset=dataset,
        agent=agent,
        model=model,
        n_trials=len(rows),
        n_verdicts=totals.verdicts,
        n_passed=sum(value >= 1 for value in values),
        n_open=len(rows) - len(outcomes),
        mean=totals.mean.value,
        interval=confidence([values]),
        cost=None if totals.cost.total is None else totals.cost.total / len(outcomes),
        seconds=math.fsum(each.seconds for each in outcomes) / len(outcomes) if outcomes else None,
        errors=dict(totals.errors),
    )


def main_interval(view: JobView) -> Interval | None:
    """The interval of the mean of the main reward over all trials of a job."""
    return confidence([values for values in rewards_by_task(view.trials).values() if values])


def main_summary(summary: Summary) -> tuple[float | None, Interval | None]:
    """The mean of the main reward and its interval, from a summary of all rewards."""
    mean = main_reward(summary.mean)
    key = "reward" if "reward" in summary.mean else next(iter(summary.mean), "")
    return mean, summary.interval.get(key) if mean is not None else None


@dataclass(frozen=True, slots=True)
class Spread:
    """How values are spread: counts in bins of equal width from `low` to `high`, and quantiles."""

    low: float
    high: float
    counts: tuple[int, ...]
    median: float
    p90: float


def spread(values: Sequence[float], bins: int = 20) -> Spread | None:
    """The spread of values; None if there are none."""
    found = sorted(value for value in values if math.isfinite(value))
    if not found:
        return None
    low, high = found[0], found[-1]
    width = (high - low) / bins
    counts = [0] * (bins if width else 1)
    for value in found:
        counts[min(int((value - low) / width), bins - 1) if width else 0] += 1
    p90 = statistics.quantiles(found, n=10, method="inclusive")[-1] if len(found) > 1 else low
    return Spread(low, high, tuple(counts), statistics.median(found), p90)
