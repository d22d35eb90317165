"""Looks at a relayed answer without touching it: whole events, its usage, its proper end, its failure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from json.decoder import JSONDecoder
from typing import Any

from pier.wire.anthropic import read_usage as read_anthropic
from pier.wire.faults import Failure, classify, error_in
from pier.wire.gemini import read_usage as read_gemini
from pier.wire.openai import read_usage as read_openai
from pier.wire.sse import DONE, Alike, plain
from pier.wire.turn import DialectName, Usage

MAX_EVENT = 64 * 1024 * 1024
_scan = JSONDecoder().scan_once  # pyright: ignore[reportAttributeAccessIssue]
_END_OF_EVENT = re.compile(rb"\r?\n\r?\n|\r\r")
_MANY = 1024
"""From this many characters on, similar events are looked for."""


class MalformedAnswer(Exception):
    """The upstream's stream is not what it should be. `before` is how many bytes of the block that was looked at come
    before the event that is wrong."""

    def __init__(self, message: str, before: int = 0) -> None:
        super().__init__(message)
        self.before = before


class Framer:
    """Cuts a stream behind whole events."""

    def __init__(self) -> None:
        self._rest = bytearray()

    @property
    def torn(self) -> bool:
        """Whether the stream stands in the middle of an event."""
        return bool(self._rest.strip())

    def feed(self, data: bytes) -> bytes:
        """The events that are whole now, as they came."""
        rest = self._rest
        if rest:
            seen = max(len(rest) - 3, 0)
            rest += data
            end = _last_end(rest, seen)
            data = bytes(rest[:end])
            del rest[:end]
        elif (end := _last_end(data, 0)) < len(data):
            rest += data[end:]
            data = data[:end]
        if len(rest) > MAX_EVENT:
            raise MalformedAnswer(f"the provider sent an event of more than {MAX_EVENT} bytes")
        return data


def _last_end(data: bytes | bytearray, start: int) -> int:
    """Where the last whole event ends; 0 if there is none."""
    if data.find(b"\r", start) < 0:
        return data.rfind(b"\n\n", start) + 2 if data.find(b"\n\n", start) >= 0 else 0
    return max((found.end() for found in _END_OF_EVENT.finditer(data, start)), default=0)


def events_of(block: bytes) -> list[bytes]:
    """Whole events, one by one."""
    ends = [*(found.end() for found in _END_OF_EVENT.finditer(block)), len(block)]
    ends = ends[:-2] + ends[-1:]
    return [block[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def data_of(event: bytes) -> bytes | None:
    """The data of an event; None for a comment."""
    if event.startswith(b"data:") and event.count(b"\n") <= 2 and b"\r" not in event:
        return event[5:].strip()
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


class AnswerWatch:
    """What is known of an answer so far."""

    def __init__(self, dialect: DialectName) -> None:
        self._dialect: DialectName = dialect
        self._look = getattr(AnswerWatch, f"_see_{dialect}")
        self.done = False
        """The dialect's proper last event was seen."""
        self.finished = False
        """The model's turn is over, whether or not the stream says so properly."""
        self.failed: str | None = None
        self.failure: Failure | None = None
        """What the error means that `failed` is the message of."""
        self.empty = dialect == "chat"
        """Whether nothing of an answer was seen before OpenAI's word for the end, which any server may send."""
        self._alike: Alike | None = None
        self.usage: Usage | None = None

    def see(self, block: bytes, *, each: bool = True) -> list[Any]:
        """Whole events; the decoded data of each, None where that is not JSON on purpose. `Broken` if it should be.
        Without `each` those that only go on with a text may be left out."""
        values = self._read(block, each)
        if values is None:
            values, before = [], 0
            for event in events_of(block):
                try:
                    values.append(_decoded(data_of(event)))
                except MalformedAnswer as broken:
                    broken.before = before
                    self._take(values)
                    raise
                before += len(event)
        return self._take(values)

    def _read(self, block: bytes, each: bool) -> list[Any] | None:
        try:
            text = block.decode()
        except ValueError:
            return None
        if not each and len(text) > _MANY:
            self._alike = self._alike or self._middle(text)
            if self._alike and (rest := self._alike.without(text)) is not None:
                text = rest
                self.empty = False
            else:
                self._alike = None
        return plain(text)

    def _middle(self, text: str) -> Alike | None:
        """How the event in the middle is written, if it says nothing that is watched for."""
        start = text.find("\n\n", len(text) // 2) + 2
        found = Alike.of(text[start : text.find("\n\n", start)])
        if found is None:
            return None
        probe = AnswerWatch(self._dialect)
        probe._take(plain(found.head + found.tail) or [])
        return None if probe.finished or probe.done or probe.usage else found

    def _take(self, values: list[Any]) -> list[Any]:
        look = self._look
        for index, value in enumerate(values):
            if isinstance(value, dict):
                look(self, value)
            elif value is DONE:
                self.empty |= not self.finished and self._dialect != "chat"
                self.done = self.finished = True
                values[index] = None
        return values

    def see_whole(self, value: Mapping[str, Any]) -> None:
        """A whole answer that was not streamed."""
        raw = value.get("usageMetadata" if self._dialect == "gemini" else "usage")
        self._count(raw)
        self.done = self.finished = True

    def _count(self, raw: Any) -> None:
        if not isinstance(raw, dict):
            return
        read = {"anthropic": read_anthropic, "gemini": read_gemini}.get(self._dialect, read_openai)
        new = read(raw)
        old = self.usage
        if old is None:
            self.usage = new
            return
        known = {name: value for name in Usage.__dataclass_fields__ if (value := getattr(new, name)) is not None}
        self.usage = Usage(**{**{name: getattr(old, name) for name in Usage.__dataclass_fields__}, **known})

    def _see_anthropic(self, value: dict[str, Any]) -> None:
        kind = value.get("type")
        if kind == "message_start":
            self._started = (value.get("message") or {}).get("usage") or {}
            self._count(self._started)
        elif kind == "message_delta":
            self._count({**getattr(self, "_started", {}), **_known(value.get("usage"))})
            self.finished = True
        elif kind == "message_stop":
            self.done = self.finished = True
        elif kind == "error":
            self._fail(value)

    def _see_chat(self, value: dict[str, Any]) -> None:
        if "error" in value and "choices" not in value:
            self._fail(value)
        if usage := value.get("usage"):
            self._count(usage)
        for choice in value.get("choices") or ():
            self.empty = False
            if isinstance(choice, dict) and choice.get("finish_reason"):
                self.finished = True

    def _see_responses(self, value: dict[str, Any]) -> None:
        kind = value.get("type")
        if kind in ("response.completed", "response.incomplete", "response.failed"):
            response = value.get("response") or {}
            self._count(response.get("usage"))
            self.done = self.finished = True
            if kind == "response.failed":
                self._fail(response)
        elif kind == "error":
            self._fail(value)

    def _see_gemini(self, value: dict[str, Any]) -> None:
        if "error" in value:
            self._fail(value)
        self._count(value.get("usageMetadata"))
        candidates = value.get("candidates") or ()
        blocked = (value.get("promptFeedback") or {}).get("blockReason")
        if blocked or any(isinstance(each, dict) and each.get("finishReason") for each in candidates):
            self.finished = True

    def _fail(self, value: Mapping[str, Any]) -> None:
        error = value.get("error")
        message = error.get("message") if isinstance(error, dict) else value.get("message")
        self.failed = str(message or "the provider reported an error")
        self.failure = classify(200, {"error": error_in(value) or value})
        self.done = True


def _known(raw: Any) -> dict[str, Any]:
    return {name: value for name, value in raw.items() if value is not None} if isinstance(raw, dict) else {}


def _decoded(data: bytes | None) -> Any:
    if data is None:
        return None
    if data == b"[DONE]":
        return DONE
    try:
        text = data.decode().strip()
        value, end = _scan(text, 0)
    except (ValueError, StopIteration, RecursionError):
        end, text, value = 0, "?", None
    if end != len(text):
        raise MalformedAnswer("the provider sent an event that is not JSON")
    return value
