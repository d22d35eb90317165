"""Pi's session logs: a line per message, with the tokens of each answer in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pier.trajectory.model import Content, ContentPart, Metrics
from pier.trajectory.native.assemble import Assembler, SessionLog, records, simple
from pier.tree import find_files

NAME = "pi"


def find(root: Path) -> list[SessionLog]:
    """The sessions below a directory, or in one file."""
    paths = find_files(root, "*.jsonl")
    found = []
    for path in paths:
        head = next(records(path), {})
        if head.get("type") == "session" and "cwd" in head and "id" in head:
            found.append(SessionLog(NAME, path, read, id=str(head["id"])))
    return found


def read(session: SessionLog, assembler: Assembler) -> Iterator[None]:
    for row in records(session.path):
        at = row.get("timestamp")
        match row.get("type"):
            case "message":
                _message(row.get("message") or {}, at, session, assembler)
            case "compaction":
                assembler.compacted(str(row.get("summary") or ""), at, tokens_before=row.get("tokensBefore"))
            case "branch_summary":
                assembler.say("system", str(row.get("summary") or ""), at, kind="branch_summary")
            case "custom_message":
                assembler.say("user", _content(row.get("content"), assembler), at, injected=True)
            case _:
                pass
        yield


def _message(message: dict[str, Any], at: str | None, session: SessionLog, assembler: Assembler) -> None:
    role, content = message.get("role"), message.get("content")
    if role == "assistant":
        _answer(message, at, session, assembler)
    elif role == "toolResult":
        extra = {"is_error": True} if message.get("isError") else {}
        assembler.observe(str(message.get("toolCallId")), _content(content, assembler), at, **extra)
    elif role == "system":
        sections = [str(text) for text in (message.get("sections") or {}).values()]
        assembler.say("system", "\n\n".join([text for text in (str(content or ""), *sections) if text]), at)
    else:
        extra = {} if role == "user" else {"kind": role}
        assembler.say("user", _content(content, assembler), at, **extra)


def _answer(message: dict[str, Any], at: str | None, session: SessionLog, assembler: Assembler) -> None:
    session.model = session.model or message.get("model")
    assembler.turn(message.get("responseId"), at, message.get("model"))
    for part in message.get("content") or ():
        match part.get("type"):
            case "text":
                assembler.text(part.get("text") or "")
            case "thinking":
                assembler.think(part.get("thinking") or "")
            case "toolCall":
                assembler.call(str(part.get("id")), str(part.get("name")), part.get("arguments") or {})
            case other:
                assembler.note(**{str(other): part})
    usage = message.get("usage") or {}
    if usage.get("totalTokens"):
        assembler.count(_metrics(usage))
    assembler.note(stop_reason=message.get("stopReason"), error=message.get("errorMessage"))


def _metrics(usage: dict[str, Any]) -> Metrics:
    cached, written = usage.get("cacheRead") or 0, usage.get("cacheWrite") or 0
    extra = {"cache_write_tokens": written, "reasoning_tokens": usage.get("reasoning")}
    return Metrics(
        prompt_tokens=(usage.get("input") or 0) + cached + written,
        completion_tokens=usage.get("output"),
        cached_tokens=cached,
        cost_usd=(usage.get("cost") or {}).get("total") or None,
        extra={name: count for name, count in extra.items() if count} or None,
    )


def _content(content: Any, assembler: Assembler) -> Content:
    if content is None or isinstance(content, str):
        return content or ""
    parts = []
    for part in content:
        if part.get("type") == "image":
            parts.append(assembler.picture(part.get("mimeType", ""), part.get("data", "")))
        else:
            parts.append(ContentPart(type="text", text=part.get("text") or f"[{part.get('type')}]"))
    return simple(parts)
