"""Gemini CLI's chat logs: a message is written again under its id when its tools have answered."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pier.trajectory.model import Content, ContentPart, Metrics
from pier.trajectory.native.assemble import Assembler, SessionLog, nested, records, simple
from pier.tree import find_files

NAME = "gemini-cli"


def find(root: Path) -> list[SessionLog]:
    """The sessions below a directory, or in one file; sub-agents are in a directory with their session's id."""
    paths = find_files(root, "*.jsonl")
    found: list[tuple[SessionLog, str | None]] = []
    for path in paths:
        head = next(records(path), {})
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
                    "user", _content(message.get("content"), assembler), message.get("timestamp"), injected=True
                )
            continue
        if waiting is not None and row.get("id") != waiting.get("id"):
            _answer(waiting, session, assembler)
            waiting = None
        if row.get("type") == "gemini":
            waiting = row
        elif row.get("type"):
            _other(row, assembler)
        yield
    if waiting is not None:
        _answer(waiting, session, assembler)


def _other(row: dict[str, Any], assembler: Assembler) -> None:
    content, at = row.get("content"), row.get("timestamp")
    blocks: list[Any] = content if isinstance(content, list) else [{"text": content or ""}]
    said = []
    for block in blocks:
        if isinstance(block, dict) and "functionResponse" in block:
            answer: dict[str, Any] = block["functionResponse"]
            assembler.observe(str(answer.get("id")), _response(answer, assembler), at)
        else:
            said.append(block)
    if said:
        source = "user" if row["type"] == "user" else "system"
        extra = {} if row["type"] in ("user", "info") else {"kind": row["type"]}
        assembler.say(source, _content(said, assembler), at, **extra)


def _answer(row: dict[str, Any], session: SessionLog, assembler: Assembler) -> None:
    session.model = session.model or row.get("model")
    assembler.turn(row.get("id"), row.get("timestamp"), row.get("model"))
    assembler.text(str(_content(row.get("content"), assembler)))
    for thought in row.get("thoughts") or ():
        parts = (thought.get("subject"), thought.get("description"))
        assembler.think("\n".join(part for part in parts if part))
    if tokens := row.get("tokens"):
        thinking = tokens.get("thoughts") or 0
        assembler.count(
            Metrics(
                prompt_tokens=tokens.get("input"),
                completion_tokens=(tokens.get("output") or 0) + thinking,
                cached_tokens=tokens.get("cached"),
                extra={"reasoning_tokens": thinking} if thinking else None,
            )
        )
    for call in row.get("toolCalls") or ():
        assembler.call(str(call.get("id")), str(call.get("name")), call.get("args") or {})
        results = [part["functionResponse"] for part in call.get("result") or () if "functionResponse" in part]
        extra = {} if call.get("status") in (None, "success") else {"status": call["status"]}
        for answer in results:
            child = call.get("agentId") or (answer.get("response") or {}).get("agentId")
            known = {session.id for session in session.children}
            assembler.observe(
                str(call.get("id")),
                _response(answer, assembler),
                call.get("timestamp"),
                child=child if child in known else None,
                **extra,
            )


def _response(answer: dict[str, Any], assembler: Assembler) -> Content:
    """What a tool answered, with the pictures that it gave."""
    response = answer.get("response") or {}
    text = str(response.get("output") or response.get("error") or response)
    if not answer.get("parts"):
        return text
    return _content([{"text": text}, *answer["parts"]], assembler)


def _content(content: Any, assembler: Assembler) -> Content:
    if content is None or isinstance(content, str):
        return content or ""
    parts = []
    for part in content:
        if isinstance(part, str):
            parts.append(ContentPart(type="text", text=part))
            continue
        inline = part.get("inlineData") or {}
        if inline:
            parts.append(assembler.picture(inline.get("mimeType", ""), inline.get("data", "")))
        else:
            parts.append(ContentPart(type="text", text=part.get("text") or f"[{', '.join(part)}]"))
    return simple(parts)
