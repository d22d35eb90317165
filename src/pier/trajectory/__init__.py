"""Trajectories: ATIF documents, the rules they keep, and readers of agents' own session logs."""

from dataclasses import dataclass

TRAJECTORY = "trajectory.json"
"""The name of a trial's trajectory, in `agent/`."""


@dataclass(frozen=True, slots=True)
class About:
    """The agent's part of a trajectory's header."""

    agent_name: str
    agent_version: str | None = None
    model_name: str | None = None
    session_id: str | None = None
