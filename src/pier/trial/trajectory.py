"""The agent's trajectory, derived from the recording of its model calls, else from its own session log."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pier.tree import Tree
from pier.trial.agents import RECORDING
from pier.trial.model import AgentResult
from pier.trial.outcome import captured, storage_fault
from pier.trial.record import TrialRecord

if TYPE_CHECKING:
    from pier.gateway.derivation import Summary

TRAJECTORY = "trajectory.json"


@dataclass(frozen=True, slots=True)
class Told:
    """The origin of a trajectory."""

    agent: str
    version: str
    model: str | None
    session: str


async def add_native_trajectory(
    logs: Path, told: Told, result: AgentResult | None, record: TrialRecord
) -> AgentResult | None:
    """The same for an agent that called its provider itself, from the session log that it kept, if it is one whose logs
    can be read. A trajectory that the agent left itself is kept."""
    from pier.trajectory.native.convert import READERS, convert, find_sessions
    from pier.trajectory.write import read

    target = logs / TRAJECTORY
    with Tree(logs) as tree:
        own = tree.find(TRAJECTORY)
    if told.agent not in READERS or (own is not None and own.kind == "file"):
        return result
    with captured() as failure:
        sessions = await asyncio.to_thread(find_sessions, logs, told.agent)
        longest = max(sessions, key=lambda session: session.path.stat().st_size)
        await asyncio.to_thread(convert, longest, target)
        final = (await asyncio.to_thread(read, target)).final_metrics
        if final is None:
            return result
        known = {
            "n_input_tokens": final.total_prompt_tokens,
            "n_output_tokens": final.total_completion_tokens,
            "n_cache_tokens": final.total_cached_tokens,
            "cost_usd": final.total_cost_usd,
        }
        return (result or AgentResult()).model_copy(update=known)
    _raise_storage_fault(failure.error)
    record.warn(f"no trajectory could be made from the logs of {told.agent}: {failure.error}")
    return result


def _raise_storage_fault(error: Exception | None) -> None:
    """A trajectory that this machine could not write is a fault of the infrastructure, not a warning."""
    if (fault := storage_fault(error)) is not None:
        raise fault from error


def derive(logs: Path, told: Told, *, durable: bool = True) -> Summary:
    """Write the trajectory next to the recording, from what was recorded so far."""
    from pier.gateway.derivation import write_trajectory

    return write_trajectory(
        logs / RECORDING,
        logs / TRAJECTORY,
        agent_name=told.agent,
        agent_version=told.version,
        model_name=told.model,
        session_id=told.session,
        durable=durable,
    )


async def add_trajectory(logs: Path, told: Told, result: AgentResult | None, record: TrialRecord) -> AgentResult | None:
    """Write the trajectory next to the recording, and add what it knows to the result.

    A trajectory that cannot be derived is a warning: the recording is still there, and the verdict does not need it.
    """
    if not (logs / RECORDING).is_file():
        return result
    with captured() as failure:
        summary = await asyncio.to_thread(derive, logs, told)
        if summary.path is None:
            return result
        known = {
            "n_input_tokens": summary.prompt_tokens,
            "n_output_tokens": summary.completion_tokens,
            "n_cache_tokens": summary.cached_tokens,
            "peak_context_tokens": summary.peak_context_tokens,
            "summarization_count": summary.summarization_count,
            "n_agent_steps": summary.agent_steps,
        }
        update = {name: value for name, value in known.items() if value is not None}
        # A cost that is only known in part is not known.
        return (result or AgentResult()).model_copy(update={**update, "cost_usd": summary.cost_usd})
    _raise_storage_fault(failure.error)
    record.warn(f"no trajectory could be derived from {logs / RECORDING}: {failure.error}")
    return result
