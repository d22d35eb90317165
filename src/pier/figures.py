"""Statistics over trials, each defined once: means, pass@k, coverage, intervals, cost, tokens, spreads, differences.

Other modules only show these numbers; a unit test finds those that compute their own. A trial without a verdict counts
in coverage and nowhere else: an infrastructure fault is never a zero. Each reward key has its own mean; where one
number is shown, it is the mean of the main reward: the key `reward`, else the only key. A cost is either complete or
unknown; the known part of an incomplete cost is labelled as such.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TypeVar

_Number = TypeVar("_Number", int, float)

Z95 = 1.959963984540054
"""Standard errors to each side of a 95% interval."""

GradedTrial = tuple[str, Mapping[str, float] | None]
"""One trial for `summarise`: its task, and its rewards (None without a verdict)."""


def mean(values: Iterable[float]) -> float | None:
    """Return the arithmetic mean; None without values."""
    numbers = list(values)
    return math.fsum(numbers) / len(numbers) if numbers else None


def means(tables: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean of each key over the tables that have a number for it."""
    found: dict[str, list[float]] = defaultdict(list)
    for table in tables:
        for name, value in table.items():
            if isinstance(value, int | float):
                found[name].append(value)
    return {name: math.fsum(values) / len(values) for name, values in found.items()}


def add_known(total: _Number | None, value: _Number | None) -> _Number | None:
    """Return the sum of the known values; None if both are unknown."""
    return total if value is None else value if total is None else total + value


def total_cost(costs: Iterable[float | None]) -> float | None:
    """Return the sum of costs; None (unknown) if any is unknown."""
    known = list(costs)
    return None if None in known else math.fsum(cost or 0.0 for cost in known)


@dataclass(frozen=True, slots=True)
class Interval:
    """A 95% confidence interval. `method` is `wilson` for independent 0/1 values, `clustered` where attempts of one
    task are correlated (for 0/1 values: Wilson's with the effective sample size)."""

    low: float
    high: float
    method: str


@dataclass(frozen=True, slots=True)
class Summary:
    """Statistics of a set of trials. The mappings are keyed by reward; `pass_at_k` is keyed by k."""

    n_trials: int
    n_verdicts: int
    n_tasks: int
    mean: dict[str, float] = field(default_factory=dict)
    total: dict[str, float] = field(default_factory=dict)
    low: dict[str, float] = field(default_factory=dict)
    high: dict[str, float] = field(default_factory=dict)
    interval: dict[str, Interval] = field(default_factory=dict)
    pass_at_k: dict[int, float] = field(default_factory=dict)

    @property
    def coverage(self) -> float:
        """Share of trials with a verdict."""
        return self.n_verdicts / self.n_trials if self.n_trials else 0.0

    @property
    def main(self) -> tuple[float | None, Interval | None]:
        """Mean of the main reward, and its interval."""
        value = main_reward(self.mean)
        key = "reward" if "reward" in self.mean else next(iter(self.mean), "")
        return value, self.interval.get(key) if value is not None else None


def main_reward(rewards: Mapping[str, float] | None) -> float | None:
    """Return the reward named `reward`, else the only one; None without a verdict or if neither exists."""
    known = rewards or {}
    if "reward" in known or len(known) != 1:
        return known.get("reward")
    return next(iter(known.values()))


@dataclass(slots=True)
class Mean:
    """Running mean of the main reward."""

    total: float = 0.0
    count: int = 0

    def add(self, rewards: Mapping[str, float] | None) -> None:
        if (value := main_reward(rewards)) is not None:
            self.total += value
            self.count += 1

    @property
    def value(self) -> float | None:
        return self.total / self.count if self.count else None


@dataclass(slots=True)
class Cost:
    """Running cost of trials: the sum of known costs, and the number of trials with an unknown cost."""

    known: float | None = None
    unknown: int = 0

    def add(self, usd: float | None) -> None:
        if usd is None:
            self.unknown += 1
        else:
            self.known = add_known(self.known, usd)

    @property
    def total(self) -> float | None:
        """The complete cost; None if part of it is unknown."""
        return None if self.unknown else self.known

    def __str__(self) -> str:
        if not self.known:
            return "unknown" if self.unknown else "$0.0000"
        return f"at least ${self.known:.4f} ({self.unknown} unknown)" if self.unknown else f"${self.known:.4f}"


@dataclass(slots=True)
class TokenTotals:
    """Running token counts of trials: the sums of known counts, None if all are unknown."""

    input: int | None = None
    cached: int | None = None
    output: int | None = None

    def add(self, input: int | None, cached: int | None, output: int | None) -> None:
        self.input = add_known(self.input, input)
        self.cached = add_known(self.cached, cached)
        self.output = add_known(self.output, output)


class EndedTrial(Protocol):
    """The attributes of an ended trial that totals need. `fault` has a `blame`, or is None."""

    @property
    def rewards(self) -> Mapping[str, float] | None: ...
    @property
    def fault(self) -> Any: ...
    @property
    def cost(self) -> float | None: ...
    @property
    def tokens(self) -> tuple[int | None, int | None, int | None]: ...
    @property
    def seconds(self) -> float: ...
    @property
    def steps(self) -> tuple[int, int] | None: ...


