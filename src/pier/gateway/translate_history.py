"""Histories that another dialect accepts: every call answered right after it, no stranger's parts, plain ids."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from hashlib import blake2b

from pier.gateway.canonical import Edit, Media, Message, Opaque, Part, Reasoning, Text, ToolCall, ToolResult

_GOOD_ID = re.compile(r"[A-Za-z0-9_-]{1,40}")


def drop_foreign(messages: Iterable[Message], target: str, edits: list[Edit]) -> tuple[Message, ...]:
    """Without reasoning, files and special parts that only another provider could read."""
    kept: list[Message] = []
    dropped: set[str] = set()
    for message in messages:
        parts: list[Part] = []
        for part in message.parts:
            reason = _foreign(part, target)
            if reason:
                dropped.add(reason)
            elif isinstance(part, ToolResult):
                inner = tuple(piece for piece in part.parts if not _foreign(piece, target))
                parts.append(replace(part, parts=inner))
            else:
                parts.append(part)
        if parts or not message.parts:
            kept.append(Message(message.role, tuple(parts)))
    edits.extend(Edit("removed", what, f"{target} cannot read it") for what in sorted(dropped))
    return tuple(kept)


def _foreign(part: Part, target: str) -> str | None:
    match part:
        case Reasoning(origin=origin) if origin != target:
            return f"reasoning of {origin or 'unknown origin'}"
        case Opaque(dialect=dialect, value=value) if dialect != target:
            return f"{dialect} part {value.get('type', '')}".rstrip()
        case Media(file_id=str()):
            return "file kept at another provider"
        case _:
            return None


def mend(messages: Iterable[Message], edits: list[Edit]) -> tuple[Message, ...]:
    """Each message with calls is followed at once by one with their results, in the order of the calls.

    Results that came later move up, missing ones are filled in empty, and results of calls that are no longer in the
    history become text.
    """
    listed = list(messages)
    results = {part.call_id: part for message in listed for part in message.parts if isinstance(part, ToolResult)}
    asked = {part.id for message in listed for part in message.parts if isinstance(part, ToolCall)}
    mended: list[Message] = []
    for position, message in enumerate(listed):
        others = tuple(_orphan(part, asked, edits) for part in message.parts if not _answered(part, asked))
        if others or not message.parts:
            mended.append(Message(message.role, others))
        calls = [part for part in message.parts if isinstance(part, ToolCall)]
        if not calls or (position == len(listed) - 1 and message.role == "assistant"):
            continue
        found = tuple(results.get(call.id) or _unanswered(call, edits) for call in calls)
        mended.append(Message("user", found))
    return tuple(mended)


def _answered(part: Part, asked: set[str]) -> bool:
    return isinstance(part, ToolResult) and part.call_id in asked


def _orphan(part: Part, asked: set[str], edits: list[Edit]) -> Part:
    if not isinstance(part, ToolResult):
        return part
    edits.append(Edit("changed", f"result of {part.call_id}", "its call is not in the history; given as text"))
    return Text("".join(piece.text for piece in part.parts if isinstance(piece, Text)))


def _unanswered(call: ToolCall, edits: list[Edit]) -> ToolResult:
    edits.append(Edit("changed", f"call {call.id}", "it has no result in the history; given an empty one"))
    return ToolResult(call.id, (), name=call.name)


def safe_ids(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Ids that every provider takes; the same id always becomes the same one."""
    safe: list[Message] = []
    for message in messages:
        parts: list[Part] = []
        for part in message.parts:
            match part:
                case ToolCall(id=id_) if not _GOOD_ID.fullmatch(id_):
                    parts.append(replace(part, id=_short(id_)))
                case ToolResult(call_id=id_) if not _GOOD_ID.fullmatch(id_):
                    parts.append(replace(part, call_id=_short(id_)))
                case _:
                    parts.append(part)
        safe.append(Message(message.role, tuple(parts)))
    return tuple(safe)


def _short(id_: str) -> str:
    return "call_" + blake2b(id_.encode(errors="surrogatepass"), digest_size=12).hexdigest()


def move_system(messages: Iterable[Message]) -> tuple[Message, ...]:
    """System messages in mid-history in the user's name, for dialects that have them at the start only."""
    return tuple(replace(message, role="user") if message.role == "system" else message for message in messages)
