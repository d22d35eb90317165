"""Records the calls of a session while they run: the write side of `pier.record.reader`.

A request is written before its upstream gets it, and each answer before it is passed on to the agent, so killing the
gateway at any instant loses no turn that the agent has. Lines are synced to disk within `SYNC` seconds without delaying
calls; with `durable="power"` the end of a call is on disk before its last event is delivered. Messages, tools and long
system prompts, which are repeated in the next request, are stored once and referred to.

Secrets are removed from every line, including those that are split over the events of a stream: an event that may hold
the beginning of one waits for the next. A call with a secret keeps no token ids, which would spell it.
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
    """Syncs the lines of a gateway's recorders to disk in a thread."""

    def __init__(self) -> None:
        self._written: set[Recorder] = set()
        self._task: asyncio.Task[None] | None = None
        self._flush_now = asyncio.Event()

    def sync_soon(self, recorder: Recorder) -> None:
        self._written.add(recorder)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._sync())

    async def close(self) -> None:
        """Wait until all lines are on disk."""
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
"""From the upstream; to the agent, if that differs; to the agent, after the end of the upstream's answer."""
Outcome = Literal["ok", "error", "cancelled", "refused"]

_COUNTS = tuple(Usage.__dataclass_fields__)
_REMEMBERED = 16
"""Number of arrays whose blobs are remembered, so that their elements need not be compared."""
_MOST_BLOBS, _MOST_LISTS = 100_000, 256
"""Numbers of blobs and lists that can be referred to; older ones are stored again when repeated."""
_STORE_APART = 256
"""Minimum length in characters of a body, or a field, that is stored once and referred to."""


class Recorder:
    """The recording of one session. Without a path nothing is recorded."""

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
        """Syncs lines to disk in the background; None with "power", when each call syncs at its end."""
        self.lost: OSError | None = None
        """The error of the first write that failed, if any."""
        self.written = 0
        """Number of bytes."""
        self._calls = 0
        self._open = 0
        self._start_over()
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._append(b"")
            self.rest()

    def _start_over(self) -> None:
        """Forget all references to written lines: initially, and after a failed write."""
        self._blobs: OrderedDict[bytes, int] = OrderedDict()
        """Numbers of the latest blobs in the file, by digest."""
        self._blob_count = 0
        self._secret: set[int] = set()
        """Blobs that contained a secret; if there are too many, every call is treated as having one."""
        self._has_secret = False
        self._lists = 0
        self._listed: dict[int, tuple[int, Numbers[int]]] = {}
        """The latest list that begins with a blob, and all its blobs."""
        self._last: dict[tuple[str, str], tuple[ref[Array], Numbers[int]]] = {}
        """Blobs of recent arrays, by the array's name and the beginning of its text."""
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
        """Begin a call. `facts` are its dialect, operation, method, path, headers, model and so on."""
        self._calls += 1
        record = (make or CallRecord)(self, self._calls, time.time())
        if self._journal:
            lines, pieces, record.secret = self.pieces(body)
            first = {"t": "call", "c": record.number, "at": round(record.at, 5), **facts, "body": pieces}
            self.write(*lines, _line(first))
        self._open += 1
        return record

    def write(self, *lines: bytes) -> None:
        """Append lines in one write."""
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
            self._start_over()  # lines are lost, and their definitions with them
            raise
        self._first = b""

    def sync(self) -> None:
        if self._journal:
            self._journal.sync()

    async def commit(self) -> None:
        """Wait until the lines are as durable as configured. Must be called at the end of each call."""
        try:
            if self._journal and self._durable == "power":
                await asyncio.to_thread(self._journal.sync)
        finally:
            self._open -= 1  # after the sync, since that needs the open file
        if not self._flusher:
            self.rest()

    def rest(self) -> None:
        """Close the file while no call runs, so that thousands of sessions can be idle."""
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
        """The lines that define new parts of a body, the body as texts and references to definitions, and whether a
        secret is removed from it."""
        if isinstance(body, bytes):
            text = body.decode(errors="surrogateescape")
            return [], [text] if body else [], self.redactor.data(body) != body
        if len(body.text) < _STORE_APART:
            return [], [body.text], bool(self.redactor) and self.redactor.text(body.text) != body.text
        self._has_secret = len(self._secret) > _MOST_BLOBS
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
        if self.redactor and not self._has_secret:
            self._has_secret = any(self.redactor.text(piece) != piece for piece in pieces if isinstance(piece, str))
        return lines, pieces, self._has_secret

    def _array(self, name: str, body: Body, array: Array, lines: list[bytes]) -> tuple[int, int]:
        """The number of a list in the file that begins with these elements, and their count. Of an array that extends
        one of an earlier body, only new elements are examined."""
        begun, count = body.grown.get(name, (array, len(array.spans)))
        last, blobs = self._last.get((name, begun.text[:64])), Numbers("I")
        if last and last[0]() in (begun, array):
            blobs = last[1][: count if last[0]() is begun else len(array.spans)]
        blobs.extend(self._blob(array.text[a:b], lines) for a, b in array.spans[len(blobs) :])
        self._has_secret = self._has_secret or not self._secret.isdisjoint(blobs)
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
            self._blob_count += 1
            number = self._blobs[digest] = self._blob_count
            if self._blob_count > _MOST_BLOBS:
                self._blobs.popitem(last=False)
            if self.redactor and len(self._secret) <= _MOST_BLOBS and self.redactor.data(data) != data:
                self._secret.add(number)
            if b"\n" in data:
                lines.append(_line({"t": "blob", "n": number, "text": text}))
            else:
                lines.append(b'{"t":"blob","n":%d,"json":%b}\n' % (number, data))
        self._has_secret = self._has_secret or number in self._secret
        return number


