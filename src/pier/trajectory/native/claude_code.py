"""Claude Code's session logs: a line per content block, sub-agents in separate files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pier.trajectory.native.assemble import Assembler, SessionLog, begins_with, records
from pier.tree import find_files

NAME = "claude-code"


def find(root: Path) -> list[SessionLog]:
    """The sessions below a directory (a configuration directory, a project or a trial's logs), or in one file."""
    paths = find_files(root, "*.jsonl")
    return [_session(path) for path in paths if path.parent.name != "subagents" and begins_with(path, _is_own)]


def _is_own(row: dict[str, Any]) -> bool:
    said = row.get("type") in ("user", "assistant") and "content" in (row.get("message") or {})
    return said and "sessionId" in row and "uuid" in row


def _session(path: Path) -> SessionLog:
    session = SessionLog(NAME, path, read, id=path.stem)
    for child in find_files(path.parent, "agent-*.jsonl", below=f"{path.stem}/subagents"):
        session.children.append(SessionLog(NAME, child, read, id=child.stem.removeprefix("agent-")))
    return session


def read(session: SessionLog, assembler: Assembler) -> Iterator[None]:
    for row in records(session.path):
        session.version = row.get("version") or session.version
        kind = row.get("type")
        if kind == "assistant":
            _assistant(row, assembler)
        elif kind == "user":
            _user(row, assembler)
        elif kind == "system" and row.get("subtype") == "compact_boundary":
            assembler.compacted("", row.get("timestamp"), **(row.get("compactMetadata") or {}))
        elif kind == "cost-state":
            session.cost_usd = row.get("totalCostUSD", session.cost_usd)
        yield


def _assistant(row: dict[str, Any], assembler: Assembler) -> None:
    message = row.get("message") or {}
    key = message.get("id") or row.get("uuid")
    if assembler.key != key:
        assembler.turn(key, row.get("timestamp"), message.get("model"))
    for block in message.get("content") or ():
        if block.get("type") == "redacted_thinking":
            assembler.note(redacted_thinking=True)
        else:
            assembler.block(block, "server_tool_use" if block.get("type") == "server_tool_use" else "tool_use")
    if usage := message.get("usage"):
        cached, written = usage.get("cache_read_input_tokens") or 0, usage.get("cache_creation_input_tokens") or 0
        prompt = (usage.get("input_tokens") or 0) + cached + written
        assembler.count(prompt, usage.get("output_tokens") or 0, cached, written=written)
    assembler.note(stop_reason=message.get("stop_reason"), api_error=row.get("isApiErrorMessage"))


def _user(row: dict[str, Any], assembler: Assembler) -> None:
    content, at = (row.get("message") or {}).get("content"), row.get("timestamp")
    if row.get("isCompactSummary"):
        assembler.say("system", assembler.content(content), at, kind="compaction_summary")
        return
    rest = []
    for block in content if isinstance(content, list) else ():
        if block.get("type") == "tool_result":
            _result(block, row, assembler)
        else:
            rest.append(block)
    said = content if isinstance(content, str) else rest
    if said:
        assembler.say("user", assembler.content(said), at, injected=True if row.get("isMeta") else None)


def _result(block: dict[str, Any], row: dict[str, Any], assembler: Assembler) -> None:
    told = row.get("toolUseResult")
    child = told.get("agentId") if isinstance(told, dict) else None
    said, failed = assembler.content(block.get("content")), True if block.get("is_error") else None
    assembler.observe(block.get("tool_use_id"), said, row.get("timestamp"), child=child, is_error=failed)
