"""Grid cells of a job, one per task and agent, and chart data for SVG: coordinates in a drawing of fixed size, with
round ticks. All numbers come from `pier.figures`."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pier.figures import Totals, confidence, main_reward, spread
from pier.job.view import TrialRow

Standing = Literal["passed", "partial", "failed", "error", "running", "pending", "unfinished", "broken"]
"""`error` is a trial without a verdict because of a fault; `partial` has a main reward between 0 and 1."""

FAILURES: tuple[Standing, ...] = ("failed", "partial", "error", "broken")


def standing_of(row: TrialRow) -> Standing:
    if row.outcome is None:
        return row.state if row.state != "done" else "unfinished"
    value = main_reward(row.outcome.rewards)
    if row.outcome.rewards is None:
        return "error" if row.outcome.fault else "unfinished"
    if value is None:
        return "partial"
    return "passed" if value >= 1 else "partial" if value > 0 else "failed"


def grid(rows: Iterable[TrialRow]) -> list[dict[str, Any]]:
    """One cell for each task, dataset, agent and model, in the order of the trials."""
    groups: dict[tuple[str, str, str, str | None], list[TrialRow]] = defaultdict(list)
    for row in rows:
        groups[row.task, row.dataset, row.agent, row.model].append(row)
    return [dict(zip(("task", "dataset", "agent", "model"), key, strict=True)) | _cell(g) for key, g in groups.items()]


def _cell(rows: Sequence[TrialRow]) -> dict[str, Any]:
    """The numbers of one cell; `cost` and `seconds` are means over finished trials."""
    outcomes = [row.outcome for row in rows if row.outcome is not None]
    totals = Totals.of(outcomes)
    values = [value for each in outcomes if (value := main_reward(each.rewards)) is not None]
    interval = confidence([values])
    return {
        "n_trials": len(rows),
        "n_verdicts": totals.verdicts,
        "n_passed": sum(value >= 1 for value in values),
        "n_open": len(rows) - len(outcomes),
        "mean": totals.mean.value,
        "interval": asdict(interval) if interval else None,
        "cost": totals.cost_per_trial,
        "seconds": totals.seconds_per_trial,
        "errors": dict(totals.errors),
    }


WIDTH, HEIGHT = 460, 240
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 14, 40


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps values from `low` to `high` to coordinates from `start` to `stop`."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low
        share = (value - self.low) / span if span else 0.5
        return round(self.start + share * (self.stop - self.start), 1)

    def ticks(self, count: int = 5) -> list[float]:
        """Round values, about `count` of them."""
        span = self.high - self.low
        if span <= 0 or not math.isfinite(span):
            return [self.low]
        raw = span / count
        unit = 10 ** math.floor(math.log10(raw))
        step = unit * next(factor for factor in (1, 2, 5, 10) if factor * unit >= raw * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [round(step * n, 12) for n in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _frame(x: Scale, y: Scale, x_label: str, y_label: str) -> dict[str, Any]:
    return {
        "width": WIDTH,
        "height": HEIGHT,
        "left": LEFT,
        "right": WIDTH - RIGHT,
        "top": TOP,
        "bottom": HEIGHT - BOTTOM,
        "x_ticks": [{"at": x(value), "value": value} for value in x.ticks()],
        "y_ticks": [{"at": y(value), "value": value} for value in y.ticks(4)],
        "x_label": x_label,
        "y_label": y_label,
    }


def cost_against_score(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Scatter plot with one point per agent and model: mean cost of a trial, and mean reward with its interval."""
    points: list[dict[str, Any]] = []
    for number, group in enumerate(groups):
        cost = group["cost"]["per_trial"]
        if group["main_mean"] is None or cost is None:
            continue
        found = group["main_interval"] or {"low": group["main_mean"], "high": group["main_mean"]}
        point = {"cost": cost, "mean": group["main_mean"], "low": found["low"], "high": found["high"]}
        points.append({**point, "label": _label(group), "series": number % 8})
    if not points:
        return None
    top = max(1.0, *(point["high"] for point in points))
    low = min(0.0, *(point["low"] for point in points))
    x = Scale(0.0, max(point["cost"] for point in points) * 1.15 or 1.0, LEFT, WIDTH - RIGHT)
    y = Scale(low, top, HEIGHT - BOTTOM, TOP)
    for point in points:
        point |= {"x": x(point["cost"]), "y": y(point["mean"]), "y1": y(point["low"]), "y2": y(point["high"])}
    return {**_frame(x, y, "cost per trial ($)", "mean reward (95%)"), "points": points}


def bars(values: Sequence[float], label: str) -> dict[str, Any] | None:
    """Histogram of values; None without values."""
    found = spread(values)
    if found is None:
        return None
    low, high, first, width = found.low, found.high, found.low, found.width
    if low == high:  # one bar in the middle
        low, high = low - (abs(low) or 1), high + (abs(high) or 1)
        width = (high - low) / 8
        first -= width / 2
    x = Scale(low, high, LEFT, WIDTH - RIGHT)
    y = Scale(0.0, float(max(found.counts)), HEIGHT - BOTTOM, TOP)
    rects: list[dict[str, Any]] = []
    for number, count in enumerate(found.counts):
        start = first + number * width
        left, right = x(start), x(start + width)
        rects.append({"x": left, "y": y(count), "width": max(right - left - 1, 1), "height": y(0) - y(count)})
        rects[-1] |= {"count": count, "low": start, "high": start + width}
    return {**_frame(x, y, label, "trials"), "bars": rects, "median": found.median, "p90": found.p90}


def _label(group: Mapping[str, Any]) -> str:
    return f"{group['agent']} {group['model']}" if group["model"] else str(group["agent"])
