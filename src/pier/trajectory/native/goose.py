"""Goose's database: sessions and their messages. One message of the assistant is one model call or a piece of one."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pier.trajectory.native.assemble import Assembler, SessionLog, databases, iso, nested, opened

NAME = "goose"
_TABLES = ("sessions", "messages")
_SESSIONS = "SELECT * FROM sessions ORDER BY created_at, id"
_MESSAGES = "SELECT * FROM messages WHERE session_id = ? ORDER BY id"
_COMPACTIONS = (
    "SELECT input_tokens, output_tokens, created_timestamp FROM usage_ledger"
    " WHERE session_id = ? AND is_compaction ORDER BY id DESC"
)


def find(root: Path) -> list[SessionLog]:
    """The sessions of every database below a directory, or of one; those that another one started are its children."""
    tops: list[SessionLog] = []
    for path, rows in databases(root, "sessions.db", _SESSIONS, *_TABLES):
        found: list[tuple[SessionLog, str | None]] = []
        for row in map(dict, rows):
            session = SessionLog(NAME, path, read, id=row["id"], cost_usd=row["accumulated_cost"])
            session.extra["title"] = row["name"] or None
            found.append((session, row.get("parent_session_id")))
        tops += nested(found)
    return [session for session in tops if session.children or _has_messages(session)]


def _has_messages(session: SessionLog) -> bool:
    with opened(session.path, *_TABLES) as database:
        return database.execute(_MESSAGES, (session.id,)).fetchone() is not None


def read(session: SessionLog, assembler: Assembler) -> Iterator[None]:
    with opened(session.path, *_TABLES) as database:
        waiting = database.execute(_COMPACTIONS, (session.id,)).fetchall()
        for row in database.execute(_MESSAGES, (session.id,)):
            while waiting and waiting[-1]["created_timestamp"] < row["created_timestamp"]:
                _compacted(waiting.pop(), assembler)
            parts, facts = json.loads(row["content_json"]), json.loads(row["metadata_json"] or "{}")
            at = iso(row["created_timestamp"] * 1000)
            if row["role"] == "assistant":
                _answer(row["message_id"], at, parts, facts, assembler)
            else:
                _question(at, parts, facts, assembler)
            yield
        while waiting:
            _compacted(waiting.pop(), assembler)


def _compacted(row: sqlite3.Row, assembler: Assembler) -> None:
    used = {"input_tokens": row["input_tokens"], "output_tokens": row["output_tokens"]}
    assembler.compacted("", iso(row["created_timestamp"] * 1000), **used)


def _answer(
    id_: str | None, at: str | None, parts: list[dict[str, Any]], facts: dict[str, Any], assembler: Assembler
) -> None:
    model = (facts.get("inference") or {}).get("requestedModel")
    if id_ is None or assembler.key != id_:
        assembler.turn(id_, at, model)
    for part in parts:
        if part.get("type") == "toolRequest":
            asked = part.get("toolCall") or {}
            value = asked.get("value") or {}
            assembler.call(str(part.get("id")), str(value.get("name")), value.get("arguments") or {})
            assembler.note(error=asked.get("error"))
        else:
            assembler.block(part)
    if usage := facts.get("usage"):
        cached = usage.get("cacheReadInputTokens") or usage.get("cacheReadTokens")
        written = usage.get("cacheWriteInputTokens") or usage.get("cacheWriteTokens")
        assembler.count(usage.get("inputTokens"), usage.get("outputTokens"), cached, written=written)
    if facts.get("userVisible") is False or facts.get("agentVisible") is False:
        assembler.note(user_visible=facts.get("userVisible"), agent_visible=facts.get("agentVisible"))


def _question(at: str | None, parts: list[dict[str, Any]], facts: dict[str, Any], assembler: Assembler) -> None:
    said: list[dict[str, Any]] = []
    for part in parts:
        if part.get("type") == "toolResponse":
            _result(part, at, assembler)
        else:
            said.append(part)
    if said:
        injected = True if facts.get("turnContext") or facts.get("userVisible") is False else None
        assembler.say("user", assembler.content(said, whole=True), at, injected=injected)


def _result(part: dict[str, Any], at: str | None, assembler: Assembler) -> None:
    told = part.get("toolResult") or {}
    value = told.get("value") or {}
    content = assembler.content(value.get("content"), whole=True)
    structured = value.get("structuredContent")
    facts = structured if isinstance(structured, dict) else {}
    failed = True if told.get("status") == "error" or value.get("isError") else None
    children = {child.id for child in assembler.session.children}
    child = next((id_ for id_ in map(str, facts.values()) if id_ in children), None)
    said, code = content or str(told.get("error") or ""), facts.get("exit_code")
    assembler.observe(str(part.get("id")), said, at, child=child, exit_code=code, is_error=failed)
