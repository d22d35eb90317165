"""Gemini CLI's chat logs: a message is written again under its id when its tools have answered."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pier.trajectory.native.assemble import Assembler, SessionLog, first_records, function_response, nested, records

NAME = "gemini-cli"


def find(root: Path) -> list[SessionLog]:
    """The sessions below a directory, or in one file; sub-agents are in a directory with their session's id."""
    found: list[tuple[SessionLog, str | None]] = []
    for path, head in first_records(root, "*.jsonl"):
        if "sessionId" in head and "projectHash" in head:
            session = SessionLog(NAME, path, read, id=str(head["sessionId"]))
            found.append((session, path.parent.name if head.get("kind") == "subagent" else None))
    return nested(found)


def read(session: SessionLog, assembler: Assembler) -> Iterator[None]:
    waiting: dict[str, Any] | None = None
    for row in records(session.path):
        if "$set" in row:
            for message in (row["$set"] or {}).get("messages") or ():
                assembler.say(
                    "user", assembler.content(message.get("content")), message.get("timestamp"), injected=True
                )
            continue
        if waiting is not None and row.get("id") != waiting.get("id"):
            _answer(waiting, assembler)
            waiting = None
        if row.get("type") == "gemini":
            waiting = row
        elif row.get("type"):
            _other(row, assembler)
        yield
    if waiting is not None:
        _answer(waiting, assembler)


def _other(row: dict[str, Any], assembler: Assembler) -> None:
    content, at = row.get("content"), row.get("timestamp")
    blocks: list[Any] = content if isinstance(content, list) else [{"text": content or ""}]
    said = []
    for block in blocks:
        if isinstance(block, dict) and "functionResponse" in block:
            answer: dict[str, Any] = block["functionResponse"]
            assembler.observe(str(answer.get("id")), function_response(answer, assembler), at)
        else:
            said.append(block)
    if said:
        source = "user" if row["type"] == "user" else "system"
        kind = None if row["type"] in ("user", "info") else row["type"]
        assembler.say(source, assembler.content(said), at, kind=kind)


def _answer(row: dict[str, Any], assembler: Assembler) -> None:
    assembler.turn(row.get("id"), row.get("timestamp"), row.get("model"))
    assembler.text(str(assembler.content(row.get("content"))))
    for thought in row.get("thoughts") or ():
        parts = (thought.get("subject"), thought.get("description"))
        assembler.think("\n".join(part for part in parts if part))
    if tokens := row.get("tokens"):
        thinking = tokens.get("thoughts") or 0
        said = (tokens.get("output") or 0) + thinking
        assembler.count(tokens.get("input"), said, tokens.get("cached"), reasoning=thinking)
    for call in row.get("toolCalls") or ():
        assembler.call(str(call.get("id")), str(call.get("name")), call.get("args") or {})
        results = [part["functionResponse"] for part in call.get("result") or () if "functionResponse" in part]
        status = None if call.get("status") == "success" else call.get("status")
        for answer in results:
            child = call.get("agentId") or (answer.get("response") or {}).get("agentId")
            said, at = function_response(answer, assembler), call.get("timestamp")
            assembler.observe(str(call.get("id")), said, at, child=child, status=status)
