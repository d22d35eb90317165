"""Cline's messages files: one JSON document a session, sub-agents in separate files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pier.trajectory.native.assemble import Assembler, SessionLog, below_tops, iso, members
from pier.tree import find_files, open_regular

NAME = "cline"


def find(root: Path) -> list[SessionLog]:
    """The sessions below a directory, or in one file."""
    paths = find_files(root, "*.messages.json")
    found: list[tuple[SessionLog, Path | None]] = []
    for path in paths:
        id_ = path.name.removesuffix(".messages.json")
        if _is_log(path):
            is_top = id_ == path.parent.name or root.is_file()
            found.append((SessionLog(NAME, path, read, id=id_), None if is_top else path.parent))
    return below_tops(found, {session.path.parent: session for session, parent in found if parent is None})


def _is_log(path: Path) -> bool:
    with open_regular(path) as file:
        start = file.read(4096)
    return path.name.endswith(".messages.json") and b'"sessionId"' in start and b'"origin"' in start


def read(session: SessionLog, assembler: Assembler) -> Iterator[None]:
    prompt = None
    for name, value in members(session.path, "messages"):
        if name == "messages" and isinstance(value, dict):
            _message(value, assembler)
        elif name == "origin" and isinstance(value, dict):
            session.version = value.get("version") or session.version
        elif name == "system_prompt":
            prompt = value
        yield
    if isinstance(prompt, str):
        # It stands behind the messages in the file, where a separate step would be out of order.
        session.extra["system_prompt"] = prompt


def _message(message: dict[str, Any], assembler: Assembler) -> None:
    at, content = iso(message.get("ts")), message.get("content")
    blocks: list[dict[str, Any]] = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    if message.get("role") == "assistant":
        _answer(message, blocks, at, assembler)
        return
    rest = []
    for block in blocks:
        if block.get("type") == "tool_result":
            _result(block, at, assembler)
        else:
            rest.append(block)
    if rest:
        assembler.say("user", assembler.content(rest, whole=True), at)


def _answer(message: dict[str, Any], blocks: list[dict[str, Any]], at: str | None, assembler: Assembler) -> None:
    model = (message.get("modelInfo") or {}).get("id")
    assembler.turn(message.get("id"), at, model)
    for block in blocks:
        assembler.block(block, "tool_use")
    if counted := message.get("metrics"):
        used = (counted.get(name) for name in ("inputTokens", "outputTokens", "cacheReadTokens"))
        assembler.count(*used, written=counted.get("cacheWriteTokens"), cost=counted.get("cost"))


def _result(block: dict[str, Any], at: str | None, assembler: Assembler) -> None:
    content = block.get("content")
    told = assembler.content(content, whole=True) if isinstance(content, str | list) else json.dumps(content)
    failed = True if block.get("is_error") else None
    assembler.observe(str(block.get("tool_use_id")), told, at, child=assembler.session.child_in(told), is_error=failed)
