"""OpenHands' conversations: a file per event, with the tokens of each model call in the conversation's state."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pier.trajectory.native.assemble import Assembler, SessionLog, arguments_in, document
from pier.tree import find_files

NAME = "openhands"
_BESIDE = frozenset({"ConversationStateUpdateEvent", "TokenEvent", "LLMCompletionLogEvent", "StreamingDeltaEvent"})
"""Events about the state of the program, not about what was said or done."""


def find(root: Path) -> list[SessionLog]:
    """The conversations below a directory, or the one that an event's file belongs to; sub-agents are below theirs."""
    if root.is_file():
        return [_session(root.parent.parent)] if root.parent.name == "events" and _is_log(root.parent.parent) else []
    places = [place for place in _places(root) if _is_log(place)]
    return [_session(place) for place in places if place.parent.name != "subagents" or place == root]


def _places(root: Path, below: str = "") -> list[Path]:
    """Directories that hold events."""
    return list(dict.fromkeys(path.parent.parent for path in find_files(root, "events/event-*.json", below=below)))


def _is_log(place: Path) -> bool:
    return next(_files(place), None) is not None


def _session(place: Path) -> SessionLog:
    session = SessionLog(NAME, place, read, id=place.name)
    for child in _places(place, "subagents"):
        if child.parent == place / "subagents" and _is_log(child):
            session.children.append(_session(child))
    return session


def _files(place: Path) -> Iterator[Path]:
    """The events' files by their numbers, which outgrow their padding."""
    files = (path for path in find_files(place, "event-*.json", below="events") if path.parent == place / "events")
    found = [path for path in files if path.name.split("-")[1].isdigit()]
    yield from sorted(found, key=lambda path: (int(path.name.split("-")[1]), path.name))


def read(session: SessionLog, assembler: Assembler) -> Iterator[None]:
    usage = _usage(session)
    for path in _files(session.path):
        row = document(path)
        match row.get("kind"):
            case "ActionEvent":
                _action(row, assembler, usage)
            case "ObservationEvent" | "UserRejectObservation" | "AgentErrorEvent":
                _result(row, assembler)
            case "MessageEvent":
                _message(row, assembler, usage)
            case "SystemPromptEvent":
                assembler.say(
                    "system", assembler.content([row.get("system_prompt") or {}], whole=True), row.get("timestamp")
                )
            case "Condensation":
                gone = len(row.get("forgotten_event_ids") or ())
                assembler.compacted(row.get("summary") or "", row.get("timestamp"), forgotten_events=gone)
            case kind if kind and kind not in _BESIDE:
                rest = {name: value for name, value in row.items() if name not in ("id", "timestamp", "kind")}
                assembler.say("system", "", row.get("timestamp"), kind=kind, event=rest)
            case _:
                pass
        yield


def _usage(session: SessionLog) -> dict[str, dict[str, Any]]:
    """The tokens of each model call by its id, and the state's totals of the conversation."""
    state = document(session.path / "base_state.json")
    session.model = ((state.get("agent") or {}).get("llm") or {}).get("model")
    session.extra["exit_status"] = state.get("execution_status")
    known: dict[str, dict[str, Any]] = {}
    cost = 0.0
    for metrics in ((state.get("stats") or {}).get("usage_to_metrics") or {}).values():
        cost += metrics.get("accumulated_cost") or 0.0
        known |= {row["response_id"]: row for row in metrics.get("token_usages") or () if row.get("response_id")}
    session.cost_usd = cost or None
    return known


def _turn(row: dict[str, Any], assembler: Assembler, usage: dict[str, dict[str, Any]]) -> None:
    """Open the step of a model call. One call may be several events: its tool calls come in an event each."""
    id_ = row.get("llm_response_id")
    if id_ is not None and assembler.key == id_:
        return
    assembler.turn(id_, row.get("timestamp"), assembler.session.model)
    if found := usage.get(id_ or ""):
        used = (found.get(name) for name in ("prompt_tokens", "completion_tokens", "cache_read_tokens"))
        assembler.count(*used, reasoning=found.get("reasoning_tokens"))


def _action(row: dict[str, Any], assembler: Assembler, usage: dict[str, dict[str, Any]]) -> None:
    _turn(row, assembler, usage)
    _thoughts(row, assembler)
    assembler.text(str(assembler.content(row.get("thought") or (), whole=True)))
    given = (row.get("tool_call") or {}).get("arguments") or row.get("action")  # what is not kept is as it was run
    assembler.call(str(row.get("tool_call_id")), str(row.get("tool_name")), arguments_in(given))


def _thoughts(row: dict[str, Any], assembler: Assembler) -> None:
    blocks = [str(block.get("thinking") or "") for block in row.get("thinking_blocks") or ()]
    assembler.think(str(row.get("reasoning_content") or "") or "\n\n".join(blocks))


def _message(row: dict[str, Any], assembler: Assembler, usage: dict[str, dict[str, Any]]) -> None:
    message = row.get("llm_message") or {}
    content = [*(message.get("content") or ()), *(row.get("extended_content") or ())]
    if row.get("source") == "agent":
        _turn(row, assembler, usage)
        _thoughts(message, assembler)
        assembler.text(str(assembler.content(content, whole=True)))
    else:
        source = "user" if row.get("source") == "user" else "system"
        assembler.say(source, assembler.content(content, whole=True), row.get("timestamp"))


def _result(row: dict[str, Any], assembler: Assembler) -> None:
    told = row.get("observation") or {}
    content = assembler.content(told.get("content") or (), whole=True)
    failed = True if told.get("is_error") or "observation" not in row else None
    children = {child.id for child in assembler.session.children}
    child = next((str(value) for value in told.values() if isinstance(value, str) and value in children), None)
    said = content or str(row.get("error") or row.get("rejection_reason") or "")
    call, at, code = str(row.get("tool_call_id")), row.get("timestamp"), told.get("exit_code")
    assembler.observe(call, said, at, child=child, exit_code=code, is_error=failed)
