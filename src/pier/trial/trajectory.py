"""The trajectory of an agent's run.

The trajectory is derived from the recording of the agent's model calls, else from its own session log. It is kept up to
date while the agent runs, so that it can be watched and a run that is killed leaves one. Deriving takes time off the
interpreter that serves the agents' models, so all trials of this process together spend at most a tenth of it on this.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
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


async def add_native_trajectory(
    logs: Path, about: About, result: AgentResult | None, record: TrialRecord
) -> AgentResult | None:
    """The same for an agent that called its provider itself, from the session log that it kept, if it is one whose logs
    can be read. A trajectory that the agent left itself is kept."""
    from pier.trajectory.native.convert import READERS

    with Tree(logs) as tree:
        own = tree.find(TRAJECTORY)
    if about.agent_name not in READERS or (own is not None and own.kind == "file"):
        return result
    with captured() as failure:
        known = await run_bounded(convert_logs, logs, about.agent_name)
        return (result or AgentResult()).model_copy(update=known) if known else result
    _raise_storage_fault(failure.error)
    record.warn(f"no trajectory could be made from the logs of {about.agent_name}: {failure.error}")
    return result


def convert_logs(logs: Path, agent: str) -> dict[str, Any]:
    """Write the longest session log of an agent as its trajectory; the fields of an `AgentResult` that it knows."""
    from pier.trajectory.model import read
    from pier.trajectory.native.convert import convert, find_sessions

    longest = max(find_sessions(logs, agent), key=lambda session: session.path.stat().st_size)
    convert(longest, logs / TRAJECTORY)
    return usage_in(read(logs / TRAJECTORY))


def usage_in(trajectory: Trajectory) -> dict[str, Any]:
    """The fields of an `AgentResult` that a trajectory knows."""
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


def _raise_storage_fault(error: Exception | None) -> None:
    """A trajectory that this machine could not write is a fault of the infrastructure, not a warning."""
    if (fault := storage_fault(error)) is not None:
        raise fault from error


def _derive(logs: Path, about: About, *, durable: bool = True, most: int | None = None) -> TrajectorySummary:
    """Write the trajectory next to the recording, from what was recorded so far; `RecordingTooLarge` beyond `most`."""
    from pier.trajectory.derive import write_trajectory

    return write_trajectory(logs / RECORDING, logs / TRAJECTORY, about, durable=durable, most=most)


def summary_usage(summary: TrajectorySummary) -> dict[str, Any]:
    """The fields of an `AgentResult` that a derivation knows. A cost that is only known in part is not known."""
    known = {
        "n_input_tokens": summary.prompt_tokens,
        "n_output_tokens": summary.completion_tokens,
        "n_cache_tokens": summary.cached_tokens,
        "peak_context_tokens": summary.peak_context_tokens,
        "summarization_count": summary.summarization_count,
        "n_agent_steps": summary.agent_steps,
    }
    return {name: value for name, value in known.items() if value is not None} | {"cost_usd": summary.cost_usd}


async def add_trajectory(
    logs: Path, about: About, result: AgentResult | None, record: TrialRecord
) -> AgentResult | None:
    """Write the trajectory next to the recording, and add what it knows to the result.

    A trajectory that cannot be derived is a warning: the recording is still there, and the verdict does not need it.
    """
    with captured() as failure:
        summary = await read_back(_derive, logs, about)
        if summary.path is None:
            return result
        return (result or AgentResult()).model_copy(update=summary_usage(summary))
    _raise_storage_fault(failure.error)
    record.warn(f"no trajectory could be derived from {logs / RECORDING}: {failure.error}")
    return result


_PAUSE = 2.0
_REST = 9.0
"""How many times as long as a derivation took, none is made after it."""


@dataclass(slots=True)
class _Pace:
    """Whose turn it is. One for the process, since what it shares out is the interpreter."""

    busy: bool = False
    free_at: float = 0.0

    def take(self) -> bool:
        if self.busy or time.monotonic() < self.free_at:
            return False
        self.busy = True
        return True

    def give_back(self, seconds: float) -> None:
        self.busy = False
        self.free_at = time.monotonic() + _REST * seconds


_pace = _Pace()


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
    known = 0
    while not await _is_set_within(over, _PAUSE):
        size = _size(logs / RECORDING)
        if size == known or not _pace.take():
            continue
        began = time.monotonic()
        try:
            # What cannot be derived now is reported by the derivation at the end.
            with captured():
                await read_back(_derive, logs, about, durable=False)
        finally:
            _pace.give_back(time.monotonic() - began)
        known = size


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
