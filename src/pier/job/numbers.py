"""What the model calls of a job took, over all its runs: how they ended, how long each stage was, what was met.

A run begins with the numbers that earlier ones left in `gateway.json` and replaces the file now and then, so a runner
that is killed loses the numbers of a few seconds, and nothing else.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pier.files import write_json

if TYPE_CHECKING:
    from pier.gateway.metrics import Metrics

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
    """The numbers of a job that runs. Without a gateway there are none."""

    def __init__(self, directory: Path, metrics: Metrics | None) -> None:
        self._path = directory / NUMBERS
        self._metrics = metrics
        self._saved: Any = None
        if metrics:
            metrics.load(_read(directory))

    def save(self) -> None:
        """Replace the file, if another call ended since the last time."""
        if self._metrics is None or self._saved == self._metrics.calls.values:
            return
        self._saved = dict(self._metrics.calls.values)
        write_json(self._path, self._metrics.snapshot(), durable=False)


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
