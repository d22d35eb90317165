"""Finds agent sessions on this machine by working directory, in the agents' log directories.

A session belongs to a directory if the agent was started in it or below. `pier.trajectory.native` reads the logs.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pier.trajectory.native.assemble import SessionLog, records
from pier.trajectory.native.databases import OpenCodeReader, opened
from pier.trajectory.native.gemini import GeminiCliReader
from pier.trajectory.native.lines import ClaudeCodeReader, CodexReader
from pier.tree import Tree, TreeError

_HEAD = 50
"""Number of lines at the start of a log that are searched for its working directory."""


@dataclass(frozen=True, slots=True)
class HostSession:
    """One session. `modified` is the modification time of its log, in seconds."""

    log: SessionLog
    modified: float


def find_host_sessions(
    directory: Path, agent: str | None = None, environ: Mapping[str, str] | None = None
) -> list[HostSession]:
    """The sessions of one agent, or of all in `FINDERS`, in a directory, newest first."""
    env = os.environ if environ is None else environ
    root = directory.resolve()
    found: list[HostSession] = []
    for name, find in FINDERS.items():
        if agent in (None, name):
            with suppress(OSError, TreeError, sqlite3.DatabaseError):
                found += find(root, env)
    return sorted(found, key=lambda session: session.modified, reverse=True)


def _claude(root: Path, env: Mapping[str, str]) -> Iterator[HostSession]:
    projects = _home(env, "CLAUDE_CONFIG_DIR", ".claude") / "projects"
    slug = re.sub(r"[^a-zA-Z0-9]", "-", str(root))
    for directory in sorted(projects.iterdir()):
        if directory.name.startswith(slug):
            for log in ClaudeCodeReader.find(directory):
                if _is_below(_first(log.path, "cwd"), root):
                    yield HostSession(log, log.path.stat().st_mtime)


def _codex(root: Path, env: Mapping[str, str]) -> Iterator[HostSession]:
    for log in CodexReader.find(_home(env, "CODEX_HOME", ".codex") / "sessions"):
        meta = next(records(log.path), {}).get("payload") or {}
        if _is_below(meta.get("cwd"), root):
            yield HostSession(log, log.path.stat().st_mtime)


def _gemini(root: Path, env: Mapping[str, str]) -> Iterator[HostSession]:
    top = env.get("GEMINI_CLI_HOME")
    projects = (Path(top) / ".gemini" if top else _home(env, "", ".gemini")) / "tmp"
    digest = hashlib.sha256(str(root).encode()).hexdigest()
    for directory in sorted(path for path in projects.iterdir() if path.is_dir()):
        try:
            with Tree(directory) as tree:
                cwd = tree.read(".project_root", 4096).decode(errors="replace").strip()
        except (OSError, TreeError):
            cwd = None
        for log in GeminiCliReader.find(directory):
            if _is_below(cwd, root) or _first(log.path, "projectHash") == digest:
                yield HostSession(log, log.path.stat().st_mtime)


def _opencode(root: Path, env: Mapping[str, str]) -> Iterator[HostSession]:
    data = env.get("XDG_DATA_HOME")
    place = (Path(data) if data else _home(env, "", ".local/share")) / "opencode"
    for path in sorted(place.glob("opencode*.db")):
        with opened(path, "session") as database:
            rows = database.execute("SELECT id, directory, time_updated FROM session").fetchall()
        known = {id_: updated / 1000 for id_, cwd, updated in rows if _is_below(cwd, root)}
        for log in OpenCodeReader.find(path):
            if log.id in known:
                yield HostSession(log, known[log.id])


FINDERS: dict[str, Callable[[Path, Mapping[str, str]], Iterator[HostSession]]] = {
    "claude-code": _claude,
    "codex": _codex,
    "gemini-cli": _gemini,
    "opencode": _opencode,
}
"""The supported agents."""


def _home(env: Mapping[str, str], variable: str, default: str) -> Path:
    own = env.get(variable) if variable else None
    return Path(own) if own else Path(env.get("HOME") or "/nonexistent") / default


def _first(path: Path, key: str) -> object:
    """The first value of a key in the first `_HEAD` lines of a log."""
    rows = itertools.islice(records(path), _HEAD)
    return next((row[key] for row in rows if key in row), None)


def _is_below(cwd: object, root: Path) -> bool:
    return isinstance(cwd, str) and (cwd == str(root) or cwd.startswith(f"{str(root).rstrip('/')}/"))
