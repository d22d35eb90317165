"""Asks providers over HTTP and HTTPS: a pool of connections, one request at a time on each.

Sending and waiting are apart, so that a caller may do something else while its request is on the way. An answer is
read as it comes; a reader who stops reading stops the provider. Closing an answer early closes its connection.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from pier.gateway.http.answer import Answer
from pier.gateway.http.coding import BadCoding
from pier.gateway.http.message import (
    BadMessage,
    Framing,
    Length,
    ResponseHead,
    UntilClose,
    find_head,
    framing,
    parse_response,
    render,
    stays_open,
)
from pier.gateway.http.place import Place, place_of

_AHEAD = 256 * 1024
"""How much of an answer is read ahead."""


class Disconnected(ConnectionError):
    """The provider closed the connection."""


class BadAnswer(Disconnected):
    """The provider answered, but not in HTTP that can be trusted."""


@lru_cache(256)
def _begun(place: Place, headers: tuple[tuple[str, str], ...]) -> bytes:
    """The head of a request but for its end: the same for all calls of an agent. `ValueError` if a header has a line
    break in it."""
    return render(f"POST {place.target} HTTP/1.1", [("Host", place.authority), *headers])[:-2]


@dataclass
class Client:
    """All connections. `silence` is how long a provider may send nothing, `idle` how long an unused connection is
    kept, both in seconds."""

    silence: float = 900.0
    connecting: float = 30.0
    idle: float = 60.0
    _idle: dict[tuple[bool, str, int], deque[Sent]] = field(default_factory=dict)
    opened: set[Sent] = field(default_factory=set)
    _sweeping: asyncio.TimerHandle | None = None
    _tls: ssl.SSLContext | None = None

    async def send(self, address: str, headers: Iterable[tuple[str, str]], data: bytes, *, fresh: bool = False) -> Sent:
        """Send a POST, with `fresh` on a new connection. Its answer is at `answer` of what comes back.
        `OSError`, `TimeoutError` or `ValueError` if there is no connection."""
        place = place_of(address)
        head = b"%bContent-Length: %d\r\n\r\n" % (_begun(place, tuple(headers)), len(data))
        connection = None if fresh else self._reuse(place)
        if connection is None:
            connection = await self._connect(place)
        connection.send(head, data, self.silence)
        return connection

    async def close(self) -> None:
        for connection in list(self.opened):
            connection.abort()
        self._idle.clear()
        if self._sweeping:
            self._sweeping.cancel()
            self._sweeping = None
        await asyncio.sleep(0)

    def _reuse(self, place: Place) -> Sent | None:
        waiting = self._idle.get((place.secure, place.host, place.port))
        while waiting:
            connection = waiting.pop()
            if connection.usable:
                return connection
            connection.abort()
        return None

    async def _connect(self, place: Place) -> Sent:
        loop = asyncio.get_running_loop()
        key = (place.secure, place.host, place.port)
        tls = {"ssl": self._context(), "server_hostname": place.host} if place.secure else {}
        race = {"happy_eyeballs_delay": 0.25} if isinstance(loop, asyncio.BaseEventLoop) else {}
        async with asyncio.timeout(self.connecting):
            _, connection = await loop.create_connection(lambda: Sent(self, key), place.host, place.port, **race, **tls)
        return connection

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
            self._tls.set_alpn_protocols(["http/1.1"])
        return self._tls

    def keep(self, connection: Sent, key: tuple[bool, str, int]) -> None:
        """It may be used again, soon."""
        self._idle.setdefault(key, deque()).append(connection)
        if self._sweeping is None:
            self._sweeping = asyncio.get_running_loop().call_later(self.idle, self._sweep)

    def _sweep(self) -> None:
        """Close what was not used for too long."""
        for key, waiting in list(self._idle.items()):
            while waiting and not waiting[0].usable:
                waiting.popleft().abort()
            if not waiting:
                del self._idle[key]
        oldest = min((waiting[0].kept for waiting in self._idle.values()), default=None)
        self._sweeping = None
        if oldest is not None:
            loop = asyncio.get_running_loop()
            self._sweeping = loop.call_later(max(oldest + self.idle - loop.time(), 0.01), self._sweep)


class Sent(asyncio.Protocol):
    """A connection, as the sender of a request sees it."""

    transport: asyncio.Transport

    def __init__(self, client: Client, key: tuple[bool, str, int]) -> None:
        self._client = client
        self._key = key
        self._loop = asyncio.get_running_loop()
        self._rest = b""
        self._parts: list[bytes] = []
        self._size = 0
        self._head: ResponseHead | None = None
        self._body: Framing | None = None
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._heard = self._asked = 0.0
        self._busy = self._held = self._lost = self._again = False

    @property
    def usable(self) -> bool:
        """Whether an unused connection can still serve."""
        fresh = self._loop.time() - self._heard < self._client.idle
        return fresh and not self._lost and not self.transport.is_closing()

    @property
    def kept(self) -> float:
        """Since when an unused connection waits."""
        return self._heard

    @property
    def stale(self) -> bool:
        """Whether a connection that had served before was closed without a byte for the last request: the provider had
        most likely given it up already."""
        return self._again and self._lost and self._heard == self._asked

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self._client.opened.add(self)

    def send(self, head: bytes, data: bytes, silence: float) -> None:
        self._busy = True
        self._head = self._body = self._error = None
        self._heard = self._asked = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(silence, self._listen, silence)
        if len(data) < _AHEAD:
            self.transport.write(head + data)
        else:
            self.transport.write(head)
            self.transport.write(data)

    async def answer(self) -> Answer:
        """The beginning of the answer. `Disconnected` or `TimeoutError` if there is none; a cancelled caller closes the
        connection."""
        try:
            while self._head is None:
                await self._wait()
            return Answer(self, self._head)
        except BadCoding as error:
            self.abort()
            raise BadAnswer(str(error)) from None
        except BaseException:
            self.abort()
            raise

    @property
    def ended(self) -> bool:
        return self._body is not None and self._body.done and not self._parts

    def take(self) -> bytes:
        """What has come of the body since the last time."""
        parts = self._parts
        if not parts:
            return b""
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        self._size = 0
        if self._held and not self._lost:
            self._held = False
            self._heard = self._loop.time()
            self.transport.resume_reading()
        return data

    async def more(self) -> bytes:
        """The next bytes of the body; nothing at its end."""
        while not self._parts:
            if self.ended:
                return b""
            await self._wait()
        return self.take()

    def release(self) -> None:
        reusable = (
            self.ended
            and not self._rest
            and self._head is not None
            and stays_open(self._head.headers, self._head.minor)
        )
        if self._lost or not reusable or self.transport.get_write_buffer_size():
            self.abort()
        elif self._busy:
            self._busy = False
            self._again = True
            self._heard = self._loop.time()
            self._client.keep(self, self._key)

    def abort(self) -> None:
        if not self._lost:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if not self._busy:
            self.abort()
            return
        self._heard = self._loop.time()
        try:
            if self._head is None:
                self._rest = data = self._rest + data
                if not self._begin():
                    return
                data, self._rest = self._rest, b""
            if data and self._body:
                part, self._rest = self._body.feed(data)
                if part:
                    self._parts.append(part)
                    self._size += len(part)
        except BadMessage as error:
            self._fail(BadAnswer(f"the answer is broken: {error}"))
            self.transport.abort()
            return
        if self._size > _AHEAD and not self._held:
            self._held = True
            self.transport.pause_reading()
        self._wake()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        if self._timer:
            self._timer.cancel()
            self._timer = None
        self._client.opened.discard(self)
        if isinstance(self._body, UntilClose) and exc is None and self._error is None:
            self._body = Length(0)
        self._fail(Disconnected(str(exc) if exc else "the connection was closed"))

    def _begin(self) -> bool:
        """Read the head, once it is all there; those of interim answers are passed over."""
        while end := find_head(self._rest):
            head = parse_response(self._rest[:end])
            self._rest = self._rest[end:]
            if head.status < 200:
                continue
            empty = head.status in (204, 304)
            self._body = Length(0) if empty else framing(head.headers, head.minor) or UntilClose()
            self._head = head
            return True
        return False

    async def _wait(self) -> None:
        if self._error:
            raise self._error
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._wake()

    def _listen(self, silence: float) -> None:
        """Give up a provider that says nothing, unless it is we who do not listen."""
        quiet = 0.0 if self._held else self._loop.time() - self._heard
        if not self._busy:
            self._timer = None
        elif quiet < silence:
            self._timer = self._loop.call_later(max(silence - quiet, 0.001), self._listen, silence)
        else:
            self._timer = None
            self._fail(TimeoutError("nothing came for too long"))
