"""The agent's trajectory, derived from the recording of its model calls."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pier.trial.agents import RECORDING
from pier.trial.model import AgentResult
from pier.trial.outcome import captured
from pier.trial.record import TrialRecord

if TYPE_CHECKING:
    from pier.gateway.derivation import Summary

TRAJECTORY = "trajectory.json"


@dataclass(frozen=True, slots=True)
class Told:
    """What a trajectory says of its origin."""

    agent: str
    version: str
    model: str | None
    session: str


def derive(logs: Path, told: Told, *, durable: bool = True) -> Summary:
    """Write the trajectory beside the recording, from what was recorded so far."""
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
    """Write the trajectory beside the recording, and add what it knows to the result.

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
    record.warn(f"no trajectory could be derived from {logs / RECORDING}: {failure.error}")
    return result