@dataclass(slots=True)
class Totals:
    """Running totals over trials. `errors` counts trials with an error, by blame."""

    done: int = 0
    verdicts: int = 0
    errors: Counter[str] = field(default_factory=Counter[str])
    mean: Mean = field(default_factory=Mean)
    cost: Cost = field(default_factory=Cost)
    tokens: TokenTotals = field(default_factory=TokenTotals)
    seconds: float = 0.0
    steps: tuple[int, int] | None = None
    """Graded steps and all steps of multi-step tasks."""

    @property
    def cost_per_trial(self) -> float | None:
        """Mean cost; None if no trial ended, or if part of the cost is unknown."""
        return None if self.cost.total is None else self.cost.total / self.done

    @property
    def seconds_per_trial(self) -> float | None:
        return self.seconds / self.done if self.done else None

    @classmethod
    def of(cls, outcomes: Iterable[EndedTrial | None]) -> Totals:
        """Return the totals of trials, ignoring those without an outcome."""
        totals = cls()
        for outcome in outcomes:
            if outcome is not None:
                totals.add(outcome)
        return totals

    def add(self, outcome: EndedTrial) -> None:
        self.done += 1
        self.verdicts += outcome.rewards is not None
        if outcome.fault is not None:
            self.errors[outcome.fault.blame] += 1
        self.mean.add(outcome.rewards)
        self.cost.add(outcome.cost)
        self.tokens.add(*outcome.tokens)
        self.seconds += outcome.seconds
        if outcome.steps is not None:
            graded, total = self.steps or (0, 0)
            self.steps = (graded + outcome.steps[0], total + outcome.steps[1])


def summarise(trials: Iterable[GradedTrial]) -> Summary:
    """Return the statistics of a set of trials."""
    by_key: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    tasks: set[str] = set()
    n_trials = n_verdicts = 0
    for task, rewards in trials:
        n_trials += 1
        tasks.add(task)
        n_verdicts += rewards is not None
        for key, value in (rewards or {}).items():
            by_key[key][task].append(value)
    flat = {key: [v for values in groups.values() for v in values] for key, groups in by_key.items()}
    intervals = {key: confidence(list(groups.values())) for key, groups in by_key.items()}
    return Summary(
        n_trials=n_trials,
        n_verdicts=n_verdicts,
        n_tasks=len(tasks),
        mean={key: math.fsum(values) / len(values) for key, values in flat.items()},
        total={key: math.fsum(values) for key, values in flat.items()},
        low={key: min(values) for key, values in flat.items()},
        high={key: max(values) for key, values in flat.items()},
        interval={key: found for key, found in intervals.items() if found is not None},
        pass_at_k=_pass_table(by_key),
    )


def describe(summary: Summary) -> dict[str, Any]:
    """Return a summary as plain data."""
    return {
        "n_trials": summary.n_trials,
        "n_verdicts": summary.n_verdicts,
        "n_tasks": summary.n_tasks,
        "coverage": summary.coverage,
        "mean": summary.mean,
        "confidence": {key: {**asdict(found), "level": 0.95} for key, found in summary.interval.items()},
        "pass_at_k": {str(k): value for k, value in summary.pass_at_k.items()},
    }


def pass_at_k(n: int, successes: int, k: int) -> float:
    """Return the unbiased estimate that at least one of k attempts succeeds, from `successes` out of `n`."""
    if not 1 <= k <= n or not 0 <= successes <= n:
        raise ValueError(f"pass@{k} cannot be estimated from {successes} successes of {n}")
    if n - successes < k:
        return 1.0
    return 1.0 - math.comb(n - successes, k) / math.comb(n, k)


def pass_all_k(n: int, successes: int, k: int) -> float:
    """Return the unbiased estimate that all of k attempts succeed, from `successes` out of `n`."""
    return math.comb(successes, k) / math.comb(n, k)


