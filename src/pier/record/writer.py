"""Writes what passes through a session, as it passes: the write side of `pier.record.reader`.

A request is in the file before its upstream gets it, and all that the agent receives before it is passed on: killing
the gateway at any instant loses no turn that the agent has. It is on disk within `SYNC` seconds, and no call waits for
that; with `durable="power"` the end of a call is on disk before its last event is delivered. What comes again in the
next request (messages, tools, a long system prompt) is stored once and referred to.

Secrets are removed from every line, also where they are split over the events of a stream: an event in which one may
begin waits for the next. A call in which one was found keeps no token ids, which would spell it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array as Numbers
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal
from weakref import ref

from pier.files import Journal
from pier.redact import Redactor, StreamRedactor
from pier.wire.body import Array, Body
from pier.wire.faults import Fault
from pier.wire.headers import redacted
from pier.wire.turn import Usage
from pier.wire.values import dump

SYNC = 0.5

log = logging.getLogger(__name__)


class Flusher:
    """Puts what the recorders of a gateway wrote on disk, in a thread."""

    def __init__(self) -> None:
        self._written: set[Recorder] = set()
        self._task: asyncio.Task[None] | None = None
        self._flush_now = asyncio.Event()

    def sync_soon(self, recorder: Recorder) -> None:
        self._written.add(recorder)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._sync())

    async def close(self) -> None:
        """All is on disk."""
        self._flush_now.set()
        while self._task:
            await asyncio.wait({self._task})
        self._flush_now.clear()

    async def _sync(self) -> None:
        try:
            while self._written:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._flush_now.wait(), SYNC)
                written, self._written = self._written, set()
                await asyncio.to_thread(_sync_all, written)
                for each in written - self._written:
                    each.rest()
        finally:
            self._task = None


def _sync_all(written: set[Recorder]) -> None:
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

_COUNTS = tuple(Usage.__dataclass_fields__)
_REMEMBERED = 16
"""How many arrays are known to be in the file without comparing each element."""
_MOST_BLOBS, _MOST_LISTS = 100_000, 256
"""What is sent again after as many others is stored again."""
_STORE_APART = 256
"""A body, or a field of one, of at least this many characters is stored once and referred to."""


class Recorder:
    """The recording of one session. Without a path it keeps nothing."""

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
        self._flusher = flusher if durable == "kill" else None
        """Syncs lines to disk in the background; with "power" each call does so at its end."""
        self.lost: OSError | None = None
        """Why the first lines were lost that could not be written, if any were."""
        self.written = 0
        """Bytes."""
        self._calls = 0
        self._open = 0
        self._start_over()
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._append(b"")
            self.rest()

    def _start_over(self) -> None:
        """Refer to nothing that was written so far: at first, and when a write has failed."""
        self._blobs: OrderedDict[bytes, int] = OrderedDict()
        """The latest blobs in the file, by their digests."""
        self._count = 0
        """Of all blobs."""
        self._secret: set[int] = set()
        """The blobs that a secret was removed from; when there are too many, every call counts as one with a secret."""
        self._found = False
        self._lists = 0
        self._listed: dict[int, tuple[int, Numbers[int]]] = {}
        """The latest list that begins with a blob, and its blobs."""
        self._last: dict[tuple[str, str], tuple[ref[Array], Numbers[int]]] = {}
        """The blobs of arrays in the file, by the array's name and beginning."""
        self._first = _line({"t": "session", "format": FORMAT, "at": _now(), **self._info})

    @property
    def on(self) -> bool:
        return self._journal is not None

    def call(
        self,
        facts: Mapping[str, Any],
        body: Body | bytes,
        make: Callable[[Recorder, int, float], CallRecord] | None = None,
    ) -> CallRecord:
        """A call begins. `facts` are its dialect, operation, method, path, headers, model and so on."""
        self._calls += 1
        record = (make or CallRecord)(self, self._calls, time.time())
        if self._journal:
            lines, pieces, record.secret = self.pieces(body)
            first = {"t": "call", "c": record.number, "at": round(record.at, 5), **facts, "body": pieces}
            self.write(*lines, _line(first))
        self._open += 1
        return record

    def write(self, *lines: bytes) -> None:
        """Add lines, in one write."""
        if self._journal:
            self._append(b"".join(map(self.redactor.data, lines) if self.redactor else lines))
            if self._flusher:
                self._flusher.sync_soon(self)

    def _append(self, lines: bytes) -> None:
        assert self._journal is not None
        try:
            self._journal.append_lines(self.redactor.data(self._first) + lines)
            self.written += len(lines)
        except OSError as error:
            self.lost = self.lost or error
            self._start_over()  # lines are lost, and with them what they define
            raise
        self._first = b""

    def sync(self) -> None:
        if self._journal:
            self._journal.sync()

    async def commit(self) -> None:
        """Wait until what was written survives what it should survive. To be called at the end of each call."""
        try:
            if self._journal and self._durable == "power":
                await asyncio.to_thread(self._journal.sync)
        finally:
            self._open -= 1  # not earlier: the file stays open while it is synced
        if not self._flusher:
            self.rest()

    def rest(self) -> None:
        """Hold no file open while no call runs, so that thousands of sessions may wait."""
        if self._journal and self._open <= 0:
            self._journal.close()

    def close(self, reason: str) -> None:
        self._open = 0
        self.write(_line({"t": "close", "at": _now(), "reason": reason}))
        if self._durable == "power":
            self.sync()
        if not self._flusher:
            self.rest()

    def pieces(self, body: Body | bytes) -> tuple[list[bytes], list[Any], bool]:
        """The lines that define what is new in a body, the body in terms of what is defined, and whether a secret is
        removed from it."""
        if isinstance(body, bytes):
            text = body.decode(errors="surrogateescape")
            return [], [text] if body else [], self.redactor.data(body) != body
        if len(body.text) < _STORE_APART:
            return [], [body.text], bool(self.redactor) and self.redactor.text(body.text) != body.text
        self._found = len(self._secret) > _MOST_BLOBS
        lines: list[bytes] = []
        pieces: list[Any] = []
        at = 0
        for name, (start, end) in body.fields.items():
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
        """The number of a list in the file that begins with these elements, and how many they are. Of an array that
        begins as one of an earlier body, only new elements are looked at."""
        begun, count = body.grown.get(name, (array, len(array.spans)))
        last, blobs = self._last.get((name, begun.text[:64])), Numbers("I")
        if last and last[0]() in (begun, array):
            blobs = last[1][: count if last[0]() is begun else len(array.spans)]
        blobs.extend(self._blob(array.text[a:b], lines) for a, b in array.spans[len(blobs) :])
        self._found = self._found or not self._secret.isdisjoint(blobs)
        self._last[name, array.text[:64]] = ref(array), blobs
        if len(self._last) > _REMEMBERED:
            del self._last[next(iter(self._last))]
        number, listed = self._listed.get(blobs[0], (0, Numbers("I")))
        pairs = enumerate(zip(listed, blobs, strict=False))
        same = next((place for place, (one, other) in pairs if one != other), min(len(listed), len(blobs)))
        if same < len(blobs):
            self._lists += 1
            base, number = number, self._lists
            lines.append(_line({"t": "list", "n": number, "from": [base, same], "add": blobs[same:].tolist()}))
            self._listed.pop(blobs[0], None)
            self._listed[blobs[0]] = number, blobs
            while (
                len(self._listed) > _MOST_LISTS or sum(len(blobs) for _, blobs in self._listed.values()) > _MOST_BLOBS
            ):
                del self._listed[next(iter(self._listed))]
        return number, len(blobs)

    def _blob(self, text: str, lines: list[bytes]) -> int:
        data = text.encode()
        digest = sha256(data).digest()
        number = self._blobs.get(digest)
        if number is None:
            self._count += 1
            number = self._blobs[digest] = self._count
            if self._count > _MOST_BLOBS:
                self._blobs.popitem(last=False)
            if self.redactor and len(self._secret) <= _MOST_BLOBS and self.redactor.data(data) != data:
                self._secret.add(number)
            if b"\n" in data:
                lines.append(_line({"t": "blob", "n": number, "text": text}))
            else:
                lines.append(b'{"t":"blob","n":%d,"json":%b}\n' % (number, data))
        self._found = self._found or number in self._secret
        return number


