"""mini-swe-agent's trajectory file: one JSON document with the messages as they were sent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pier.trajectory.model import Metrics
from pier.trajectory.native.assemble import Assembler, Session, iso

NAME = "mini-swe-agent"


def find(root: Path) -> list[Session]:
    """The trajectory files below a directory, or the one that is given."""
    paths = [root] if root.is_file() else sorted(root.rglob("*traj*.json"))
    return [Session(NAME, path, read, id=path.stem) for path in paths if _is_log(path)]


def _is_log(path: Path) -> bool:
    with path.open("rb") as file:
        start, size = file.read(4096), path.stat().st_size
        file.seek(max(0, size - 4096))
        return b'"trajectory_format"' in start + file.read()


def read(session: Session, assembler: Assembler) -> Iterator[None]:
    document = json.loads(session.path.read_bytes())
    info = document.get("info") or {}
    session.version = info.get("mini_version") or session.version
    session.cost_usd = (info.get("model_stats") or {}).get("instance_cost") or None
    session.extra["exit_status"] = info.get("exit_status")
    for message in document.get("messages") or ():
        _message(message, session, assembler)
        yield


def _message(message: dict[str, Any], session: Session, assembler: Assembler) -> None:
    extra, role = message.get("extra") or {}, message.get("role")
    seconds = extra.get("timestamp")
    at = iso(seconds * 1000) if isinstance(seconds, (int, float)) else None
    content = _text(message.get("content"))
    if role == "assistant":
        response = extra.get("response") or {}
        session.model = session.model or response.get("model")
        assembler.turn(response.get("id"), at, response.get("model"))
        assembler.text(content)
        assembler.think(str(message.get("reasoning_content") or ""))
        for call in message.get("tool_calls") or ():
            function = call.get("function") or {}
            assembler.call(str(call.get("id")), str(function.get("name")), _parsed(function.get("arguments")))
        if usage := response.get("usage"):
            assembler.count(_metrics(usage))
    elif role == "tool":
        code = extra.get("returncode")
        known = {} if code is None else {"exit_code": code}
        assembler.observe(str(message.get("tool_call_id")), content, at, **known)
    elif role in ("system", "user"):
        assembler.say("user" if role == "user" else "system", content, at)
    else:
        assembler.say("system", content, at, kind=role)


def _metrics(usage: dict[str, Any]) -> Metrics:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return Metrics(
        prompt_tokens=usage.get("prompt_tokens"),
        completion_tokens=usage.get("completion_tokens"),
        cached_tokens=cached,
    )


def _parsed(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments or {}
    except ValueError:
        return arguments


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(str(part.get("text", f"[{part.get('type')}]")) for part in content)
