"""The connections to providers: opened by aiohttp's connector, kept for later requests, closed when silent.

aiohttp's connector opens the connections (DNS, TLS, proxies of the environment) and its parser reads the answers.
`ClientSession` would double the processor time of a request: docs/decisions/gateway-http.md.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Awaitable, Hashable, Mapping
from functools import cached_property, lru_cache
from typing import TypeVar
from urllib.request import getproxies_environment, proxy_bypass

from aiohttp import (
    ClientConnectorCertificateError,
    ClientError,
    ClientOSError,
    ClientRequest,
    ClientTimeout,
    ConnectionTimeoutError,
    ServerDisconnectedError,
    SocketTimeoutError,
    StreamReader,
    TCPConnector,
)
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from aiohttp.http import RawResponseMessage
from aiohttp.http_exceptions import HttpProcessingError
from multidict import CIMultiDict
from yarl import URL

from pier.gateway.budget import Limiter
from pier.gateway.logins import Unwrapper
from pier.gateway.request import render

T = TypeVar("T")
KEPT = 60.0
"""Seconds for which an idle connection is kept."""
_MAX_FIELD = 64 * 1024
"""Bytes of a provider's header."""
_READ_AHEAD = 256 * 1024
_SWEEP = 10.0
"""Maximum seconds between two checks for timeouts."""
_ADDRESSES = 256
"""Number of parsed addresses in the cache."""
_CONNECT = ClientTimeout(total=None, sock_connect=30)


class ConnectionPool:
    def __init__(self, silence: float) -> None:
        self._silence = silence
        """Seconds without a byte after which a read from a provider times out."""
        self._proxies: Mapping[str, str] = {}
        self._connector: TCPConnector | None = None
        self._idle: dict[Hashable, list[tuple[Connection, float]]] = {}
        """Idle connections by server, with the times of their last use."""
        self._waiting: dict[ResponseHandler | StreamReader, float] = {}
        """Pending reads and their start times, which a single timer checks."""
        self._sweeping: asyncio.TimerHandle | None = None

    def open(self) -> None:
        self._proxies = getproxies_environment()
        self._connector = TCPConnector(limit=0, keepalive_timeout=KEPT)
        self._place = lru_cache(_ADDRESSES)(self._find_place)
        self._sweep()

    def _sweep(self) -> None:
        """Time out pending reads, and close connections that were idle for too long."""
        now = time.monotonic()
        for late in [each for each, since in self._waiting.items() if now - since > self._silence]:
            late.set_exception(SocketTimeoutError("Timeout on reading data from socket"))
        for server, kept in list(self._idle.items()):
            while kept and now - kept[0][1] > KEPT:
                kept.pop(0)[0].close()
            if not kept:
                del self._idle[server]
        interval = max(0.01, min(_SWEEP, self._silence / 4))
        self._sweeping = asyncio.get_running_loop().call_later(interval, self._sweep)

    async def close(self) -> None:
        if self._sweeping:
            self._sweeping.cancel()
        for connection, _ in (each for kept in self._idle.values() for each in kept):
            connection.close()
        self._idle.clear()
        if self._connector:
            await self._connector.close()
            self._connector = None

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        """aiohttp's own context is made from the environment at the time of its import."""
        context = ssl.create_default_context()
        context.set_alpn_protocols(["http/1.1"])
        return context

    def _find_place(self, address: str) -> tuple[ClientRequest, Hashable, str]:
        """The connector's request for connecting to an address, the key of the connections that it can share, and the
        first line of its requests."""
        url = URL(address, encoded=True)
        proxy = self._proxies.get(url.scheme) if self._proxies else None
        if proxy is not None and proxy_bypass(url.host or ""):
            proxy = None
        tls = self._tls if url.scheme == "https" else True
        place = ClientRequest("POST", url, proxy=URL(proxy) if proxy else None, ssl=tls)
        target = str(url) if proxy and url.scheme == "http" else url.raw_path_qs
        return place, place.connection_key, f"POST {target} HTTP/1.1"

    async def send(self, address: str, headers: CIMultiDict[str], data: bytes) -> Answer:
        """Send a POST and return the beginning of its answer; `NoAnswer` if there is none. Cancelling closes the
        connection."""
        assert self._connector is not None, "the gateway is not open"
        connection, reused = None, False
        try:
            place, server, first = self._place(address)
            connection = self._kept(server)
            reused = connection is not None
            if connection is None:
                connection = await self._connector.connect(place, [], _CONNECT)
            protocol, transport = connection.protocol, connection.transport
            assert protocol is not None and transport is not None
            protocol.set_response_params(
                read_until_eof=True,
                read_bufsize=_READ_AHEAD,
                max_line_size=_MAX_FIELD,
                max_field_size=_MAX_FIELD,
            )
            headers.setdefault("Host", place.headers["Host"])
            headers["Accept-Encoding"], headers["Content-Length"] = "identity", str(len(data))
            if proof := place.headers.get("Proxy-Authorization"):
                headers["Proxy-Authorization"] = proof
            transport.write(render(first, headers.items()) + data)
            message, body = await self.patiently(protocol, protocol.read())
            while message.code < 200:
                message, body = await self.patiently(protocol, protocol.read())
        except (ClientError, HttpProcessingError, OSError, ValueError) as error:
            _abort(connection)
            raise NoAnswer(error, reused=reused) from None
        except BaseException:
            _abort(connection)
            raise
        return Answer(self, server, connection, message, body)

    async def patiently(self, source: ResponseHandler | StreamReader, reading: Awaitable[T]) -> T:
        """Await a read from `source`; `TimeoutError` if it is silent for too long."""
        self._waiting[source] = time.monotonic()
        try:
            return await reading
        finally:
            del self._waiting[source]

    def keep(self, server: Hashable, connection: Connection) -> None:
        """Keep a connection whose answer was read to its end, if the server keeps it too and has received the whole
        request, whose rest would delay the next one."""
        protocol, transport = connection.protocol, connection.transport
        if self._connector is None or protocol is None or transport is None or protocol.should_close:
            connection.close()
        elif transport.get_write_buffer_size():
            _abort(connection)
        else:
            self._idle.setdefault(server, []).append((connection, time.monotonic()))

    def _kept(self, server: Hashable) -> Connection | None:
        kept = self._idle.get(server)
        while kept:
            connection, since = kept.pop()
            protocol = connection.protocol
            alive = protocol is not None and protocol.is_connected() and not protocol.should_close
            if alive and time.monotonic() - since <= KEPT:
                return connection
            connection.close()
        return None


