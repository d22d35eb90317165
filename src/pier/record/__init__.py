"""Recordings of model calls: the writer, the reader, and redaction."""

from dataclasses import dataclass

RECORDING, TRAJECTORY = "recording.jsonl", "trajectory.json"
"""The names of a trial's recording and trajectory, in `agent/`. The agent chooses all other names there."""
FILE_NAMES = ("calls.jsonl", RECORDING)
"""The names that recordings are found by."""


@dataclass(frozen=True, slots=True)
class About:
    """The agent whose calls a recording holds, as the header of their trajectory names it."""

    agent_name: str
    agent_version: str | None = None
    model_name: str | None = None
    session_id: str | None = None
