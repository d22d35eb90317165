"""mini-swe-agent's trajectory file: one JSON document with the messages as they were sent."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pier.trajectory.native.assemble import Assembler, SessionLog, arguments_in, iso, members
from pier.tree import find_files, open_regular

NAME = "mini-swe-agent"


def find(root: Path) -> list[SessionLog]:
    """The trajectory files below a directory, or the one that is given."""
    paths = find_files(root, "*traj*.json")
    return [SessionLog(NAME, path, read, id=path.stem) for path in paths if _is_log(path)]


def _is_log(path: Path) -> bool:
    with open_regular(path) as file:
        start, size = file.read(4096), os.fstat(file.fileno()).st_size
        file.seek(max(0, size - 4096))
        return b'"trajectory_format"' in start + file.read()


def read(session: SessionLog, assembler: Assembler) -> Iterator[None]:
    for name, value in members(session.path, "messages"):
        if name == "messages" and isinstance(value, dict):
            _message(value, assembler)
        elif name == "info" and isinstance(value, dict):
            session.version = value.get("mini_version") or session.version
            session.cost_usd = (value.get("model_stats") or {}).get("instance_cost") or None
            session.extra["exit_status"] = value.get("exit_status")
        yield


def _message(message: dict[str, Any], assembler: Assembler) -> None:
    extra, role = message.get("extra") or {}, message.get("role")
    seconds = extra.get("timestamp")
    at = iso(seconds * 1000) if isinstance(seconds, (int, float)) else None
    content = assembler.content(message.get("content"))
    if role == "assistant":
        response = extra.get("response") or {}
        assembler.turn(response.get("id"), at, response.get("model"))
        assembler.text(content if isinstance(content, str) else "\n".join(part.text or "" for part in content))
        assembler.think(str(message.get("reasoning_content") or ""))
        for call in message.get("tool_calls") or ():
            function = call.get("function") or {}
            assembler.call(str(call.get("id")), str(function.get("name")), arguments_in(function.get("arguments")))
        if usage := response.get("usage"):
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            assembler.count(usage.get("prompt_tokens"), usage.get("completion_tokens"), cached)
    elif role == "tool":
        assembler.observe(str(message.get("tool_call_id")), content, at, exit_code=extra.get("returncode"))
    elif role in ("system", "user"):
        assembler.say("user" if role == "user" else "system", content, at)
    else:
        assembler.say("system", content, at, kind=role)
