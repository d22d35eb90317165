"""Recordings of model calls: the writer and the reader."""

from dataclasses import dataclass

RECORDING, TRAJECTORY = "recording.jsonl", "trajectory.json"
"""Names of a trial's recording and trajectory in `agent/`. All other names there are chosen by the agent."""
FILE_NAMES = ("calls.jsonl", RECORDING)
"""File names of recordings, by which they are found in directories."""


@dataclass(frozen=True, slots=True)
class About:
    """The agent that made the recorded calls, for the header of their trajectory."""

    agent_name: str
    agent_version: str | None = None
    model_name: str | None = None
    session_id: str | None = None
