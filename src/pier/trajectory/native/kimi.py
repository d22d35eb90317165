"""Kimi's wire logs: a line per event of a model call, a directory per agent of a session."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pier.trajectory.native.assemble import Assembler, SessionLog, below_tops, first_records, iso, records

NAME = "kimi"


def find(root: Path) -> list[SessionLog]:
    """The sessions below a directory, or the one of a file; other agents of a session are below its main one."""
    found: list[tuple[SessionLog, Path | None]] = []
    tops: dict[Path, SessionLog] = {}
    for path, head in first_records(root, "agents/*/wire.jsonl"):
        if "protocol_version" not in head:
            continue
        place, is_main = path.parent.parent.parent, path.parent.name == "main"
        id_ = place.name.removeprefix("session_") if is_main else path.parent.name
        found.append((SessionLog(NAME, path, read, id=id_), None if is_main else place))
        if is_main:
            tops[place] = found[-1][0]
    return below_tops(found, tops)


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
                _event(row.get("event") or {}, at, assembler)
            case "context.apply_compaction":
                assembler.compacted(str(row.get("summary") or ""), at)
            case _:
                pass
        yield


def _message(message: dict[str, Any], at: str | None, assembler: Assembler) -> None:
    if message.get("role") in ("assistant", "tool"):
        return
    origin = (message.get("origin") or {}).get("kind")
    injected = None if origin in (None, "user") else True
    assembler.say("user", assembler.content(message.get("content")), at, injected=injected)


def _event(event: dict[str, Any], at: str | None, assembler: Assembler) -> None:
    match event.get("type"):
        case "step.begin":
            assembler.turn(event.get("uuid"), at, assembler.session.model)
        case "content.part":
            assembler.block(event.get("part") or {})
        case "tool.call":
            assembler.call(str(event.get("toolCallId")), str(event.get("name")), event.get("args") or {})
        case "tool.result":
            _result(event, at, assembler)
        case "step.end":
            if usage := event.get("usage"):
                cached, written = usage.get("inputCacheRead") or 0, usage.get("inputCacheCreation") or 0
                prompt = (usage.get("inputOther") or 0) + cached + written
                assembler.count(prompt, usage.get("output"), cached, written=written)
            assembler.note(stop_reason=event.get("finishReason"))


def _result(event: dict[str, Any], at: str | None, assembler: Assembler) -> None:
    told = event.get("result") or {}
    output = told.get("output")
    content = assembler.content(output) if isinstance(output, str | list) else json.dumps(output)
    failed = True if told.get("isError") else None
    assembler.observe(
        str(event.get("toolCallId")), content, at, child=assembler.session.child_in(content), is_error=failed
    )
