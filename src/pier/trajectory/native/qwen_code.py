"""Qwen Code's chat logs: a line per message, sub-agents in a directory that is named after their session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pier.trajectory.native.assemble import (
    Assembler,
    SessionLog,
    begins_with,
    below_tops,
    document,
    function_response,
    records,
)
from pier.tree import find_files

NAME = "qwen-code"
_BESIDE = frozenset({"ui_telemetry", "attribution_snapshot", "file_history_snapshot"})
"""Lines about what other lines say already, or about nothing that was said."""


def find(root: Path) -> list[SessionLog]:
    """The sessions below a directory (a home, a project or a trial's logs), or in one file."""
    if root.is_file():
        return [SessionLog(NAME, root, read, id=root.stem)] if _is_log(root) else []
    tops = {
        (path.parent.parent, path.stem): SessionLog(NAME, path, read, id=path.stem)
        for path in find_files(root, "*.jsonl")
        if "subagents" not in path.relative_to(root).parts and _is_log(path)
    }
    found: list[tuple[SessionLog, tuple[Path, str] | None]] = [(session, None) for session in tops.values()]
    for path in find_files(root, "agent-*.jsonl"):
        if path.parent.parent.name == "subagents" and _is_log(path):
            call = document(path.with_suffix(".meta.json")).get("toolUseId")  # of the tool call that began it
            child = SessionLog(NAME, path, read, id=path.stem, extra={"call": call})
            found.append((child, (path.parent.parent.parent, path.parent.name)))
    return below_tops(found, tops)


def _is_log(path: Path) -> bool:
    return begins_with(path, lambda row: "uuid" in row and "parts" in (row.get("message") or {}))


def read(session: SessionLog, assembler: Assembler) -> Iterator[None]:
    children = {child.extra.get("call"): child.id for child in session.children}
    before: Any = None
    for row in records(session.path):
        session.version = row.get("version") or session.version
        parts = (row.get("message") or {}).get("parts") or []
        match row.get("type"):
            case "assistant":
                # A sub-agent's log has the tokens of a model call first, its tool calls in a separate line.
                goes_on = before == "assistant" and row.get("isSidechain") and "usageMetadata" not in row
                _answer(row, parts, assembler, goes_on=bool(goes_on))
            case "tool_result":
                _results(row, parts, assembler, children)
            case "user":
                injected = None if row.get("provenance") in (None, "real_user") else True
                assembler.say("user", assembler.content(parts), row.get("timestamp"), injected=injected)
            case "system":
                _system(row, assembler)
            case _:
                pass
        before = row.get("type")
        yield


def _answer(row: dict[str, Any], parts: list[dict[str, Any]], assembler: Assembler, *, goes_on: bool) -> None:
    if not goes_on:
        assembler.turn(row.get("uuid"), row.get("timestamp"), row.get("model"))
    for part in parts:
        if call := part.get("functionCall"):
            assembler.call(str(call.get("id")), str(call.get("name")), call.get("args") or {})
        elif part.get("thought"):
            assembler.think(part.get("text") or "")
        elif "text" in part:
            assembler.text(part["text"] or "")
        else:
            assembler.note(**part)
    if usage := row.get("usageMetadata"):
        used = (usage.get(f"{name}TokenCount") for name in ("prompt", "candidates", "cachedContent"))
        assembler.count(*used, reasoning=usage.get("thoughtsTokenCount"))


def _results(
    row: dict[str, Any], parts: list[dict[str, Any]], assembler: Assembler, children: dict[str | None, str]
) -> None:
    told = row.get("toolCallResult") or {}
    shown = told.get("resultDisplay")
    code = shown.get("exitCode") if isinstance(shown, dict) else None
    status = None if told.get("status") == "success" else told.get("status")
    rest = []
    for part in parts:
        if answer := part.get("functionResponse"):
            call = str(answer.get("id"))
            said, at = function_response(answer, assembler), row.get("timestamp")
            assembler.observe(call, said, at, child=children.get(call), exit_code=code, status=status)
        else:
            rest.append(part)
    if rest:
        assembler.observe(None, assembler.content(rest), row.get("timestamp"))


def _system(row: dict[str, Any], assembler: Assembler) -> None:
    subtype, payload = row.get("subtype"), row.get("systemPayload") or {}
    if subtype == "chat_compression":
        history = payload.get("compressedHistory") or [{}]
        assembler.compacted(str(assembler.content(history[0].get("parts") or [])), row.get("timestamp"))
    elif subtype not in _BESIDE:
        assembler.say("system", "", row.get("timestamp"), kind=subtype, payload=payload)