def _abort(connection: Connection | None) -> None:
    """Close a connection without sending the rest of a request."""
    if connection is not None and connection.protocol is not None:  # its truth value depends on its buffer
        connection.protocol.abort()
        connection.close()


class NoAnswer(Exception):
    """A request got no answer. `retryable`: the provider did not process it, so it may be sent again; `stale`: the
    provider had closed the kept connection already."""

    def __init__(self, error: Exception, *, reused: bool) -> None:
        super().__init__(str(error) or type(error).__name__)
        self.timed_out = isinstance(error, TimeoutError)
        lasting = (HttpProcessingError, ClientConnectorCertificateError, ValueError, TimeoutError)
        self.retryable = isinstance(error, ConnectionTimeoutError) or not isinstance(error, lasting)
        self.hung_up = isinstance(error, ServerDisconnectedError) and isinstance(error.message, str)
        """The connection was closed without an answer."""
        self.stale = reused and (self.hung_up or isinstance(error, ClientOSError))


class Answer:
    """An answer that has begun. It is read with backpressure."""

    def __init__(
        self,
        pool: ConnectionPool,
        server: Hashable,
        connection: Connection,
        message: RawResponseMessage,
        body: StreamReader,
    ) -> None:
        self._pool = pool
        self._server = server
        self._connection = connection
        self._body = body
        self._ahead = b""
        self.limiter: Limiter | None = None
        """The limiter that counts it as a concurrent request."""
        self.unwrapper: Unwrapper | None = None
        """Extracts the answer if the provider wraps it."""
        self.status = message.code
        self.headers = message.headers
        self.content_type = message.headers.get("Content-Type", "").partition(";")[0].strip().lower()

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        if self.limiter:
            self.limiter.release()

    @property
    def ended(self) -> bool:
        """Whether the whole body was received and read."""
        held = self.unwrapper is not None and self.unwrapper.held
        return self._body.at_eof() and not self._ahead and not held

    @property
    def is_stream(self) -> bool:
        return self.content_type.startswith("text/event-stream")

    def unread(self, data: bytes) -> None:
        """Make the next `read` return this."""
        self._ahead = data

    async def read(self) -> bytes:
        """The next bytes of the body, empty at its end. `ConnectionError` or `TimeoutError` if the rest does not
        arrive."""
        if self._ahead:
            data, self._ahead = self._ahead, b""
            return data
        try:
            while True:
                data = await self._pool.patiently(self._body, self._body.readany())
                if self.unwrapper is None:
                    return data
                found = self.unwrapper.feed(data) if data else self.unwrapper.rest()
                if found or not data:
                    return found
        except ClientError as error:
            if isinstance(error, TimeoutError):
                raise
            raise ConnectionError(str(error) or type(error).__name__) from None

    async def read_short(self, limit: int) -> bytes:
        """Read the body up to about `limit` bytes, as far as it arrives, and close the answer."""
        raw = bytearray()
        try:
            while len(raw) < limit and (part := await self.read()):
                raw += part
        except OSError:
            pass
        finally:
            self.close()
        return bytes(raw)

    def close(self) -> None:
        """Release the connection. It is kept for other requests if the answer was read to its end."""
        if self.ended:
            self._pool.keep(self._server, self._connection)
        else:
            _abort(self._connection)
