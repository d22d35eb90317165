"""OpenCode's database: sessions, messages and their parts. One message of the assistant is one model call."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pier.trajectory.native.assemble import Assembler, SessionLog, databases, iso, nested, opened

NAME = "opencode"
_TABLES = ("session", "message", "part")
_SESSIONS = "SELECT id, parent_id, version, title FROM session ORDER BY time_created, id"
_MESSAGES = "SELECT id, time_created, data FROM message WHERE session_id = ? ORDER BY time_created, id"
_PARTS = "SELECT data FROM part WHERE message_id = ? ORDER BY id"


def find(root: Path) -> list[SessionLog]:
    """The sessions of every database below a directory, or of one; those that another one started are its children."""
    tops: list[SessionLog] = []
    for path, rows in databases(root, "opencode.db", _SESSIONS, *_TABLES):
        found: list[tuple[SessionLog, str | None]] = []
        for id_, parent, version, title in rows:
            session = SessionLog(NAME, path, read, id=id_, version=version or "unknown", extra={"title": title})
            found.append((session, parent))
        tops += nested(found)
    return tops


def read(session: SessionLog, assembler: Assembler) -> Iterator[None]:
    with opened(session.path, *_TABLES) as database:
        for id_, created, data in database.execute(_MESSAGES, (session.id,)):
            message = json.loads(data)
            parts = (json.loads(row[0]) for row in database.execute(_PARTS, (id_,)))
            if message.get("role") == "assistant":
                _answer(id_, created, message, parts, assembler)
            else:
                _question(created, parts, assembler)
            yield


def _question(created: int, parts: Iterator[dict[str, Any]], assembler: Assembler) -> None:
    for part in parts:
        if part.get("type") == "compaction":
            assembler.compacted("", iso(created), auto=part.get("auto"))
        elif part.get("type") == "text":
            injected = True if part.get("synthetic") else None
            assembler.say("user", part.get("text") or "", iso(created), injected=injected)
        elif part.get("type") == "file" and str(part.get("mime")).startswith("image/"):
            assembler.say("user", assembler.content([{"image_url": str(part.get("url"))}]), iso(created))
        else:
            assembler.say("user", f"[{part.get('type')}]", iso(created), part=part)


def _answer(
    id_: str, created: int, message: dict[str, Any], parts: Iterator[dict[str, Any]], assembler: Assembler
) -> None:
    assembler.turn(id_, iso(created), message.get("modelID"))
    for part in parts:
        match part.get("type"):
            case "tool":
                _tool(part, assembler)
            case "step-start" | "step-finish" | "snapshot" | "patch":
                pass
            case _:
                assembler.block(part)
    if tokens := message.get("tokens"):
        cache, reasoning = tokens.get("cache") or {}, tokens.get("reasoning") or 0
        prompt = (tokens.get("input") or 0) + (cache.get("read") or 0) + (cache.get("write") or 0)
        said = (tokens.get("output") or 0) + reasoning
        assembler.count(prompt, said, cache.get("read"), reasoning=reasoning, cost=message.get("cost"))
    summary = True if message.get("summary") is True else None
    assembler.note(finish=message.get("finish"), error=message.get("error"), summary=summary)


def _tool(part: dict[str, Any], assembler: Assembler) -> None:
    state = part.get("state") or {}
    assembler.call(str(part.get("callID")), str(part.get("tool")), state.get("input") or {})
    if state.get("status") not in ("completed", "error"):
        return
    facts = state.get("metadata") or {}
    failed = state["status"] == "error"
    output = state.get("error" if failed else "output") or ""
    shown = [{"image_url": str(file.get("url"))} for file in state.get("attachments") or ()]
    content = assembler.content([str(output), *shown]) if shown else output
    at, child = iso((state.get("time") or {}).get("end")), facts.get("sessionId")
    known = {"exit_code": facts.get("exit"), "is_error": failed or None}
    assembler.observe(str(part.get("callID")), content, at, child=child, **known)
