"""Codex's rollout files: the items of the wire, with a record of tokens after each answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pier.trajectory.model import Content
from pier.trajectory.native.assemble import Assembler, SessionLog, arguments_in, first_records, nested, records

NAME = "codex"
_CALLS = ("function_call", "custom_tool_call", "local_shell_call", "web_search_call")
_OUTPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")


def find(root: Path) -> list[SessionLog]:
    """The sessions below a directory, or in one file. Those that another one started are its children."""
    found: list[tuple[SessionLog, str | None]] = []
    for path, first in first_records(root, "rollout-*.jsonl"):
        if first.get("type") == "session_meta":
            meta = first.get("payload") or {}
            found.append((SessionLog(NAME, path, read, id=str(meta.get("id"))), _parent(meta)))
    return nested(found)


def _parent(meta: dict[str, Any]) -> str | None:
    source = meta.get("source")
    spawned = (source.get("subagent") or {}) if isinstance(source, dict) else {}
    inner = spawned.get("thread_spawn") if isinstance(spawned, dict) else None
    return meta.get("parent_thread_id") or (inner or {}).get("parent_thread_id")


def read(session: SessionLog, assembler: Assembler) -> Iterator[None]:
    exits: dict[str, int] = {}
    for row in records(session.path):
        payload, at = row.get("payload") or {}, row.get("timestamp")
        match row.get("type"):
            case "session_meta":
                session.version = payload.get("cli_version") or session.version
            case "turn_context":
                session.model = payload.get("model") or session.model
            case "response_item":
                _item(payload, at, assembler, exits)
            case "token_usage_record":
                _count(payload.get("usage") or {}, assembler)
            case "compacted":
                summary = payload.get("message") or ""
                assembler.compacted(summary, at, **assembler.take_back(summary))
            case "event_msg":
                _event(payload, assembler, exits)
        yield


def _event(payload: dict[str, Any], assembler: Assembler, exits: dict[str, int]) -> None:
    item = payload.get("item") or {}
    if item.get("type") == "CommandExecution" and item.get("exit_code") is not None:
        exits[str(item.get("id"))] = item["exit_code"]
    usage = (payload.get("info") or {}).get("last_token_usage") if payload.get("type") == "token_count" else None
    if usage:
        _count(usage, assembler)


def _item(item: dict[str, Any], at: str | None, assembler: Assembler, exits: dict[str, int]) -> None:
    kind, role = item.get("type"), item.get("role")
    if kind == "message" and role != "assistant":
        content = assembler.content(item.get("content"))
        injected = role == "user" and isinstance(content, str) and content.lstrip().startswith("<")
        assembler.say("user" if role == "user" else "system", content, at, injected=injected or None)
    elif kind in _OUTPUTS:
        call = str(item.get("call_id"))
        code = exits.pop(call, None)
        output = _output(item.get("output"), assembler)
        assembler.observe(call, output, at, child=assembler.session.child_in(output), exit_code=code)
    elif kind in ("message", "reasoning", *_CALLS):
        _answer(item, at, assembler)


def _answer(item: dict[str, Any], at: str | None, assembler: Assembler) -> None:
    """An item of an answer. The answer before it is over once its tokens were reported or a tool has answered."""
    if assembler.is_over:
        assembler.turn(None, at, assembler.session.model)
    if item["type"] == "message":
        assembler.text(str(assembler.content(item.get("content"))))
    elif item["type"] == "reasoning":
        told = item.get("summary") or item.get("content") or ()
        assembler.think("\n\n".join(part.get("text", "") for part in told))
    else:
        arguments = item.get("arguments", item.get("input", item.get("action")))
        id_ = str(item.get("call_id") or item.get("id"))
        assembler.call(id_, item.get("name") or item["type"], arguments_in(arguments))


def _output(output: Any, assembler: Assembler) -> Content:
    if isinstance(output, str):
        return output
    if isinstance(output, dict):
        return str(output.get("content", json.dumps(output)))
    return assembler.content(output)


def _count(usage: dict[str, Any], assembler: Assembler) -> None:
    used = (usage.get(name) for name in ("input_tokens", "output_tokens", "cached_input_tokens"))
    assembler.count(*used, reasoning=usage.get("reasoning_output_tokens"))
