"""Finds agents' own session logs and writes them as trajectories, step by step as they are read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pier.errors import UsageError
from pier.files import write_parts
from pier.plugin import load
from pier.trajectory.model import VERSION, Trajectory
from pier.trajectory.native.assemble import SessionLog
from pier.tree import TreeError

READERS = {
    "claude-code": "lines:ClaudeCodeReader",
    "codex": "lines:CodexReader",
    "gemini-cli": "gemini:GeminiCliReader",
    "opencode": "databases:OpenCodeReader",
    "mini-swe-agent": "documents:MiniSweAgentReader",
    "openhands": "documents:OpenHandsReader",
    "qwen-code": "gemini:QwenCodeReader",
    "goose": "databases:GooseReader",
    "pi": "lines:PiReader",
    "kimi": "lines:KimiReader",
    "cline": "documents:ClineReader",
    "copilot": "lines:CopilotReader",
}
"""The reader of each agent's logs: a module of this package and a class."""

_UNFIT = re.compile(r"[^A-Za-z0-9._-]")
_LONGEST = 150
_BROKEN = (AttributeError, IndexError, KeyError, OverflowError, RecursionError, TypeError, ValueError, TreeError)
"""The exceptions that readers raise for a malformed log."""


def find_sessions(root: Path, agent: str | None = None) -> list[SessionLog]:
    """Find all sessions at `root`, of one agent or of any."""
    if agent is not None and agent not in READERS:
        raise UsageError(
            f"session logs of {agent!r} cannot be read: expected one of {', '.join(READERS)}", code="trajectory"
        )
    root = root.resolve()
    names = [agent] if agent else list(READERS)
    found: list[SessionLog] = []
    for name in names:
        with _readable(name, root):
            found += load(f"pier.trajectory.native.{READERS[name]}").find(root)
    if not found:
        raise UsageError(f"no session logs of {' or '.join(names)} at {root}", code="trajectory")
    return found


def convert(session: SessionLog, target: Path) -> None:
    """Write a session and its sub-agents as one trajectory file, atomically; its images go next to it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with _readable(session.agent, session.path):
        write_parts(target, (text.encode() for text in _texts(session, target.parent / "images")))


@contextmanager
def _readable(agent: str, place: Path) -> Iterator[None]:
    """Turn the exceptions of readers into a `UsageError` with the agent and the path."""
    try:
        yield
    except _BROKEN as error:
        reason = f"{type(error).__name__}: {error}"
        raise UsageError(f"{place}: not a session log of {agent} ({reason})", code="trajectory") from error


def trajectory_of(session: SessionLog) -> Trajectory:
    """Read a whole session into memory."""
    steps = list(session.steps())
    children = [trajectory_of(child) for child in session.children]
    body = {**_head(session), **_tail(session), "steps": steps}
    return Trajectory.model_validate(body | ({"subagent_trajectories": children} if children else {}))


def _texts(session: SessionLog, media: Path, end: str = "\n") -> Iterator[str]:
    """Yield the file in pieces, step by step."""
    yield '{\n"steps": ['
    for number, step in enumerate(session.steps(media)):
        yield (",\n" if number else "\n") + step.model_dump_json(exclude_none=True)
    yield "\n]"
    for key, value in {**_head(session), **_tail(session)}.items():
        yield f",\n{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}"
    for number, child in enumerate(session.children):
        yield ",\n" if number else ',\n"subagent_trajectories": [\n'
        yield from _texts(child, media, "")
    yield ("]\n}" if session.children else "\n}") + end


def _head(session: SessionLog) -> dict[str, Any]:
    agent = {"name": session.agent, "version": session.version, "model_name": session.model}
    return {
        "schema_version": VERSION,
        "session_id": session.id,
        "trajectory_id": session.id,
        "agent": {key: value for key, value in agent.items() if value is not None},
    }


def _tail(session: SessionLog) -> dict[str, Any]:
    extra = {key: value for key, value in session.extra.items() if value is not None}
    assert session.totals is not None, "the steps are read first"
    final = session.totals.final(session.cost_usd).model_dump(exclude_none=True)
    return {"final_metrics": final, **({"extra": extra} if extra else {})}


def targets(sessions: list[SessionLog], output: Path) -> Iterator[tuple[SessionLog, Path]]:
    """The target file of each session: `output` if there is one session and it is a .json file, else one file per
    session below it. Ids come from logs, so they are reduced to safe file names."""
    if len(sessions) == 1 and output.suffix == ".json":
        yield sessions[0], output
        return
    taken: set[str] = set()
    for session in sessions:
        name = free = _UNFIT.sub("_", f"{session.agent}-{session.id}")[:_LONGEST]
        number = 2
        while free in taken:
            free, number = f"{name}-{number}", number + 1
        taken.add(free)
        yield session, output / f"{free}.json"
