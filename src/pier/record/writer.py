"""Writes what passes through a session, as it passes: the write side of `pier.record.reader`.

A request is in the file while its upstream works on it, and all of the call before the agent gets the last of its
answer: killing the gateway at any instant loses no turn that the agent has. What is streamed meanwhile is written
before it is passed on, but for bursts, whose lines wait for each other for `HOLD` seconds at most, so that a quick call
is one write. All of it is on disk within `SYNC` seconds, and no call waits for that; with `durable="power"` the end of
a call is on disk before its last event is delivered. What comes again in the next request (messages, tools, a long
system prompt) is stored once and referred to.

Secrets are removed from every line, also where they are split over the events of a stream: an event in which one may
begin waits for the next. A call in which one was found keeps no token ids, which would spell it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from json.encoder import c_make_encoder, encode_basestring  # pyright: ignore[reportAttributeAccessIssue]
from pathlib import Path
from typing import Any, Literal, Protocol
from weakref import ref

from pier.files import Journal
from pier.record.redact import redacted
from pier.redact import Redactor, StreamRedactor
from pier.wire.body import Array, Body
from pier.wire.faults import Fault
from pier.wire.turn import Usage

HOLD = 0.05
SYNC = 0.5

log = logging.getLogger(__name__)


class HeldRecording(Protocol):
    """What holds lines back."""

    def flush(self) -> None: ...

    def sync(self) -> None:
        """Wait for the disk; called in a thread."""
        ...

    def rest(self) -> None:
        """Hold nothing open that is not in use."""
        ...


class Flusher:
    """One for all recorders of a gateway."""

    def __init__(self) -> None:
        self._held: set[HeldRecording] = set()
        self._written: set[HeldRecording] = set()
        self._flushing: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._syncing: asyncio.Task[None] | None = None

    def flush_soon(self, held: HeldRecording) -> None:
        self._held.add(held)
        if self._flushing is None:
            self._flushing = asyncio.get_running_loop().call_later(HOLD, self._flush)

    def sync_soon(self, held: HeldRecording) -> None:
        self._written.add(held)
        if self._timer is None and self._syncing is None:
            self._timer = asyncio.get_running_loop().call_later(SYNC, self._start)

    async def close(self) -> None:
        """All is written and on disk."""
        if self._flushing:
            self._flush()
        while self._written or self._syncing:
            if self._timer:
                self._start()
            if self._syncing:
                await asyncio.wait({self._syncing})

    def _flush(self) -> None:
        if self._flushing:
            self._flushing.cancel()
            self._flushing = None
        held, self._held = self._held, set()
        for each in held:
            each.flush()
            self.sync_soon(each)

    def _start(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if self._syncing is None:
            self._syncing = asyncio.get_running_loop().create_task(self._sync())

    async def _sync(self) -> None:
        written, self._written = self._written, set()
        try:
            await asyncio.to_thread(_sync_all, written)
        finally:
            self._syncing = None
            for each in written:
                if each not in self._written:
                    each.rest()
            if self._written and self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(SYNC, self._start)


def _sync_all(written: set[HeldRecording]) -> None:
    for each in written:
        try:
            each.sync()
        except OSError as error:
            log.warning("a recording may not survive a loss of power: %s", error)


FORMAT = 1
Durable = Literal["kill", "power"]
Side = Literal["upstream", "delivered", "added"]
"""From the model's side; to the agent, where that differs; to the agent, after what the model's side gave."""
Outcome = Literal["ok", "error", "cancelled", "refused"]

_encoder = c_make_encoder(None, None, encode_basestring, None, ":", ",", False, False, True)
"""What `json.dumps` makes anew for each value, which takes longer than to encode a line."""
_COUNTS = tuple(Usage.__dataclass_fields__)
_REMEMBERED = 16
"""How many arrays are known to be in the file without comparing each element."""
_STORE_APART = 256
"""A top-level field of at least this many characters is stored once and referred to."""


class Recorder:
    """The recording of one session. Without a path it keeps nothing; without a flusher it holds nothing back."""

    def __init__(
        self,
        path: Path | None,
        info: Mapping[str, Any],
        *,
        durable: Durable = "kill",
        flusher: Flusher | None = None,
        redactor: Redactor | None = None,
    ) -> None:
        self._journal = Journal(path, mode=0o600) if path else None
        self.redactor = redactor or Redactor()
        self._info = info
        self._durable = durable
        self._flusher = flusher
        self._failure: OSError | None = None
        self.lost: OSError | None = None
        """Why the first lines were lost that could not be written, if any were."""
        self._passed = 0.0
        self._calls = 0
        self._open = 0
        self._start_over()
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._write_waiting()
            self.rest()

    def _start_over(self) -> None:
        """Refer to nothing that was written so far: at first, and when a write has failed."""
        self._blobs: dict[bytes, int] = {}
        self._secret: set[int] = set()
        """The blobs that a secret was removed from."""
        self._found = False
        self._steps: dict[tuple[int, int], int] = {}
        self._places: list[tuple[int, int]] = [(0, 0)]
        self._lists = 0
        self._last: dict[tuple[str, str], _Written] = {}
        self._waiting = [self.redactor.data(_line({"t": "session", "format": FORMAT, "at": _now(), **self._info}))]

    @property
    def on(self) -> bool:
        return self._journal is not None

    @property
    def holds(self) -> bool:
        """Whether lines of a running call may wait."""
        return self._flusher is not None

    def call(self, facts: Mapping[str, Any], body: Body | bytes) -> CallRecord:
        """A call begins. `facts` are its dialect, operation, method, path, headers, model and so on.

        It is written with the first thing that happens to it, so that a request is on its way upstream meanwhile.
        """
        self._calls += 1
        self._open += 1
        at = time.time()
        return CallRecord(self, self._calls, at, (facts, body) if self.on else None)

    def write(self, value: Mapping[str, Any]) -> None:
        if self._journal:
            self.write_lines([_line(value)])

    def write_lines(self, lines: list[bytes], *, later: bool = False) -> None:
        """Add lines; `later` lets them wait for the next ones, so that they go in one write."""
        if self._journal is None:
            return
        self._raise_failure()
        self._waiting += [self.redactor.data(line) for line in lines] if self.redactor else lines
        if not later:
            self._write_waiting()
        elif self._flusher:
            self._flusher.flush_soon(self)

    def _raise_failure(self) -> None:
        if self._failure:
            failure, self._failure = self._failure, None
            self._start_over()  # lines are lost, and with them what they define
            raise failure

    def _write_waiting(self) -> None:
        lines, self._waiting = self._waiting, []
        if self._journal and lines:
            try:
                self._journal.append_lines(b"".join(lines))
            except OSError as error:
                self.lost = self.lost or error
                self._start_over()
                raise

    def pass_on(self, now: float) -> None:
        """To be called before more of a stream is handed to the agent: what waits is written, but in a burst. Fails if
        what waited before could not be written."""
        self._raise_failure()
        if self._waiting and now - self._passed >= HOLD:
            self._passed = now
            self._write_waiting()

    def flush(self) -> None:
        """Write what waits. If that fails, so does the call that adds the next line or passes something on."""
        try:
            self._write_waiting()
        except OSError as error:
            self._failure = error

    def sync(self) -> None:
        if self._journal:
            self._journal.sync()

    async def commit(self) -> None:
        """Wait until what was written survives what it should survive. To be called at the end of each call."""
        self._open -= 1
        if self._journal is None:
            return
        if self._durable == "power":
            await asyncio.to_thread(self._journal.sync)
            self.rest()
        elif self._flusher:
            self._flusher.sync_soon(self)
        else:
            self.rest()

    def rest(self) -> None:
        """Hold no file open while no call runs, so that thousands of sessions may wait."""
        if self._journal and self._open <= 0:
            self._journal.close()

    def close(self, reason: str) -> None:
        self.write({"t": "close", "at": _now(), "reason": reason})
        self._open = 0
        if self._flusher and self._journal:
            self._flusher.sync_soon(self)
        else:
            self.rest()

    def pieces(self, body: Body | bytes) -> tuple[list[bytes], list[Any], bool]:
        """The lines that define what is new in a body, the body in terms of what is defined, and whether a secret is
        removed from it."""
        if isinstance(body, bytes):
            text = body.decode(errors="surrogateescape")
            return [], [text] if body else [], self.redactor.data(body) != body
        self._found = False
        lines: list[bytes] = []
        pieces: list[Any] = []
        at = 0
        for name, (start, end) in sorted(body.fields.items(), key=lambda item: item[1]):
            array, first = body.arrays.get(name, (None, 0))
            if array and array.spans and array.separator is not None:
                pieces.append(body.text[at:first])
                pieces.append({"list": self._array(name, body, array, lines), "sep": array.separator})
                at = first + len(array.text)
            elif end - start >= _STORE_APART:
                pieces.append(body.text[at:start])
                pieces.append({"blob": self._blob(body.text[start:end], lines)})
                at = end
        pieces.append(body.text[at:])
        if self.redactor and not self._found:
            self._found = any(self.redactor.text(piece) != piece for piece in pieces if isinstance(piece, str))
        return lines, pieces, self._found

    def _array(self, name: str, body: Body, array: Array, lines: list[bytes]) -> tuple[int, int]:
        """Where these elements are. Those that an earlier body had already are known."""
        begun, count = body.grown.get(name, (array, len(array.spans)))
        last = self._last.get((name, begun.text[:64]))
        if last is None or last.array() not in (begun, array):
            last, count = _Written(ref(array)), 0
        elif last.array() is array:
            count = len(array.spans)
        blobs, steps = last.blobs[:count], last.steps[: count + 1]
        blobs += [self._blob(array.text[a:b], lines) for a, b in array.spans[count:]]
        self._found = self._found or not self._secret.isdisjoint(blobs)
        self._list(blobs, steps, lines)
        self._last[name, array.text[:64]] = _Written(ref(array), blobs, steps)
        if len(self._last) > _REMEMBERED:
            del self._last[next(iter(self._last))]
        return self._places[steps[-1]]

    def _blob(self, text: str, lines: list[bytes]) -> int:
        data = text.encode()
        digest = sha256(data).digest()
        number = self._blobs.get(digest)
        if number is None:
            number = self._blobs[digest] = len(self._blobs) + 1
            if self.redactor and self.redactor.data(data) != data:
                self._secret.add(number)
            if b"\n" in data:
                lines.append(_line({"t": "blob", "n": number, "text": text}))
            else:
                lines.append(b'{"t":"blob","n":%d,"json":%b}\n' % (number, data))
        self._found = self._found or number in self._secret
        return number

    def _list(self, blobs: list[int], steps: list[int], lines: list[bytes]) -> None:
        """Find or define these blobs in this order; `steps` are the places after each of them, the first ones given."""
        place, known = steps[-1], len(steps) - 1
        while known < len(blobs) and (found := self._steps.get((place, blobs[known]))) is not None:
            place, known = found, known + 1
            steps.append(place)
        if known == len(blobs):
            return
        self._lists += 1
        added = blobs[known:]
        lines.append(_line({"t": "list", "n": self._lists, "from": self._places[place], "add": added}))
        for length, blob in enumerate(added, known + 1):
            self._steps[place, blob] = len(self._places)
            place = len(self._places)
            steps.append(place)
            self._places.append((self._lists, length))


@dataclass(slots=True)
class _Written:
    """An array that is in the file: its elements as blobs, and the places after each of them."""

    array: ref[Array]
    blobs: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=lambda: [0])


@dataclass(slots=True)
class CallRecord:
    """One call of a recording, while it runs. Each method is one line in the file."""

    recorder: Recorder
    number: int
    at: float
    _unwritten: tuple[Mapping[str, Any], Body | bytes] | None = None
    _given: bytes = field(default=b"", init=False)
    """What the upstream sent last."""
    fault: Fault | None = field(default=None, init=False)
    """What holds the call up: the fault of the last attempt, until a later one is answered."""
    _secret: bool = field(default=False, init=False)
    """Whether a secret was found in the request."""
    _streams: dict[str, StreamRedactor] = field(default_factory=dict, init=False)
    """What removes secrets from each side's bytes."""
    _found: bool = field(default=False, init=False)
    """Whether a secret was found in an answer that is over."""
    _tokens: list[dict[str, Any]] = field(default_factory=list, init=False)
    """Notes of tokens, which wait until it is known whether they spell a secret."""

    @property
    def is_redacted(self) -> bool:
        """Whether a secret was removed from what is recorded of this call."""
        return self._secret or self._found

    def edited(self, edits: list[Mapping[str, Any]]) -> None:
        """The gateway changed the request, for the reasons given."""
        if edits:
            self._write("edits", {"edits": edits}, later=True)

    def attempt(self, facts: Mapping[str, Any], body: Body | bytes | None) -> None:
        """The request goes to an upstream, with this body (None: as the agent sent it). Written while that works."""
        if self.recorder.on:
            lines = self._first_lines()
            more, pieces, found = self.recorder.pieces(body) if body is not None else ([], None, False)
            self._secret = self._secret or found
            line = _line_of("attempt", self.number, time.time(), {**facts, "body": pieces})
            self.recorder.write_lines([*lines, *more, line])

    def failed(self, error: str, wait: float | None, fault: Fault | None = None) -> None:
        """The attempt gave no answer worth passing on; `wait` seconds later there is another one."""
        self.fault = fault
        self._write("failed", {"error": error, "wait": wait, "fault": fault})

    def held(self, fault: Fault) -> None:
        """The call waits until its provider takes requests again."""
        self.fault = fault

    def status(self, side: Side, status: int, headers: Mapping[str, str], streamed: bool) -> None:
        if side == "upstream" and status < 300:
            self.fault = None
        fields = {"side": side, "status": status, "headers": redacted(headers), "streamed": streamed}
        if self.recorder.redactor:
            self._end_stream(side)
            self._streams[side] = StreamRedactor(
                self.recorder.redactor, drop_tokens=self._secret, is_whole=not streamed
            )
        self._write("status", fields, later=True)

    def chunk(self, side: Side, data: bytes) -> None:
        """Bytes of an answer, before they go on."""
        if not self.recorder.on:
            return None
        if self.recorder.redactor:
            if side not in self._streams:
                self._streams[side] = self._redactor()
            return self._write_chunk(side, self._streams[side].feed(data))
        if side == "delivered" and data and data == self._given:
            return self._write_line(f'"side":"{side}","same":true')
        self._given = data if side == "upstream" else self._given
        return self._write_chunk(side, data)

    def _write_chunk(self, side: str, data: bytes) -> None:
        if data or not self.recorder.redactor:
            text = encode_basestring(data.decode(errors="surrogateescape"))
            self._write_line(f'"side":"{side}","text":{text}')

    def _redactor(self, *, is_whole: bool = False) -> StreamRedactor:
        return StreamRedactor(self.recorder.redactor, drop_tokens=self._secret, is_whole=is_whole)

    def _end_stream(self, side: str) -> None:
        """Write what was held back of a side's answer."""
        if stream := self._streams.pop(side, None):
            self._write_chunk(side, stream.close())
            self._found = self._found or stream.found

    def _write_line(self, rest: str) -> None:
        line = f'{{"t":"chunk","c":{self.number},"at":{time.time():.5f},{rest}}}\n'
        lines = [] if self._unwritten is None else self._first_lines()
        self.recorder.write_lines([*lines, _encoded(line)], later=self.recorder.holds)

    def end(
        self,
        outcome: Outcome,
        status: int,
        *,
        error: str | None = None,
        usage: Usage | None = None,
        fault: Fault | None = None,
    ) -> None:
        """The call is over; `fault` is the blame if there is no whole answer."""
        known = ((name, getattr(usage, name)) for name in _COUNTS) if usage else ()
        counts = {name: value for name, value in known if value is not None} or None
        if self.recorder.redactor and self.recorder.on:
            self._end_redaction()
        self._write("end", {"outcome": outcome, "status": status, "error": error, "usage": counts, "fault": fault})

    def note(self, **facts: Any) -> None:
        """Anything else worth keeping, e.g. the tokens of a policy's answer."""
        if self.recorder.redactor and "tokens" in facts:
            self._tokens.append(facts)
            return
        self._write("note", facts, later=self.recorder.holds)

    def _end_redaction(self) -> None:
        """Write what was held back. Tokens are kept only of a call without secrets."""
        for side in list(self._streams):
            self._end_stream(side)
        redacted = self._secret or self._found
        for facts in [{"redacted": True}] if redacted else self._tokens:
            self._write("note", facts, later=True)

    def _write(self, kind: str, fields: Mapping[str, Any], *, later: bool = False) -> None:
        if self.recorder.on:
            line = _line_of(kind, self.number, time.time(), fields)
            lines = [line] if self._unwritten is None else [*self._first_lines(), line]
            self.recorder.write_lines(lines, later=later)

    def _first_lines(self) -> list[bytes]:
        if self._unwritten is None:
            return []
        (facts, body), self._unwritten = self._unwritten, None
        lines, pieces, self._secret = self.recorder.pieces(body)
        return [*lines, _line_of("call", self.number, self.at, {**facts, "body": pieces})]


def _line(value: Mapping[str, Any]) -> bytes:
    return _encoded("".join((*_encoder(value, 0), "\n")))


def _encoded(line: str) -> bytes:
    """Also a line with half a character in it, or with invalid bytes."""
    try:
        return line.encode()
    except UnicodeEncodeError:
        return json.dumps(json.loads(line), separators=(",", ":")).encode() + b"\n"


def _line_of(kind: str, number: int, at: float, fields: Mapping[str, Any]) -> bytes:
    """A line of a call; `fields` has at least one."""
    return _encoded(f'{{"t":"{kind}","c":{number},"at":{at:.5f},{"".join(_encoder(fields, 0))[1:]}\n')


def _now() -> float:
    return round(time.time(), 5)