@dataclass(slots=True)
class CallRecord:
    """One call of a recording, while it runs. Each method writes one line. Lines about an answer that is delivered as a
    whole are written together with the end of the call."""

    recorder: Recorder
    number: int
    at: float
    secret: bool = False
    """Whether a secret was found in the request."""
    fault: Fault | None = field(default=None, init=False)
    """The fault for which the call waits: that of the last attempt, until a later one is answered."""
    is_asked: bool = field(default=False, init=False)
    """Whether an upstream has received the request and not refused it."""
    _held: list[bytes] = field(default_factory=list, init=False)
    """Lines to be written with the next one."""
    _streamed: set[str] = field(default_factory=set, init=False)
    """Sides whose bytes are passed on as they arrive."""
    _last_chunk: bytes = field(default=b"", init=False)
    """The last bytes from the upstream."""
    _streams: dict[str, StreamRedactor] = field(default_factory=dict, init=False)
    """The redactor of each side's bytes."""
    _secret_in_answer: bool = field(default=False, init=False)
    """Whether a secret was found in an answer that has ended."""
    _tokens: list[dict[str, Any]] = field(default_factory=list, init=False)
    """Notes of tokens, which wait until it is known whether the call has a secret."""

    @property
    def is_redacted(self) -> bool:
        """Whether a secret was removed from the record of this call."""
        return self.secret or self._secret_in_answer

    def notice(self, kind: str, facts: Mapping[str, Any]) -> None:
        """Hook for metrics: called for each line of the call before it is written, even if nothing is recorded."""

    def edited(self, edits: list[Mapping[str, Any]]) -> None:
        self.notice("edits", {"edits": edits})
        if edits:
            self._write("edits", {"edits": edits})

    def attempt(self, facts: Mapping[str, Any], body: Body | bytes | None) -> None:
        """Record a request to an upstream, with this body (None for the agent's)."""
        self.is_asked = True
        self.notice("attempt", facts)
        if self.recorder.on:
            lines, pieces, found = self.recorder.pieces(body) if body is not None else ([], None, False)
            self.secret = self.secret or found
            self._write("attempt", {**facts, "body": pieces}, lines)

    def failed(self, error: str, wait: float | None, fault: Fault | None = None) -> None:
        """Record that the attempt failed; it is repeated after `wait` seconds, or never (None)."""
        self.fault, self.is_asked = fault, False
        facts = {"error": error, "wait": wait, "fault": fault}
        self.notice("failed", facts)
        self._write("failed", facts)

    def held(self, fault: Fault) -> None:
        """Note that the call waits until its provider accepts requests again."""
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
        """Record bytes of an answer before they are passed on."""
        self.notice("chunk", {"side": side})
        if not self.recorder.on:
            return
        if self.recorder.redactor:
            if side not in self._streams:
                self._streams[side] = self._redactor()
            self._write_chunk(side, self._streams[side].feed(data))
        elif side == "delivered" and data and data == self._last_chunk:
            self._write("chunk", {"side": side, "same": True}, hold=self._holds(side))
        else:
            self._last_chunk = data if side == "upstream" else self._last_chunk
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
        """Write the rest of a side's answer, which was held back."""
        if stream := self._streams.pop(side, None):
            self._write_chunk(side, stream.close())
            self._secret_in_answer = self._secret_in_answer or stream.found

    def end(
        self,
        outcome: Outcome,
        status: int,
        *,
        error: str | None = None,
        usage: Usage | None = None,
        fault: Fault | None = None,
    ) -> None:
        """Record the end of the call; `fault` is the blame if there is no whole answer."""
        names = _COUNTS if usage else ()
        counts = {name: value for name in names if (value := getattr(usage, name)) is not None} or None
        began = time.monotonic()
        if self.recorder.redactor and self.recorder.on:
            self._end_redaction()
        facts = {"outcome": outcome, "status": status, "error": error, "usage": counts, "fault": fault}
        self._write("end", facts)
        self.notice("end", {**facts, "recorded": time.monotonic() - began})

    def note(self, **facts: Any) -> None:
        """Record other facts, such as the tokens of a policy's answer."""
        if self.recorder.redactor and "tokens" in facts:
            self._tokens.append(facts)
        else:
            self._write("note", facts, hold=True)

    def _end_redaction(self) -> None:
        """Write bytes and notes that were held back. Tokens are kept only if the call has no secret."""
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
