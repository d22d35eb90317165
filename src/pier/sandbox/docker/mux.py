"""Many streams and messages over one connection, the same at both ends.

pier and its helper on an engine's host have one connection between them. Messages are JSON objects. A stream carries
the bytes of an open file: of what can be read from a file here, or into one; each with a window of its own, so that
nobody's slow reader holds up somebody else. Standard library only: the helper runs this too.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import socket
import stat
import struct
import termios
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

_HEAD = struct.Struct("!BII")
_MESSAGE, _DATA, _END, _STOP, _CREDIT = range(5)
_LARGEST = 64 << 20
_WINDOW = 512 * 1024
"""Bytes of one stream that may be on their way or waiting at the other end."""
_CHUNK = 64 * 1024
Watched = Callable[[], contextlib.AbstractContextManager[None]]


class Broken(Exception):
    """What came is not what the other end would send."""


def _parsed(payload: bytes) -> dict[str, Any]:
    """A message; an empty one if what came is none."""
    try:
        message = json.loads(payload)
    except (ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}


class Mux:
    """One end of a connection. `feed` it what comes; `run` sends what goes out until `close`.

    `first` is 0 at one end and 1 at the other, so that both may number streams. `on_message` gets every message,
    and an empty one in the place of a malformed one.
    """

    def __init__(self, first: int, on_message: Callable[[dict[str, Any]], None]) -> None:
        self._next = first + 2
        self._on_message = on_message
        self._streams: dict[int, MuxStream] = {}
        self._incoming = bytearray()
        self._outgoing: deque[bytes] = deque()
        self._ready: deque[MuxStream] = deque()
        self._wake = asyncio.Event()
        self.closed = False

    def send(self, message: dict[str, Any]) -> None:
        """Send a message, after everything that was sent before."""
        self._put(_MESSAGE, 0, json.dumps(message, separators=(",", ":")).encode())

    def number(self) -> int:
        """A number for a new stream."""
        self._next += 2
        return self._next

    def take(
        self,
        number: int,
        source: int = -1,
        sink: int = -1,
        over: Callable[[int], None] | None = None,
        watched: Watched = contextlib.nullcontext,
    ) -> MuxStream:
        """Carry the stream `number`: what `source` has goes out, what comes goes into `sink`. Both are owned from now
        on, and must not block. `over` is called when both are closed. Each call that a command at the other end of a
        pipe could hold up happens inside of `watched()`."""
        stream = MuxStream(self, number, source, sink, over, watched)
        self._streams[number] = stream
        stream.begin()
        return stream

    def stream(self, number: int) -> MuxStream | None:
        """A stream that has not ended."""
        return self._streams.get(number)

    def feed(self, data: bytes) -> None:
        """Take what came from the other end. Raises `Broken`."""
        self._incoming += data
        while len(self._incoming) >= _HEAD.size:
            kind, number, size = _HEAD.unpack_from(self._incoming)
            if kind > _CREDIT or size > _LARGEST:
                raise Broken("the connection to the helper carries something else")
            if len(self._incoming) < _HEAD.size + size:
                return
            payload = bytes(self._incoming[_HEAD.size : _HEAD.size + size])
            del self._incoming[: _HEAD.size + size]
            self._take(kind, number, payload)

    def _take(self, kind: int, number: int, payload: bytes) -> None:
        if kind == _MESSAGE:
            self._on_message(_parsed(payload))
            return
        stream = self._streams.get(number)
        if stream is not None:
            stream.hear(kind, payload)
        elif kind == _DATA:
            self._put(_STOP, number)

    def queue(self, stream: MuxStream) -> None:
        """A stream has something to send: it is asked for one piece when it is its turn."""
        self._ready.append(stream)
        self._wake.set()

    def _put(self, kind: int, number: int, payload: bytes = b"") -> None:
        if self.closed:
            return
        self._outgoing.append(_HEAD.pack(kind, number, len(payload)) + payload)
        self._wake.set()

    async def run(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Pass what goes out to `write`, until the end. Streams are read as fast as that takes it, one after the other,
        so that no more than a piece waits here and messages pass by."""
        while not self.closed:
            await self._wake.wait()
            self._wake.clear()
            while self._outgoing or self._ready:
                batch: list[bytes] = []
                size = 0
                while size < _CHUNK and (self._outgoing or self._ready):
                    if not self._outgoing:
                        self._ready.popleft().send_piece()
                        continue
                    batch.append(self._outgoing.popleft())
                    size += len(batch[-1])
                if batch:
                    await write(b"".join(batch))

    def forget(self, number: int) -> None:
        stream = self._streams.pop(number, None)
        if stream is not None and stream.over is not None:
            stream.over(number)

    def refuse(self, number: int) -> None:
        """Have nothing to do with a stream that goes both ways."""
        self._put(_STOP, number)
        self._put(_END, number)

    def close(self) -> None:
        """Close every file of every stream. Idempotent."""
        self.closed = True
        self._wake.set()
        for stream in list(self._streams.values()):
            stream.close()


