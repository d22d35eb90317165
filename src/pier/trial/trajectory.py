"""The trajectory of an agent's run, derived from the recording of its model calls, else from its own session log.

It is updated while the agent runs, so that it can be watched and a killed run has one. The interpreter that derives it
also serves the agents' models, so all trials of this process together spend at most a tenth of the time on it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pier.record import RECORDING, TRAJECTORY, About
from pier.tree import Tree
from pier.trial.bounded import read_back, run_bounded
from pier.trial.record import TrialRecord
from pier.trial.result import AgentResult, captured, storage_fault

if TYPE_CHECKING:
    from pier.trajectory.derive import TrajectorySummary
    from pier.trajectory.model import Trajectory


async def add_trajectory(
    logs: Path, about: About, result: AgentResult | None, record: TrialRecord
) -> AgentResult | None:
    """Write the trajectory next to the recording, and add its usage to the result."""
    return await _add_usage(_derive_usage(logs, about), result, record, f"the recording {logs / RECORDING}")


async def add_native_trajectory(
    logs: Path, about: About, result: AgentResult | None, record: TrialRecord
) -> AgentResult | None:
    """The same for an agent that called its provider itself, from its session log if pier can read it. A trajectory
    that the agent itself wrote is kept."""
    from pier.trajectory.native.convert import READERS

    with Tree(logs) as tree:
        own = tree.find(TRAJECTORY)
    if about.agent_name not in READERS or (own is not None and own.kind == "file"):
        return result
    converted = run_bounded(convert_logs, logs, about.agent_name)
    return await _add_usage(converted, result, record, f"the logs of {about.agent_name}")


async def _add_usage(
    usage: Awaitable[dict[str, Any]], result: AgentResult | None, record: TrialRecord, source: str
) -> AgentResult | None:
    """Add the usage in a trajectory to the result. A failure is a warning, since the verdict does not depend on the
    trajectory; but a file that this machine cannot write is a fault of the infrastructure."""
    with captured() as failure:
        known = await usage
        return (result or AgentResult()).model_copy(update=known) if known else result
    if (fault := storage_fault(failure.error)) is not None:
        raise fault from failure.error
    record.warn(f"cannot derive a trajectory from {source}: {failure.error}")
    return result


def convert_logs(logs: Path, agent: str) -> dict[str, Any]:
    """Convert the longest session log of an agent to its trajectory, and return the usage."""
    from pier.trajectory.model import read
    from pier.trajectory.native.convert import convert, find_sessions

    longest = max(find_sessions(logs, agent), key=lambda session: session.path.stat().st_size)
    convert(longest, logs / TRAJECTORY)
    return usage_in(read(logs / TRAJECTORY))


def usage_in(trajectory: Trajectory) -> dict[str, Any]:
    """The fields of an `AgentResult` that a trajectory has."""
    final = trajectory.final_metrics
    extra = (final.extra if final else None) or {}
    return {
        "n_input_tokens": final.total_prompt_tokens if final else None,
        "n_output_tokens": final.total_completion_tokens if final else None,
        "n_cache_tokens": final.total_cached_tokens if final else None,
        "cost_usd": final.total_cost_usd if final else None,
        "peak_context_tokens": extra.get("peak_context_tokens"),
        "summarization_count": extra.get("summarization_count"),
        "n_agent_steps": len(trajectory.agent_steps),
    }


async def _derive_usage(logs: Path, about: About) -> dict[str, Any]:
    summary = await read_back(_derive, logs, about)
    return summary_usage(summary) if summary.path is not None else {}


def _derive(logs: Path, about: About, *, durable: bool = True, most: int | None = None) -> TrajectorySummary:
    """Write the trajectory of a recording of at most `most` bytes, else `RecordingTooLarge`."""
    from pier.trajectory.derive import write_trajectory

    return write_trajectory(logs / RECORDING, logs / TRAJECTORY, about, durable=durable, most=most)


def summary_usage(summary: TrajectorySummary) -> dict[str, Any]:
    """The fields of an `AgentResult` that a derived trajectory has. A partial cost is unknown."""
    known = {
        "n_input_tokens": summary.prompt_tokens,
        "n_output_tokens": summary.completion_tokens,
        "n_cache_tokens": summary.cached_tokens,
        "peak_context_tokens": summary.peak_context_tokens,
        "summarization_count": summary.summarization_count,
        "n_agent_steps": summary.agent_steps,
    }
    return {name: value for name, value in known.items() if value is not None} | {"cost_usd": summary.cost_usd}


_PAUSE = 2.0
_REST = 9.0
"""Pause after a derivation, as a multiple of its duration."""

_next_start = 0.0
"""Earliest start of the next derivation in this process, on the monotonic clock; infinite during one."""


@asynccontextmanager
async def live_trajectory(logs: Path, about: About) -> AsyncIterator[None]:
    """Derive the trajectory now and then during the block; no derivation outlives it."""
    over = asyncio.Event()
    task = asyncio.create_task(_follow(logs, about, over))
    try:
        yield
    finally:
        over.set()
        await task


async def _follow(logs: Path, about: About, over: asyncio.Event) -> None:
    global _next_start
    known, recording = 0, logs / RECORDING
    while not over.is_set():
        with suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), _PAUSE)
        size = recording.stat().st_size if recording.exists() else 0
        began = time.monotonic()
        if over.is_set() or size == known or began < _next_start:
            continue
        _next_start = math.inf
        try:
            with captured():  # the derivation at the end reports errors
                await read_back(_derive, logs, about, durable=False)
        finally:
            _next_start = time.monotonic() + _REST * (time.monotonic() - began)
        known = size
