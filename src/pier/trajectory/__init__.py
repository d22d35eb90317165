"""Trajectories: ATIF documents, the rules they keep, and readers of agents' own session logs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TrajectoryHeader:
    """Who made a trajectory: the first fields of the file."""

    agent: str
    version: str | None = None
    model: str | None = None
    session: str | None = None