@dataclass(slots=True)
class CallRecord:
    """One call of a recording, while it runs. Each method is one line in the file. Lines about an answer that is passed
    on only when it is whole are written together with the end of the call."""

    recorder: Recorder
    number: int
    at: float
    secret: bool = False
    """Whether a secret was found in the request."""
    fault: Fault | None = field(default=None, init=False)
    """The reason why the call waits: the fault of the last attempt, until a later one is answered."""
    is_asked: bool = field(default=False, init=False)
    """Whether an upstream has the request, and did not refuse it."""
    _held: list[bytes] = field(default_factory=list, init=False)
    """Lines that are written with the next one."""
    _streamed: set[str] = field(default_factory=set, init=False)
    """Sides whose bytes are passed on as they come."""
    _given: bytes = field(default=b"", init=False)
    """The last bytes from the upstream."""
    _streams: dict[str, StreamRedactor] = field(default_factory=dict, init=False)
    """The redactor of each side's bytes."""
    _found: bool = field(default=False, init=False)
    """Whether a secret was found in an answer that is over."""
    _tokens: list[dict[str, Any]] = field(default_factory=list, init=False)
    """Notes of tokens, which wait until it is known whether they spell a secret."""

    @property
    def is_redacted(self) -> bool:
        """Whether a secret was removed from what is recorded of this call."""
        return self.secret or self._found

    def notice(self, kind: str, facts: Mapping[str, Any]) -> None:
        """Called for each event of the call before it is written, also if nothing is recorded. For metrics."""

    def edited(self, edits: list[Mapping[str, Any]]) -> None:
        """The gateway changed the request, for the reasons given."""
        self.notice("edits", {"edits": edits})
        if edits:
            self._write("edits", {"edits": edits})

    def attempt(self, facts: Mapping[str, Any], body: Body | bytes | None) -> None:
        """The request goes to an upstream, with this body (None: as the agent sent it)."""
        self.is_asked = True
        self.notice("attempt", facts)
        if self.recorder.on:
            lines, pieces, found = self.recorder.pieces(body) if body is not None else ([], None, False)
            self.secret = self.secret or found
            self._write("attempt", {**facts, "body": pieces}, lines)

    def failed(self, error: str, wait: float | None, fault: Fault | None = None) -> None:
        """The attempt gave no answer worth passing on; `wait` seconds later there is another one."""
        self.fault, self.is_asked = fault, False
        facts = {"error": error, "wait": wait, "fault": fault}
        self.notice("failed", facts)
        self._write("failed", facts)

    def held(self, fault: Fault) -> None:
        """The call waits until its provider takes requests again."""
        self.fault = fault

    def status(self, side: Side, status: int, headers: Mapping[str, str], streamed: bool) -> None:
        if side == "upstream" and status < 300:
            self.fault = None
        if self.recorder.redactor:
            self._end_stream(side)
            self._streams[side] = self._redactor(is_whole=not streamed)
        fields = {"side": side, "status": status, "headers": redacted(headers), "streamed": streamed}
        self.notice("status", fields)
        (self._streamed.add if streamed else self._streamed.discard)(side)
        self._write("status", fields, hold=True)

    def chunk(self, side: Side, data: bytes) -> None:
        """Bytes of an answer, before they go on."""
        self.notice("chunk", {"side": side})
        if not self.recorder.on:
            return
        if self.recorder.redactor:
            if side not in self._streams:
                self._streams[side] = self._redactor()
            self._write_chunk(side, self._streams[side].feed(data))
        elif side == "delivered" and data and data == self._given:
            self._write("chunk", {"side": side, "same": True}, hold=self._holds(side))
        else:
            self._given = data if side == "upstream" else self._given
            self._write_chunk(side, data)

    def _write_chunk(self, side: str, data: bytes) -> None:
        if data or not self.recorder.redactor:
            fields = {"side": side, "text": data.decode(errors="surrogateescape")}
            self._write("chunk", fields, hold=self._holds(side))

    def _holds(self, side: str) -> bool:
        return side != "added" and side not in self._streamed

    def _redactor(self, *, is_whole: bool = False) -> StreamRedactor:
        return StreamRedactor(self.recorder.redactor, drop_tokens=self.secret, is_whole=is_whole)

    def _end_stream(self, side: str) -> None:
        """Write what was held back of a side's answer."""
        if stream := self._streams.pop(side, None):
            self._write_chunk(side, stream.close())
            self._found = self._found or stream.found

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
        names = _COUNTS if usage else ()
        counts = {name: value for name in names if (value := getattr(usage, name)) is not None} or None
        began = time.monotonic()
        if self.recorder.redactor and self.recorder.on:
            self._end_redaction()
        facts = {"outcome": outcome, "status": status, "error": error, "usage": counts, "fault": fault}
        self._write("end", facts)
        self.notice("end", {**facts, "recorded": time.monotonic() - began})

    def note(self, **facts: Any) -> None:
        """Anything else worth keeping, e.g. the tokens of a policy's answer."""
        if self.recorder.redactor and "tokens" in facts:
            self._tokens.append(facts)
        else:
            self._write("note", facts, hold=True)

    def _end_redaction(self) -> None:
        """Write what was held back. Tokens are kept only of a call without secrets."""
        for side in list(self._streams):
            self._end_stream(side)
        for facts in [{"redacted": True}] if self.is_redacted else self._tokens:
            self._write("note", facts)

    def _write(self, kind: str, fields: Mapping[str, Any], before: Iterable[bytes] = (), *, hold: bool = False) -> None:
        if self.recorder.on:
            self._held.append(_line({"t": kind, "c": self.number, "at": _now(), **fields}))
            if not hold:
                lines, self._held = self._held, []
                self.recorder.write(*before, *lines)


def _line(value: Mapping[str, Any]) -> bytes:
    return dump(value) + b"\n"


def _now() -> float:
    return round(time.time() * 1e5) / 1e5  # `round` with digits is far slower
