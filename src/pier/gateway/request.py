"""One request of an agent's HTTP client, and its answer.

Strict about how a body is delimited: one Content-Length or `chunked`, never both, and no other transfer coding.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Callable, Iterable
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from multidict import CIMultiDict

if TYPE_CHECKING:
    from pier.gateway.http import Connection

AHEAD = 256 * 1024
"""Bytes of a body, or of later requests, that are read ahead."""
_REASONS = {status.value: status.phrase for status in HTTPStatus}

Fields = Iterable[tuple[str, str]]


class BadMessage(Exception):
    """The client sent invalid or ambiguous HTTP. `status` is that of the answer."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


_WINDOWS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
"""Supported codings and their `wbits` for zlib."""


def _too_large(limit: int) -> BadMessage:
    return BadMessage(f"the request is larger than {limit >> 20} MiB", 413)


def inflate(data: bytes, coding: str, limit: int) -> bytes:
    """Decompress a body of at most `limit` bytes."""
    window = _WINDOWS.get(coding.strip().lower())
    if window is None:
        raise BadMessage(f"unsupported Content-Encoding {coding!r}: expected gzip or deflate", 415)
    if window == 15 and data[:1] != b"\x78":
        window = -15  # some clients omit the zlib header
    decoder = zlib.decompressobj(window)
    try:
        plain = decoder.decompress(data, limit + 1)
    except zlib.error as error:
        raise BadMessage(f"invalid {coding} body: {error}", 415) from None
    if len(plain) > limit:
        raise _too_large(limit)
    if decoder.unused_data or not decoder.eof:
        raise BadMessage(f"invalid {coding} body: it is {'too long' if decoder.unused_data else 'cut off'}", 415)
    return plain


