"""Looks at a relayed answer without touching it: its usage, its proper end, its failure, and an error in its place."""

from __future__ import annotations

from collections.abc import Mapping
from json.decoder import JSONDecoder
from typing import Any, Literal

from pier.wire.contract import Progress, compact
from pier.wire.dialects import DIALECTS
from pier.wire.faults import Failure, classify, error_in
from pier.wire.sse import MalformedAnswer, data_of, events_of
from pier.wire.turn import DialectName, Usage

_scan = JSONDecoder().scan_once  # pyright: ignore[reportAttributeAccessIssue]


class AnswerWatch:
    """What is known of an answer so far."""

    def __init__(self, dialect: DialectName) -> None:
        self._dialect = DIALECTS[dialect]
        self._counts: dict[str, Any] = {}
        self._content = False
        self.done = False
        """The dialect's proper last event was seen."""
        self.finished = False
        """The model's turn is over, whether or not the stream says so properly."""
        self.failed: str | None = None
        self.failure: Failure | None = None
        """What the error means that `failed` is the message of."""
        self.empty = False
        """Whether OpenAI's `[DONE]`, which any server may send, came without an answer before it."""
        self.usage: Usage | None = None

    def see(self, block: bytes) -> list[Any]:
        """Whole events; the decoded data of each, None where there is none. `MalformedAnswer` if it is not JSON."""
        values: list[Any] = []
        before = 0
        for event in events_of(block) if block else ():
            data, value = data_of(event), None
            if data is not None and data.strip() == b"[DONE]":
                self.empty = not (self.finished or self._content)
                self.done = self.finished = True
            elif data is not None:
                value = _decoded(data, before)
                if isinstance(value, dict) and (progress := self._dialect.look(value)):
                    self._take(progress)
            values.append(value)
            before += len(event)
        return values

    def see_whole(self, value: Mapping[str, Any]) -> None:
        """A whole answer that was not streamed."""
        self._count(value.get(self._dialect.usage_field))
        self.done = self.finished = True

    def _take(self, progress: Progress) -> None:
        self._content |= progress.content
        self.finished |= progress.finished
        self.done |= progress.done
        if progress.usage:
            self._count(progress.usage)
        if progress.error is not None:
            self._fail(progress.error)

    def _count(self, raw: Any) -> None:
        if not isinstance(raw, dict):
            return
        self._counts.update(compact(raw))
        new = self._dialect.read_usage(self._counts)
        old = self.usage or new
        self.usage = Usage(
            *(getattr(old if getattr(new, name) is None else new, name) for name in Usage.__dataclass_fields__)
        )

    def _fail(self, value: Mapping[str, Any]) -> None:
        error = value.get("error")
        message = error.get("message") if isinstance(error, dict) else value.get("message")
        self.failed = str(message or "the provider reported an error")
        self.failure = classify(200, {"error": error_in(value) or value})
        self.done = True


def _decoded(data: bytes, before: int) -> Any:
    try:
        text = data.decode().strip()
        value, end = _scan(text, 0)
    except (ValueError, StopIteration, RecursionError):
        end, text, value = 0, "?", None
    if end != len(text):
        raise MalformedAnswer("the provider sent an event that is not JSON", before)
    return value


def progress_of(dialect: DialectName, value: object) -> Literal["error", "prelude", "content"]:
    """What an event at the beginning of a stream is."""
    return DIALECTS[dialect].first_event(value) if isinstance(value, Mapping) else "content"


def nothing_in(dialect: DialectName, value: Mapping[str, Any]) -> str | None:
    """What a whole answer lacks that every answer of its dialect has; None if it lacks nothing."""
    return DIALECTS[dialect].missing_in(value)


def error_instead(dialect: DialectName, value: object) -> Mapping[str, Any] | None:
    """The error that a whole answer of status 200 holds instead of a turn; None if it holds none."""
    if isinstance(value, Mapping) and value.get("status") != "failed" and nothing_in(dialect, value) is None:
        return None
    return error_in(value)