class MuxStream:
    """Bytes of one open file, one way or both."""

    def __init__(
        self,
        mux: Mux,
        number: int,
        source: int,
        sink: int,
        over: Callable[[int], None] | None = None,
        watched: Watched = contextlib.nullcontext,
    ) -> None:
        self.number = number
        self.over = over
        self._watched = watched
        self.read = 0
        self._mux = mux
        self._source = source
        self._sink = sink
        self._credit = _WINDOW
        self._owed = 0
        self._waiting: deque[bytes] = deque()
        self._ended = False
        self._reading = self._writing = self._queued = False
        self._changed: list[asyncio.Future[None]] = []
        self._loop = asyncio.get_running_loop()

    def begin(self) -> None:
        """Start to carry what the source has; a file that is not a stream goes at once."""
        if self._source < 0:
            return
        if stat.S_ISREG(os.fstat(self._source).st_mode):
            while data := os.read(self._source, _CHUNK):
                self._send(data)
            self._end_source()
            return
        os.set_blocking(self._source, False)
        self._want_reading(True)

    def _send(self, data: bytes) -> None:
        self.read += len(data)
        self._credit -= len(data)
        self._mux._put(_DATA, self.number, data)

    def _want_reading(self, wanted: bool) -> None:
        if wanted != self._reading:
            self._reading = wanted
            self._loop.add_reader(self._source, self._queue) if wanted else self._loop.remove_reader(self._source)

    def _want_writing(self, wanted: bool) -> None:
        if wanted != self._writing:
            self._writing = wanted
            self._loop.add_writer(self._sink, self._write) if wanted else self._loop.remove_writer(self._sink)

    def _queue(self) -> None:
        self._want_reading(False)
        self._queued = True
        self._mux.queue(self)

    def send_piece(self) -> None:
        """Send some of what the source has."""
        self._queued = False
        if self._source < 0:
            return
        try:
            with self._watched():
                data = os.read(self._source, min(_CHUNK, self._credit))
        except BlockingIOError:
            self._want_reading(True)
            return
        except OSError:
            data = b""
        if not data:
            self._end_source()
            return
        self._send(data)
        self._want_reading(self._credit > 0)
        self._tell()

    def _end_source(self) -> None:
        if self._source >= 0:
            self._want_reading(False)
            os.close(self._source)
            self._source = -1
            self._mux._put(_END, self.number)
        self._tell()
        self._forget_if_over()

    def hear(self, kind: int, payload: bytes) -> None:
        """Something about this stream came from the other end."""
        if kind == _DATA and self._sink >= 0:
            self._waiting.append(payload)
            self._write()
        elif kind == _DATA:
            self._mux._put(_STOP, self.number)
        elif kind == _END:
            self._ended = True
            self._write()
        elif kind == _STOP:
            self._end_source()
        elif kind == _CREDIT and self._source >= 0:
            self._credit += int.from_bytes(payload, "big")
            self._want_reading(self._credit > 0 and not self._queued)

    def _write(self) -> None:
        while self._waiting and self._sink >= 0:
            data = self._waiting.popleft()
            try:
                with self._watched():
                    written = os.write(self._sink, data)
            except BlockingIOError:
                written = 0
            except OSError:
                self._end_sink(stop=True)
                return
            self._pay(written)
            if written < len(data):
                self._waiting.appendleft(data[written:])
                self._want_writing(True)
                return
        if self._ended:
            self._end_sink()
        elif self._sink >= 0:
            self._want_writing(False)
        self._tell()

    def _pay(self, count: int) -> None:
        self._owed += count
        if self._owed >= _WINDOW // 4:
            self._mux._put(_CREDIT, self.number, self._owed.to_bytes(4, "big"))
            self._owed = 0

    def _end_sink(self, *, stop: bool = False) -> None:
        self._waiting.clear()
        if self._sink >= 0:
            self._want_writing(False)
            _finish(self._sink)
            self._sink = -1
            if stop:
                self._mux._put(_STOP, self.number)
        self._tell()
        self._forget_if_over()

    def _forget_if_over(self) -> None:
        if self._source < 0 and self._sink < 0:
            self._mux.forget(self.number)

    def _tell(self) -> None:
        for future in self._changed:
            if not future.done():
                future.set_result(None)
        self._changed.clear()

    async def _change(self) -> None:
        future: asyncio.Future[None] = self._loop.create_future()
        self._changed.append(future)
        await future

    async def sent(self) -> None:
        """Wait until what the source has now is on its way."""
        if self._source < 0:
            return
        try:
            with self._watched():
                there = struct.unpack("i", fcntl.ioctl(self._source, termios.FIONREAD, bytes(4)))[0]
        except OSError:
            return
        wanted = self.read + there
        while self._source >= 0 and self.read < wanted:
            await self._change()

    @property
    def is_quiet(self) -> bool:
        """Whether everything that came was written to the sink."""
        return not self._waiting

    async def quiet(self) -> None:
        """Wait until everything that came was written to the sink."""
        while self._waiting:
            await self._change()

    def resize(self, rows: int, columns: int) -> None:
        """Tell a terminal its size."""
        if self._source >= 0:
            with contextlib.suppress(OSError, struct.error):
                fcntl.ioctl(self._source, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def close(self) -> None:
        """Close the files, without a word to the other end."""
        self._waiting.clear()
        for end in (self._source, self._sink):
            if end >= 0:
                self._loop.remove_reader(end)
                self._loop.remove_writer(end)
                os.close(end)
        self._source = self._sink = -1
        self._reading = self._writing = False
        self._tell()
        self._mux.forget(self.number)


def _finish(sink: int) -> None:
    """Close a file so that whoever reads from it learns the end, also if another descriptor of a socket stays open."""
    if stat.S_ISSOCK(os.fstat(sink).st_mode):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(sink)) as sock:
            sock.shutdown(socket.SHUT_WR)
    os.close(sink)
