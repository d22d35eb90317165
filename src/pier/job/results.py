"""Numbers over many trials: mean, pass@k, coverage, cost and how sure one can be of them. Each is defined here once.

A trial without a verdict counts in coverage and nowhere else: an infrastructure fault is never a zero. A reward has a
mean for each of its keys; where one number is shown, it is the mean of the main reward: the key `reward`, else the
only one. A cost is the whole cost or unknown; of a cost that is known in part, the part is shown as such.

What the model calls of a job took, over all its runs: how they ended, how long each stage was, what was met.

A run begins with the numbers that earlier ones left in `gateway.json` and replaces the file now and then, so a runner
that is killed loses the numbers of a few seconds, and nothing else.

How a trial ended, taken from its result: the object that a trial returns, or the file that it sealed.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from pier.errors import PierError
from pier.files import write_json
from pier.job.ledger import Fault, Outcome
from pier.redact import Redactor
from pier.trial.result import AgentResult, TrialResult, storage_fault

if TYPE_CHECKING:
    from pier.gateway.metrics import GatewayMetrics


Z95 = 1.959963984540054
"""Standard errors to each side of a 95% interval."""


@dataclass(frozen=True, slots=True)
class GradedTrial:
    """What metrics need to know of one trial: which task it was, and its rewards (None without a verdict)."""

    task: str
    rewards: Mapping[str, float] | None


@dataclass(frozen=True, slots=True)
class Interval:
    """A 95% confidence interval. `method` is `wilson` for independent 0/1 values; `clustered` where attempts of one
    task are alike (for 0/1 values again Wilson's, with as many values as they are worth)."""

    low: float
    high: float
    method: str


@dataclass(frozen=True, slots=True)
class Summary:
    """What a set of trials says. The mappings go from reward key to value; `pass_at_k` from k to value."""

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
        """The share of trials that have a verdict."""
        return self.n_verdicts / self.n_trials if self.n_trials else 0.0


def main_reward(rewards: Mapping[str, float] | None) -> float | None:
    """The reward that stands for all of a trial's; None if it has no verdict, or several keys and none is `reward`."""
    known = rewards or {}
    if "reward" in known or len(known) != 1:
        return known.get("reward")
    return next(iter(known.values()))


@dataclass(slots=True)
class Mean:
    """The mean of the main reward, over trials as they come."""

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
    """What trials cost, as they come: the sum of what is known, and of how many trials it is not."""

    known: float | None = None
    unknown: int = 0

    def add(self, usd: float | None) -> None:
        if usd is None:
            self.unknown += 1
        else:
            self.known = (self.known or 0.0) + usd

    @property
    def total(self) -> float | None:
        """The whole cost; None if a part of it is unknown."""
        return None if self.unknown else self.known

    def __str__(self) -> str:
        if not self.known:
            return "unknown" if self.unknown else "$0.0000"
        return f"{'at least ' if self.unknown else ''}${self.known:.4f}"


def summarise(trials: Iterable[GradedTrial]) -> Summary:
    """All metrics of a set of trials."""
    by_key: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    tasks: set[str] = set()
    n_trials = n_verdicts = 0
    for trial in trials:
        n_trials += 1
        tasks.add(trial.task)
        if trial.rewards is None:
            continue
        n_verdicts += 1
        for key, value in trial.rewards.items():
            by_key[key][trial.task].append(value)
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


def pass_at_k(n: int, successes: int, k: int) -> float:
    """The unbiased estimate that at least one of k attempts succeeds, from `successes` out of `n`."""
    if not 1 <= k <= n or not 0 <= successes <= n:
        raise ValueError(f"pass@{k} cannot be estimated from {successes} successes of {n}")
    if n - successes < k:
        return 1.0
    return 1.0 - math.comb(n - successes, k) / math.comb(n, k)


def _pass_table(by_key: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[int, float]:
    """pass@k where it means something: one reward key, values 0 or 1; k up to the fewest verdicts of any task."""
    if len(by_key) != 1:
        return {}
    groups = list(next(iter(by_key.values())).values())
    if any(value not in (0, 1) for values in groups for value in values):
        return {}
    fewest = min(len(values) for values in groups)
    counts: dict[tuple[int, int], int] = defaultdict(int)
    for values in groups:
        counts[len(values), sum(value == 1 for value in values)] += 1
    return {
        k: math.fsum(pass_at_k(n, good, k) * many for (n, good), many in counts.items()) / len(groups)
        for k in _ks(fewest)
    }


def _ks(most: int) -> list[int]:
    powers = {2**exponent for exponent in range(most.bit_length()) if 2**exponent <= most}
    return sorted(powers | set(range(5, min(most, 100) + 1, 5)))


def confidence(groups: Sequence[Sequence[float]]) -> Interval | None:
    """The 95% interval of the mean of values that come in groups (attempts of one task are alike)."""
    values = [value for group in groups for value in group]
    if not values:
        return None
    binary = all(value in (0, 1) for value in values)
    mean = math.fsum(values) / len(values)
    if binary and (len(groups) == 1 or all(len(group) == 1 for group in groups)):
        return _wilson(mean, len(values), "wilson")
    clusters = groups if len(groups) > 1 else [[value] for value in values]
    if len(clusters) < 2:
        return None
    spread = math.fsum(math.fsum(value - mean for value in cluster) ** 2 for cluster in clusters)
    error = math.sqrt(spread * len(clusters) / (len(clusters) - 1)) / len(values)
    if binary:
        worth = mean * (1 - mean) / error**2 if error else 0.0
        return _wilson(mean, min(max(worth, len(clusters)), len(values)), "clustered")
    half = Z95 * error
    low, high = mean - half, mean + half
    if all(0 <= value <= 1 for value in values):
        low, high = max(low, 0.0), min(high, 1.0)
    return Interval(low, high, "clustered")


def _wilson(share: float, n: float, method: str) -> Interval:
    """The interval of a share that was seen in `n` independent values, or in more that are worth `n`."""
    scale = 1 + Z95**2 / n
    centre = (share + Z95**2 / (2 * n)) / scale
    half = Z95 * math.sqrt(share * (1 - share) / n + Z95**2 / (4 * n * n)) / scale
    low = 0.0 if share == 0 else max(centre - half, 0.0)
    high = 1.0 if share == 1 else min(centre + half, 1.0)
    return Interval(low, high, method)


NUMBERS = "gateway.json"
_STAGES = {
    "call": "call_seconds",
    "before_upstream": "before_upstream_seconds",
    "first_byte": "upstream_first_byte_seconds",
    "added": "added_seconds",
    "recording": "recording_seconds",
    "event_loop_lag": "event_loop_lag_seconds",
}
_TOLD = ("mean", "p50", "p99")


class JobNumbers:
    """The numbers of a job that runs, added to those of its earlier runs. Without a gateway there are none."""

    def __init__(self, directory: Path, metrics: GatewayMetrics | None) -> None:
        self._path = directory / NUMBERS
        self._metrics = metrics
        self._earlier = _read(directory) if metrics else {}
        self._saved: Any = []

    def save(self) -> None:
        """Replace the file, if another call ended since the last time."""
        if self._metrics is None or (now := self._metrics.snapshot())["calls_total"] == self._saved:
            return
        from pier.gateway.metrics import combine

        self._saved = now["calls_total"]
        write_json(self._path, combine(now, self._earlier), durable=False)


def _read(directory: Path) -> dict[str, Any]:
    try:
        found = json.loads((directory / NUMBERS).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def calls_of(directory: Path) -> dict[str, Any] | None:
    """A job's model calls in short; None if none was counted."""
    found = _read(directory)
    try:
        ends: Counter[str] = Counter()
        for row in found["calls_total"]:
            ends[row["end"]] += int(row["value"])
        seconds = {name: {each: found[key][each] for each in _TOLD} for name, key in _STAGES.items()}
        counts = {
            "retries": int(sum(row["value"] for row in found["upstream_retries_total"])),
            "waits": int(found["limit_waits_total"]),
            "wait_seconds": round(found["limit_wait_seconds_total"], 3),
            "recording_gaps": int(found["recording_gaps_total"]),
            "edits": int(found["edits_total"]),
        }
    except (KeyError, TypeError, ValueError):
        return None
    return {"ends": dict(ends), **counts, "seconds": seconds} if ends else None


def in_words(calls: dict[str, Any]) -> str:
    """A job's model calls in one line."""
    words = [f"{count} {end.replace('_', ' ')}" for end, count in calls["ends"].items()]
    for name, stage in (("first byte", "first_byte"), ("added by the gateway", "added")):
        if (told := calls["seconds"][stage])["p50"] is not None:
            words.append(f"{name} within {told['p50']:g} s (99%: {told['p99']:g} s)")
    if calls["retries"]:
        words.append(f"{calls['retries']} retries")
    if calls["waits"]:
        words.append(f"{calls['wait_seconds']:.1f} s of waiting for limits")
    if calls["recording_gaps"]:
        words.append(f"{calls['recording_gaps']} that could not be recorded")
    return "model calls: " + ", ".join(words)


RESULT = "result.json"
CANCELLED = "CancelledError"
_WITHOUT_MODELS = ("oracle", "nop", "kept-state")
_NO_VERDICT = "job-budget"
"""The code of a trial that the job's own budget cut off: it did not get its chance, so it is still owed."""


def outcome_of(result: TrialResult, directory: Path) -> Outcome:
    """The outcome that a result says."""
    info = result.exception_info
    used = [result.agent_result] if result.agent_result else [step.agent_result for step in result.step_results or ()]
    infos = (info, *(step.exception_info for step in result.step_results or ()))
    cut_off = any(each is not None and each.code == _NO_VERDICT for each in infos)
    cancelled = cut_off or (info is not None and info.exception_type == CANCELLED)
    fault = None
    if info is not None and not cancelled:
        fault = Fault(
            type=info.exception_type,
            code=info.code or info.exception_type,
            blame=info.blame or "infra",
            retryable=bool(info.retryable),
            message=info.exception_message,
        )
    began, ended = result.started_at, result.finished_at
    rewards = None if cut_off else result.rewards
    return Outcome(
        rewards=dict(rewards) if rewards is not None else None,
        fault=fault,
        cancelled=cancelled,
        tokens=(_sum(used, "n_input_tokens"), _sum(used, "n_cache_tokens"), _sum(used, "n_output_tokens")),
        cost=_cost(result, used),
        seconds=(ended - began).total_seconds() if began and ended else 0.0,
        steps=_steps(result),
        size=size_of(directory),
    )


def _steps(result: TrialResult) -> tuple[int, int] | None:
    if result.pier is None or result.pier.n_steps is None:
        return None
    return result.pier.graded_steps or 0, result.pier.n_steps


def _sum(used: Sequence[AgentResult | None], name: str) -> Any:
    """The sum over the steps of a trial of what is known; None if nothing is."""
    known = [value for each in used if each is not None and (value := getattr(each, name)) is not None]
    return sum(known) if known else None


def _cost(result: TrialResult, used: Sequence[AgentResult | None]) -> float | None:
    """What a trial cost; None if that is not known of all its steps. One whose agent never began cost nothing."""
    costs = [each.cost_usd for each in used if each is not None]
    if result.agent_info.name in _WITHOUT_MODELS:
        return 0.0
    return None if None in costs else math.fsum(cost for cost in costs if cost is not None)


def outcome_of_error(error: Exception, redactor: Redactor) -> Outcome:
    """The outcome of a trial that broke before it could seal its result."""
    error = storage_fault(error) or error
    known = isinstance(error, PierError)
    fault = Fault(
        type=type(error).__name__,
        code=error.code if known else type(error).__name__,
        blame=error.blame if known else "infra",
        retryable=error.retryable if known else False,
        message=redactor.text(str(error)) or type(error).__name__,
    )
    return Outcome(fault=fault, cost=0.0)


def read_outcome(directory: Path) -> Outcome | None:
    """The outcome in a trial's directory; None if its result is missing, empty, torn or not a result."""
    try:
        return outcome_of(TrialResult.model_validate_json((directory / RESULT).read_bytes()), directory)
    except (OSError, ValidationError, ValueError):
        return None


def size_of(directory: Path, name: str = RESULT) -> int:
    """The size of a file, by default the result; 0 if there is none."""
    try:
        return (directory / name).stat().st_size
    except OSError:
        return 0
