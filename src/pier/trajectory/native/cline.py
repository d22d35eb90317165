"""Cline's messages files: one JSON document a session, sub-agents in separate files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pier.trajectory.model import Content, ContentPart, Metrics
from pier.trajectory.native.assemble import Assembler, SessionLog, iso, members, simple
from pier.tree import find_files, open_regular

NAME = "cline"


def find(root: Path) -> list[SessionLog]:
    """The sessions below a directory, or in one file."""
    paths = find_files(root, "*.messages.json")
    tops: dict[Path, SessionLog] = {}
    below: list[SessionLog] = []
    for path in paths:
        id_ = path.name.removesuffix(".messages.json")
        if not _is_log(path):
            continue
        session = SessionLog(NAME, path, read, id=id_)
        if id_ == path.parent.name or root.is_file():
            tops[path.parent] = session
        else:
            below.append(session)
    orphans = []
    for session in below:
        parent = tops.get(session.path.parent)
        (parent.children if parent else orphans).append(session)
    return [*tops.values(), *orphans]


def _is_log(path: Path) -> bool:
    with open_regular(path) as file:
        start = file.read(4096)
    return path.name.endswith(".messages.json") and b'"sessionId"' in start and b'"origin"' in start


def read(session: SessionLog, assembler: Assembler) -> Iterator[None]:
    prompt = None
    for name, value in members(session.path, "messages"):
        if name == "messages" and isinstance(value, dict):
            _message(value, session, assembler)
        elif name == "origin" and isinstance(value, dict):
            session.version = value.get("version") or session.version
        elif name == "system_prompt":
            prompt = value
        yield
    if isinstance(prompt, str):
        # It stands behind the messages in the file, where a separate step would be out of order.
        session.extra["system_prompt"] = prompt


def _message(message: dict[str, Any], session: SessionLog, assembler: Assembler) -> None:
    at, content = iso(message.get("ts")), message.get("content")
    blocks: list[dict[str, Any]] = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    if message.get("role") == "assistant":
        _answer(message, blocks, at, session, assembler)
        return
    rest = []
    for block in blocks:
        if block.get("type") == "tool_result":
            _result(block, at, session, assembler)
        else:
            rest.append(block)
    if rest:
        assembler.say("user", _content(rest, assembler), at)


def _answer(
    message: dict[str, Any], blocks: list[dict[str, Any]], at: str | None, session: SessionLog, assembler: Assembler
) -> None:
    model = (message.get("modelInfo") or {}).get("id")
    session.model = session.model or model
    assembler.turn(message.get("id"), at, model)
    for block in blocks:
        match block.get("type"):
            case "text":
                assembler.text(block.get("text") or "")
            case "thinking":
                assembler.think(block.get("thinking") or "")
            case "tool_use":
                assembler.call(str(block.get("id")), str(block.get("name")), block.get("input") or {})
            case other:
                assembler.note(**{str(other): block})
    if counted := message.get("metrics"):
        written = counted.get("cacheWriteTokens")
        assembler.count(
            Metrics(
                prompt_tokens=counted.get("inputTokens"),
                completion_tokens=counted.get("outputTokens"),
                cached_tokens=counted.get("cacheReadTokens"),
                cost_usd=counted.get("cost") or None,
                extra={"cache_write_tokens": written} if written else None,
            )
        )


def _result(block: dict[str, Any], at: str | None, session: SessionLog, assembler: Assembler) -> None:
    content = block.get("content")
    told = _content(content, assembler) if isinstance(content, str | list) else json.dumps(content)
    extra = {"is_error": True} if block.get("is_error") else {}
    words = told if isinstance(told, str) else ""
    child = next((child.id for child in session.children if child.id in words), None)
    assembler.observe(str(block.get("tool_use_id")), told, at, child=child, **extra)


def _content(content: Any, assembler: Assembler) -> Content:
    if isinstance(content, str):
        return content
    parts = []
    for block in content:
        source = block.get("source") or {}
        if block.get("type") == "image" and source.get("data"):
            parts.append(assembler.picture(source.get("media_type", ""), source["data"]))
        else:
            text = block.get("text")
            parts.append(ContentPart(type="text", text=text if text is not None else json.dumps(block)))
    return simple(parts)