class HttpRequest:
    """One request and its answer, which is sent either by `reply` or by `start` ... `finish`."""

    __slots__ = (
        "_asked", "_body", "_broken", "_connection", "_continue", "_length", "_waiter",
        "chunked", "closing", "finished", "headers", "method", "minor", "path", "query_string", "received", "started",
        "target",
    )  # fmt: skip

    def __init__(self, connection: Connection, method: str, target: str, minor: int, headers: CIMultiDict[str]) -> None:
        self._connection = connection
        self.method = method
        self.target = target
        self.minor = minor
        """The minor HTTP version: 0 or 1."""
        self.headers = headers
        if not target.startswith("/") and "://" in target:
            try:
                parts = urlsplit(target)
            except ValueError:
                raise BadMessage("invalid address in the request line") from None
            target = f"{parts.path or '/'}?{parts.query}"
        path, _, self.query_string = target.partition("?")
        self.path = unquote(path) if "%" in path else path
        self._length = _length(method, headers, minor)
        expected = headers.get("Expect")
        if expected is not None and expected.lower() != "100-continue":
            raise BadMessage("unsupported Expect header: expected 100-continue", 417)
        self._continue = expected is not None and minor == 1
        self._body = bytearray()
        self._asked = False
        self._broken: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.received = False
        """Whether the whole body was received."""
        self.started = False
        """Whether an answer has begun."""
        self.finished = False
        self.chunked = False
        self.closing = minor == 0 or any("close" in value.lower() for value in headers.getall("Connection", ()))

    def feed(self, data: bytes) -> None:
        self._body += data  # one buffer, since small objects take far more memory
        if not self._asked and len(self._body) > AHEAD:
            self._connection.hold()
        else:
            self._wake()

    def feed_end(self) -> None:
        self.received = True
        self._wake()

    def fail(self, error: Exception) -> None:
        """Make `read` raise `error`, since the rest of the body will not arrive."""
        self._broken = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter and not self._waiter.done():
            self._waiter.set_result(None)

    async def read(self, limit: int, hold: Callable[[int], None]) -> bytes:
        """Read and decompress the body, once; `BadMessage` if it has more than `limit` bytes or is invalid. `hold` is
        called with its size whenever that changes, and may raise `BadMessage` too."""
        try:
            return await self._read(limit, hold)
        except BadMessage:
            if not self.received:
                self._connection.hold()
            raise
        finally:
            self._body = bytearray()

    async def _read(self, limit: int, hold: Callable[[int], None]) -> bytes:
        if self._length is not None and self._length > limit:
            raise _too_large(limit)
        if not self.received:
            self._asked = True
            if self._continue and not self._body:
                self._connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._connection.resume()
            while not self.received:
                if self._broken:
                    raise self._broken
                if len(self._body) > limit:
                    raise _too_large(limit)
                hold(len(self._body))
                self._waiter = self._connection.loop.create_future()
                await self._waiter
        if len(self._body) > limit:
            raise _too_large(limit)
        hold(len(self._body))
        data = bytes(self._body)
        coding = self.headers.get("Content-Encoding")
        if coding is None or coding.lower() == "identity":
            return data
        if len(data) < AHEAD:
            plain = inflate(data, coding, limit)
        else:
            plain = await asyncio.to_thread(inflate, data, coding, limit)
        hold(len(plain))
        return plain

    def reply(self, status: int, fields: Fields, body: bytes, *, close: bool = False) -> None:
        head = self._head(status, [*fields, ("Content-Length", str(len(body)))], close)
        self.finished = True
        self._connection.transport.write(head if self.method == "HEAD" else head + body)

    def start(self, status: int, fields: Fields) -> None:
        self.chunked = self.minor == 1
        more = [("Transfer-Encoding", "chunked")] if self.chunked else []
        self._connection.transport.write(self._head(status, [*fields, *more], close=not self.chunked))

    @property
    def full(self) -> bool:
        """Whether the write buffer is full, since the client reads slowly."""
        return self._connection.full

    def send(self, data: bytes) -> None:
        self._connection.check()
        if framed := self._framed(data):
            self._connection.transport.write(framed)

    async def write(self, data: bytes) -> None:
        """Send a piece of a streamed answer; wait while the write buffer is full."""
        self.send(data)
        if self._connection.full:
            await self._connection.drain()

    async def finish(self, data: bytes = b"") -> None:
        """Send the last piece of a streamed answer and its end."""
        self.finished = True
        end = b"0\r\n\r\n" if self.chunked and self.method != "HEAD" else b""
        self._connection.transport.write(self._framed(data) + end)
        await self._connection.drain()

    def _framed(self, data: bytes) -> bytes:
        """A piece of the body in its transfer coding; empty for an empty piece and for HEAD."""
        if not data or self.method == "HEAD":
            return b""
        return b"%x\r\n%b\r\n" % (len(data), data) if self.chunked else data

    def _head(self, status: int, fields: list[tuple[str, str]], close: bool) -> bytes:
        self._connection.check()
        self.closing = self.closing or close or not self.received or self._connection.server.retired
        fields.append(("Date", _date(int(time.time()))))
        if self.closing:
            fields.append(("Connection", "close"))
        head = render(status_line(status), fields)
        self.started = True
        return head


def _length(method: str, headers: CIMultiDict[str], minor: int) -> int | None:
    """The Content-Length, if any. Refuses heads that the parser accepts although they have more than one Content-Length
    or one `chunked`."""
    codings, lengths = headers.getall("Transfer-Encoding", ()), headers.getall("Content-Length", ())
    if codings:
        if lengths:
            raise BadMessage("a request has either a Content-Length or a Transfer-Encoding")
        if minor == 0 or len(codings) != 1 or codings[0].lower() != "chunked":
            raise BadMessage("unsupported Transfer-Encoding: expected chunked", 501)
    elif lengths:
        text = lengths[0]
        if len(lengths) != 1 or not (text.isascii() and text.isdigit()) or len(text) > 15:
            raise BadMessage("invalid Content-Length")
    length = int(lengths[0]) if lengths else None
    if method == "CONNECT" and (codings or length):
        raise BadMessage("a CONNECT request has no body")
    return length


def render(first: str, fields: Fields) -> bytes:
    """The head of a message. `ValueError` for a field with a line break."""
    lines = [first, *[f"{name}: {value}" for name, value in fields], "", ""]
    text = "\r\n".join(lines)
    if text.count("\n") != len(lines) - 1 or text.count("\r") != len(lines) - 1:
        raise ValueError("a header has a line break in it")
    return text.encode(errors="surrogateescape")


@lru_cache(1)
def _date(now: int) -> str:
    return formatdate(now, usegmt=True)


def status_line(status: int) -> str:
    return f"HTTP/1.1 {status} {_REASONS.get(status, 'Unknown')}"
