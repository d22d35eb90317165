"""The model calls of a trial as plain data: a row for each, and all of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pier.record.reader import Call, read


def read_calls(recording: Path, wanted: int, most: int | None) -> dict[str, Any]:
    """The calls of a recording, and the one with the number `wanted` whole."""
    found = read(recording, most)
    call = next((each for each in found.calls if each.number == wanted), None)
    return {
        "closed": found.closed,
        "calls": [_call_row(each) for each in found.calls],
        "call": _call_data(found.calls, call) if call else None,
    }


def _call_row(call: Call) -> dict[str, Any]:
    usage = call.usage
    keys = ("number", "at", "kind", "dialect", "model", "outcome", "status", "error", "fault")
    return {
        **{key: getattr(call, key) for key in keys},
        "seconds": call.ended - call.at if call.ended else None,
        "first_byte": call.answer.at - call.at if call.answer else None,
        "tokens": [usage.input_tokens, usage.cached_tokens, usage.output_tokens] if usage else [None, None, None],
        "attempts": len(call.attempts),
    }


def _call_data(calls: list[Call], call: Call) -> dict[str, Any]:
    answer = call.answer
    neighbours = [each.number for each in calls]
    place = neighbours.index(call.number)
    return {
        **_call_row(call),
        "path": call.path,
        "stream": call.stream,
        "headers": dict(call.headers),
        "request": call.body.decode(errors="replace"),
        "answer": answer.body.decode(errors="replace") if answer else "",
        "edits": [dict(edit) for edit in call.edits],
        "notes": [dict(note) for note in call.notes],
        "upstreams": [
            {key: getattr(each, key) for key in ("provider", "url", "model", "error", "wait")}
            | {"status": each.answer.status if each.answer else None}
            for each in call.attempts
        ],
        "previous": neighbours[place - 1] if place else None,
        "next": neighbours[place + 1] if place + 1 < len(neighbours) else None,
    }