def _pass_table(by_key: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[int, float]:
    """Return pass@k for one reward key with values 0 or 1, with k up to the fewest verdicts of any task; else empty."""
    if len(by_key) != 1:
        return {}
    groups = list(next(iter(by_key.values())).values())
    if any(value not in (0, 1) for values in groups for value in values):
        return {}
    fewest = min(len(values) for values in groups)
    powers = {2**exponent for exponent in range(fewest.bit_length())}
    counts: dict[tuple[int, int], int] = defaultdict(int)
    for values in groups:
        counts[len(values), sum(value == 1 for value in values)] += 1
    return {
        k: math.fsum(pass_at_k(n, good, k) * many for (n, good), many in counts.items()) / len(groups)
        for k in sorted(powers | set(range(5, min(fewest, 100) + 1, 5)))
    }


def confidence(groups: Sequence[Sequence[float]]) -> Interval | None:
    """Return the 95% interval of the mean of grouped values (attempts of one task are correlated)."""
    values = [value for group in groups for value in group]
    if not values:
        return None
    binary = all(value in (0, 1) for value in values)
    average = math.fsum(values) / len(values)
    if binary and (len(groups) == 1 or all(len(group) == 1 for group in groups)):
        return _wilson(average, len(values), "wilson")
    clusters = groups if len(groups) > 1 else [[value] for value in values]
    if len(clusters) < 2:
        return None
    spread = math.fsum(math.fsum(value - average for value in cluster) ** 2 for cluster in clusters)
    error = math.sqrt(spread * len(clusters) / (len(clusters) - 1)) / len(values)
    if binary:
        effective = average * (1 - average) / error**2 if error else 0.0
        return _wilson(average, min(max(effective, len(clusters)), len(values)), "clustered")
    half = Z95 * error
    low, high = average - half, average + half
    if all(0 <= value <= 1 for value in values):
        low, high = max(low, 0.0), min(high, 1.0)
    return Interval(low, high, "clustered")


def _wilson(share: float, n: float, method: str) -> Interval:
    """Return the Wilson interval of a share observed in `n` independent values; `n` may be an effective sample size."""
    scale = 1 + Z95**2 / n
    centre = (share + Z95**2 / (2 * n)) / scale
    half = Z95 * math.sqrt(share * (1 - share) / n + Z95**2 / (4 * n * n)) / scale
    low = 0.0 if share == 0 else max(centre - half, 0.0)
    high = 1.0 if share == 1 else min(centre + half, 1.0)
    return Interval(low, high, method)


@dataclass(frozen=True, slots=True)
class TaskDifference:
    """The mean of the main reward on one task in two sets of trials (None without a verdict), and the difference."""

    task: str
    first: float | None
    second: float | None
    difference: float | None = None
    interval: Interval | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The difference between two sets of trials, over the tasks on which both have a verdict.

    `p_value` is from the exact sign test: the probability that wins and losses differ this much by chance."""

    tasks: tuple[TaskDifference, ...]
    n_paired: int
    difference: float | None
    interval: Interval | None
    wins: int
    losses: int
    p_value: float | None


def compare(first: Mapping[str, Sequence[float]], second: Mapping[str, Sequence[float]]) -> Comparison:
    """Compare two sets of trials, each given as the main rewards of every task."""
    rows = tuple(_task_difference(task, first.get(task, ()), second.get(task, ())) for task in {**first, **second})
    differences = [row.difference for row in rows if row.difference is not None]
    bounded = all(0 <= value <= 1 for side in (first, second) for values in side.values() for value in values)
    wins, losses = sum(value > 0 for value in differences), sum(value < 0 for value in differences)
    n, fewer = wins + losses, min(wins, losses)
    sign_test = min(1.0, 2 * sum(math.comb(n, k) for k in range(fewer + 1)) / 2**n)
    return Comparison(
        tasks=rows,
        n_paired=len(differences),
        difference=mean(differences),
        interval=_paired(differences, bounded),
        wins=wins,
        losses=losses,
        p_value=sign_test if differences else None,
    )


def _task_difference(task: str, first: Sequence[float], second: Sequence[float]) -> TaskDifference:
    """Return the difference on one task. Its interval combines those of both means (Newcombe's, for 0/1 values)."""
    before, after = mean(first), mean(second)
    if before is None or after is None:
        return TaskDifference(task, before, after)
    one, two = confidence([first]), confidence([second])
    interval = None
    if one is not None and two is not None:
        below = math.hypot(after - two.low, one.high - before)
        above = math.hypot(two.high - after, before - one.low)
        interval = Interval(after - before - below, after - before + above, "independent")
    return TaskDifference(task, before, after, after - before, interval)


def _paired(differences: Sequence[float], bounded: bool) -> Interval | None:
    """Return the interval of the mean difference. For rewards from 0 to 1 it is Bonett and Price's: one win and one
    loss are added, so that a few equal tasks do not give an interval of width zero."""
    if len(differences) < 2:
        return None
    values = [*differences, 1.0, -1.0] if bounded else differences
    average = math.fsum(values) / len(values)
    spread = math.fsum((value - average) ** 2 for value in values)
    half = Z95 * math.sqrt(spread / len(values) / (len(values) if bounded else len(values) - 1))
    low, high = average - half, average + half
    return Interval(max(low, -1.0), min(high, 1.0), "paired") if bounded else Interval(low, high, "paired")


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution of values: counts in bins of equal width from `low` to `high`, and quantiles."""

    low: float
    high: float
    counts: tuple[int, ...]
    median: float
    p90: float

    @property
    def width(self) -> float:
        """Width of a bin."""
        return (self.high - self.low) / len(self.counts)


def spread(values: Sequence[float], bins: int = 20) -> Spread | None:
    """Return the distribution of the finite values; None without any."""
    finite = sorted(value for value in values if math.isfinite(value))
    if not finite:
        return None
    low, high = finite[0], finite[-1]
    width = (high - low) / bins
    counts = [0] * (bins if width else 1)
    for value in finite:
        counts[min(int((value - low) / width), bins - 1) if width else 0] += 1
    p90 = statistics.quantiles(finite, n=10, method="inclusive")[-1] if len(finite) > 1 else low
    return Spread(low, high, tuple(counts), statistics.median(finite), p90)
