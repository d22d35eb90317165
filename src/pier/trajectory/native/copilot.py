"""Copilot's events: a line per event of a session, those of sub-agents among them, marked with their agent's id."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from pier.trajectory.native.assemble import Assembler, SessionLog, first_records, records

NAME = "copilot"


def find(root: Path) -> list[SessionLog]:
    """The sessions below a directory, or in one file. Sub-agents are children that read the same file."""
    found = []
    for path, head in first_records(root, "events.jsonl"):
        if head.get("type") != "session.start":
            continue
        session = SessionLog(NAME, path, read, id=str((head.get("data") or {}).get("sessionId") or path.parent.name))
        agents = dict.fromkeys(row["agentId"] for row in records(path) if row.get("agentId"))
        session.children = [SessionLog(NAME, path, partial(read, agent=id_), id=str(id_)) for id_ in agents]
        found.append(session)
    return found


def read(session: SessionLog, assembler: Assembler, agent: str | None = None) -> Iterator[None]:
    used: dict[str, Any] = {}
    for row in records(session.path):
        data, at = row.get("data") or {}, row.get("timestamp")
        kind = row.get("type")
        if kind == "session.start":
            session.version = str(data.get("copilotVersion") or session.version)
            session.model = session.model or data.get("selectedModel")
        if (row.get("agentId") or None) != agent:
            continue
        match kind:
            case "user.message":
                assembler.say("user", str(data.get("content") or ""), at)
            case "system.message":
                assembler.say("system", str(data.get("content") or ""), at)
            case "session.usage_record":
                used = data.get("usage") or {}
            case "assistant.message":
                _answer(data, at, used, assembler)
                used = {}
            case "tool.execution_complete":
                _result(data, at, assembler)
            case "session.compaction_complete":
                before = data.get("preCompactionTokens")
                assembler.compacted(str(data.get("summaryContent") or ""), at, tokens_before=before)
            case "session.error" | "session.warning" | "abort":
                assembler.say("system", str(data.get("message") or data.get("reason") or ""), at, kind=kind)
            case _:
                pass
        yield


def _answer(data: dict[str, Any], at: str | None, used: dict[str, Any], assembler: Assembler) -> None:
    assembler.turn(data.get("messageId"), at, data.get("model"))
    assembler.text(str(data.get("content") or ""))
    assembler.think(str(data.get("reasoningText") or ""))
    for request in data.get("toolRequests") or ():
        assembler.call(str(request.get("toolCallId")), str(request.get("name")), request.get("arguments") or {})
    if used:
        counts = (used.get(name) for name in ("inputTokens", "outputTokens", "cacheReadTokens"))
        assembler.count(*counts, written=used.get("cacheWriteTokens"), reasoning=used.get("reasoningTokens"))


def _result(data: dict[str, Any], at: str | None, assembler: Assembler) -> None:
    told = data.get("result") or {}
    code = (data.get("shellExecution") or {}).get("exitCode")
    failed = True if data.get("success") is False else None
    said = told.get("content") or (data.get("error") or {}).get("message") or ""
    call = str(data.get("toolCallId"))
    child = next((child.id for child in assembler.session.children if child.id in (call, data.get("agentId"))), None)
    assembler.observe(call, str(said), at, child=child, exit_code=code, is_error=failed)
