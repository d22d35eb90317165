"""Kimi's wire logs: a line per event of a model call, a directory per agent of a session."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pier.trajectory.model import Content, ContentPart, Metrics
from pier.trajectory.native.assemble import Assembler, SessionLog, iso, records, simple
from pier.tree import find_files

NAME = "kimi"


def find(root: Path) -> list[SessionLog]:
    """The sessions below a directory, or the one of a file; other agents of a session are below its main one."""
    paths = find_files(root, "agents/*/wire.jsonl")
    tops: dict[Path, SessionLog] = {}
    below: list[SessionLog] = []
    for path in paths:
        if "protocol_version" not in next(records(path), {}):
            continue
        place = path.parent.parent.parent
        if path.parent.name == "main":
            tops[place] = SessionLog(NAME, path, read, id=place.name.removeprefix("session_"))
        else:
            below.append(SessionLog(NAME, path, read, id=path.parent.name))
    orphans = []
    for session in below:
        parent = tops.get(session.path.parent.parent.parent)
        (parent.children if parent else orphans).append(session)
    return [*tops.values(), *orphans]


def read(session: SessionLog, assembler: Assembler) -> Iterator[None]:
    for row in records(session.path):
        at = iso(row.get("time"))
        match row.get("type"):
            case "profile.bind":
                assembler.say("system", str(row.get("systemPrompt") or ""), at)
            case "llm.request":
                session.model = session.model or row.get("model")
            case "context.append_message":
                _message(row.get("message") or {}, at, assembler)
            case "context.append_loop_event":
                _event(row.get("event") or {}, at, session, assembler)
            case "context.apply_compaction":
                assembler.compacted(str(row.get("summary") or ""), at)
            case _:
                pass
        yield


def _message(message: dict[str, Any], at: str | None, assembler: Assembler) -> None:
    if message.get("role") in ("assistant", "tool"):
        return
    origin = (message.get("origin") or {}).get("kind")
    extra = {} if origin in (None, "user") else {"injected": True}
    assembler.say("user", _content(message.get("content"), assembler), at, **extra)


def _event(event: dict[str, Any], at: str | None, session: SessionLog, assembler: Assembler) -> None:
    match event.get("type"):
        case "step.begin":
            assembler.turn(event.get("uuid"), at, session.model)
        case "content.part":
            part = event.get("part") or {}
            if part.get("type") == "think":
                assembler.think(part.get("think") or "")
            elif part.get("type") == "text":
                assembler.text(part.get("text") or "")
            else:
                assembler.note(**{str(part.get("type")): part})
        case "tool.call":
            assembler.call(str(event.get("toolCallId")), str(event.get("name")), event.get("args") or {})
        case "tool.result":
            _result(event, at, session, assembler)
        case "step.end":
            if usage := event.get("usage"):
                assembler.count(_metrics(usage))
            assembler.note(stop_reason=event.get("finishReason"))


def _result(event: dict[str, Any], at: str | None, session: SessionLog, assembler: Assembler) -> None:
    told = event.get("result") or {}
    output = told.get("output")
    content = _content(output, assembler) if isinstance(output, str | list) else json.dumps(output)
    extra = {"is_error": True} if told.get("isError") else {}
    words = content if isinstance(content, str) else ""
    child = next((child.id for child in session.children if child.id in words), None)
    assembler.observe(str(event.get("toolCallId")), content, at, child=child, **extra)


def _metrics(usage: dict[str, Any]) -> Metrics:
    cached, written = usage.get("inputCacheRead") or 0, usage.get("inputCacheCreation") or 0
    return Metrics(
        prompt_tokens=(usage.get("inputOther") or 0) + cached + written,
        completion_tokens=usage.get("output"),
        cached_tokens=cached,
        extra={"cache_write_tokens": written} if written else None,
    )


def _content(content: Any, assembler: Assembler) -> Content:
    if content is None or isinstance(content, str):
        return content or ""
    parts = []
    for part in content:
        shown = part.get("imageUrl") or part.get("image_url")
        url = shown.get("url") if isinstance(shown, dict) else shown
        if isinstance(url, str):
            parts.append(assembler.picture_at(url))
        else:
            parts.append(ContentPart(type="text", text=part.get("text") or f"[{part.get('type')}]"))
    return simple(parts)
