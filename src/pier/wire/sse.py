"""Server-sent events: the one reader and writer for all dialects.

`Framer` cuts a stream into whole events, however reads and line endings divide it, and leaves their bytes unchanged;
`events_of` and `data_of` take events apart. `EventParser` and `EventRenderer` are the common parts of all dialects'
streams. A parser never raises: a broken event becomes a `StreamError`, after which the parser returns nothing more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pier.wire.contract import Dialect
from pier.wire.turn import (
    Delta,
    ErrorKind,
    Part,
    PartDelta,
    PartEnd,
    PartStart,
    Ping,
    Reasoning,
    Refusal,
    Request,
    StreamError,
    Text,
    ToolCall,
    TurnEnd,
    TurnStart,
    Usage,
)
from pier.wire.values import PARSE_ERRORS, BadRequest, BadResponse, dump, type_error_in

MAX_EVENT = 64 * 1024 * 1024
SSE = "text/event-stream"
_END_OF_EVENT = re.compile(rb"\r?\n\r?\n|\r\r")


class MalformedAnswer(Exception):
    """The upstream's answer is malformed. `before` is the number of bytes before the malformed event in the block that
    was examined."""

    def __init__(self, message: str, before: int = 0) -> None:
        super().__init__(message)
        self.before = before


class Framer:
    """Cuts a stream into whole events."""

    def __init__(self) -> None:
        self._rest = bytearray()

    @property
    def rest(self) -> bytes:
        """The beginning of an incomplete event."""
        return bytes(self._rest.strip())

    def feed(self, data: bytes) -> bytes:
        """Return the events that this piece completes, as they arrived."""
        seen = max(len(self._rest) - 3, 0)
        self._rest += data
        end = _last_end(self._rest, seen)
        whole = bytes(self._rest[:end])
        del self._rest[:end]
        if len(self._rest) > MAX_EVENT:
            raise MalformedAnswer(f"the provider sent an event of more than {MAX_EVENT} bytes")
        return whole


def _last_end(data: bytearray, start: int) -> int:
    """The end of the last whole event; 0 if there is none. Searching by the pattern doubles the time of a stream."""
    if data.find(b"\r", start) < 0:
        found = data.rfind(b"\n\n", start)
        return found + 2 if found >= 0 else 0
    return max((found.end() for found in _END_OF_EVENT.finditer(data, start)), default=0)


def events_of(block: bytes) -> list[bytes]:
    """Split a block of whole events."""
    if b"\r" not in block and b"\n\n\n" not in block and block.endswith(b"\n\n"):
        return [event + b"\n\n" for event in block[:-2].split(b"\n\n")]
    ends = [found.end() for found in _END_OF_EVENT.finditer(block)][:-1]
    return [block[start:end] for start, end in zip([0, *ends], [*ends, len(block)], strict=True)] if block else []


def data_of(event: bytes) -> bytes | None:
    """The data of an event; None for a comment."""
    return _field(event, b"data:")


def name_of(event: bytes) -> str | None:
    """The name of an event; None if it has none."""
    name = _field(event, b"event:")
    return None if name is None else name.decode(errors="replace")


def _field(event: bytes, field: bytes) -> bytes | None:
    lines = [line[len(field) :].removeprefix(b" ") for line in event.splitlines() if line.startswith(field)]
    return b"\n".join(lines) if lines else None


def sse(data: Any, event: str | None = None) -> bytes:
    """One event. JSON escapes newlines, so the data is always one line."""
    name = b"event: %b\n" % event.encode() if event else b""
    return b"%bdata: %b\n\n" % (name, dump(data))


class EventParser:
    """Reads a dialect's stream: events in, deltas out, parts numbered and closed, exactly one end.

    A dialect implements `on_event`, which turns one decoded event into deltas and sets `done` at the proper end.
    """

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect
        self._framer = Framer()
        self._failed = False
        self._started = False
        self._has_calls = False
        self._count = 0
        self._open: tuple[int, Part] | None = None
        self.done = False

    def on_event(self, event: str | None, data: Mapping[str, Any]) -> Iterable[Delta]:
        raise NotImplementedError

    def on_close(self) -> Iterable[Delta]:
        """The remaining deltas at `[DONE]` or at the close, whichever comes first; none when called again."""
        return ()

    def feed(self, data: bytes) -> list[Delta]:
        """The deltas of a piece of a stream, which may end anywhere."""
        if self._failed:
            return []
        try:
            block = self._framer.feed(data)
        except MalformedAnswer as error:
            return [self._fail(str(error))]
        deltas: list[Delta] = []
        for event in events_of(block):
            raw = data_of(event)
            if raw is not None:
                deltas += self._decode(name_of(event), raw.decode(errors="replace"))
            elif event.lstrip().startswith(b":"):
                deltas.append(Ping())
            if self._failed:
                break
        return deltas

    def close(self) -> list[Delta]:
        """The remaining deltas once the upstream has ended; a `StreamError` if the stream had no proper end."""
        if self._failed:
            return []
        deltas = self._checked(self.on_close(), "")
        if not self.done and not self._failed:
            rest = self._framer.rest.decode(errors="replace")
            tail = f"; the last bytes were {rest[-120:]!r}" if rest else ""
            deltas.append(self._fail(f"the provider's stream ended before the answer did{tail}"))
        return deltas

    def _decode(self, event: str | None, text: str) -> list[Delta]:
        if text.strip() == "[DONE]":
            return self._checked(self.on_close(), text)
        try:
            data = json.loads(text)
            if not isinstance(data, dict):
                raise ValueError("not an object")
        except (ValueError, RecursionError) as error:
            return [self._fail(f"the provider sent a broken event ({error}): {text[:120]!r}")]
        return self._checked(self.on_event(event, data), text)

    def _checked(self, deltas: Iterable[Delta], text: str) -> list[Delta]:
        """The deltas up to the first invalid one, which becomes a `StreamError`."""
        sound: list[Delta] = []
        try:
            for delta in deltas:
                if problem := type_error_in(delta):
                    message = f"the provider sent an event that is not of the {self.dialect.name} dialect: {problem}"
                    return [*sound, self._fail(message)]
                sound.append(delta)
                self._failed |= isinstance(delta, StreamError)
        except (BadRequest, BadResponse, *PARSE_ERRORS) as error:
            return [*sound, self._fail(f"the provider sent a broken event ({error}): {text[:120]!r}")]
        return sound

    def _fail(self, message: str) -> StreamError:
        self._failed = True
        return StreamError(message)

    def _begin(self, id_: Any, model: Any, usage: Usage | None = None) -> Iterator[Delta]:
        """Begin the answer unless it has begun."""
        if not self._started:
            self._started = True
            yield TurnStart(id_, model, usage)

    def _start(self, part: Part) -> Iterator[Delta]:
        """Begin a part, which ends the open one."""
        yield from self._end_part()
        self._has_calls |= isinstance(part, ToolCall)
        self._open = (self._count, part)
        self._count += 1
        yield PartStart(self._open[0], part)

    def _is_open(self, part: Part) -> bool:
        """Whether the open part has the type of this one."""
        return self._open is not None and type(self._open[1]) is type(part)

    def _grow(self, text: str, signature: str | None = None) -> Iterator[Delta]:
        if self._open is None:
            raise ValueError("a delta outside of any part")
        if text or signature:
            yield PartDelta(self._open[0], text, signature)

    def _add(self, part: Part, text: str, signature: str | None = None) -> Iterator[Delta]:
        """Append to the open part if it has the type of `part`; otherwise begin `part`."""
        if not self._is_open(part):
            yield from self._start(part)
        yield from self._grow(text, signature)

    def _end_part(self) -> Iterator[Delta]:
        if self._open is not None:
            index, self._open = self._open[0], None
            yield PartEnd(index)

    def _whole(self, part: Part) -> Iterator[Delta]:
        """Begin and end a part that arrives in one piece."""
        yield from self._start(part)
        yield from self._end_part()


class EventRenderer:
    """Writes a stream for the client. Each `render` returns whole events, or nothing."""

    content_type = SSE

    def __init__(self, dialect: Dialect, request: Request) -> None:
        self.dialect = dialect
        self._request = request
        self._part: Part | None = None
        self._text: list[str] = []
        """The text of the open part so far."""
        self._signature: str | None = None

    def render(self, delta: Delta) -> bytes:
        match delta:
            case PartDelta(text=text, signature=signature):
                self._signature = signature or self._signature
                return self._more(text)
            case PartStart(part=part):
                self._part, self._text, self._signature = part, [], getattr(part, "signature", None)
                return self._start(part)
            case PartEnd():
                data = self._end_part() if self._part is not None else b""
                self._part = None
                return data
            case TurnStart():
                return self._begin(delta)
            case TurnEnd():
                return self._end(delta)
            case StreamError(message=message, kind=kind, status=status):
                return self.error(status, message, kind)
            case Ping():
                return self.keep_alive()
            case _:
                return b""

    def keep_alive(self) -> bytes:
        """Bytes that show the dialect's clients that the stream is alive; never an empty event."""
        raise NotImplementedError

    def error(self, status: int, message: str, kind: ErrorKind) -> bytes:
        return sse(self.dialect.error_body(status, message, kind))

    def _more(self, text: str) -> bytes:
        if not text or not isinstance(self._part, Text | Refusal | Reasoning | ToolCall):
            return b""
        self._text.append(text)
        return self._grow(text)

    def _begin(self, start: TurnStart) -> bytes:
        return b""

    def _start(self, part: Part) -> bytes:
        """Begin the open part; pass the text that it has already to `_more`."""
        raise NotImplementedError

    def _grow(self, text: str) -> bytes:
        """Append text to the open part, which is a text, a refusal, reasoning or a call."""
        raise NotImplementedError

    def _end_part(self) -> bytes:
        return b""

    def _end(self, end: TurnEnd) -> bytes:
        raise NotImplementedError
