"""Pi's session logs: a line per message, with the tokens of each answer in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pier.trajectory.native.assemble import Assembler, SessionLog, first_records, records

NAME = "pi"


def find(root: Path) -> list[SessionLog]:
    """The sessions below a directory, or in one file."""
    found = first_records(root, "*.jsonl")
    own = ((path, head) for path, head in found if head.get("type") == "session" and {"cwd", "id"} <= set(head))
    return [SessionLog(NAME, path, read, id=str(head["id"])) for path, head in own]


def read(session: SessionLog, assembler: Assembler) -> Iterator[None]:
    for row in records(session.path):
        at = row.get("timestamp")
        match row.get("type"):
            case "message":
                _message(row.get("message") or {}, at, assembler)
            case "compaction":
                assembler.compacted(str(row.get("summary") or ""), at, tokens_before=row.get("tokensBefore"))
            case "branch_summary":
                assembler.say("system", str(row.get("summary") or ""), at, kind="branch_summary")
            case "custom_message":
                assembler.say("user", assembler.content(row.get("content")), at, injected=True)
            case _:
                pass
        yield


def _message(message: dict[str, Any], at: str | None, assembler: Assembler) -> None:
    role, content = message.get("role"), message.get("content")
    if role == "assistant":
        _answer(message, at, assembler)
    elif role == "toolResult":
        failed = True if message.get("isError") else None
        assembler.observe(str(message.get("toolCallId")), assembler.content(content), at, is_error=failed)
    elif role == "system":
        sections = [str(text) for text in (message.get("sections") or {}).values()]
        assembler.say("system", "\n\n".join([text for text in (str(content or ""), *sections) if text]), at)
    else:
        assembler.say("user", assembler.content(content), at, kind=None if role == "user" else role)


def _answer(message: dict[str, Any], at: str | None, assembler: Assembler) -> None:
    assembler.turn(message.get("responseId"), at, message.get("model"))
    for part in message.get("content") or ():
        assembler.block(part, "toolCall", "arguments")
    usage = message.get("usage") or {}
    if usage.get("totalTokens"):
        cached, written = usage.get("cacheRead") or 0, usage.get("cacheWrite") or 0
        prompt, cost = (usage.get("input") or 0) + cached + written, (usage.get("cost") or {}).get("total")
        reasoning = usage.get("reasoning")
        assembler.count(prompt, usage.get("output"), cached, written=written, reasoning=reasoning, cost=cost)
    assembler.note(stop_reason=message.get("stopReason"), error=message.get("errorMessage"))
