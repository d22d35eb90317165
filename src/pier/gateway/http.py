"""The gateway's HTTP/1.1 server: an asyncio protocol per connection, a task per request, `httptools` as the parser.

Ambiguous messages are refused, since they allow request smuggling. Pipelined requests of a connection are answered one
after another. A client that closes its connection, or only its own half, during an answer cancels that. Clients that
send or read slowly use a bounded amount of memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import NoReturn

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from multidict import CIMultiDict

from pier.gateway.request import AHEAD, BadMessage, HttpRequest, render, status_line

log = logging.getLogger(__name__)
_MAX_HEAD = 64 * 1024
_MAX_FIELDS = 200
_MAX_QUEUED = 128
"""Pipelined requests of one connection."""
_LINGER = 2.0
"""Seconds for a client to read an answer that was sent before its whole request was received."""

Handle = Callable[[HttpRequest], Awaitable[None]]
Refuse = Callable[[int, str], bytes]
"""The JSON body of an error about an invalid request."""


class Server:
    """A factory of protocols. `idle`, `slow` and `stalled` are time limits in seconds: between requests, for a whole
    head, and between two pieces of a body. `most` limits the connections at once; more are refused."""

    def __init__(
        self,
        handle: Handle,
        refuse: Refuse,
        *,
        idle: float = 3600.0,
        slow: float = 60.0,
        stalled: float = 300.0,
        most: int | None = None,
    ) -> None:
        self.handle = handle
        self.refuse = refuse
        self.most = most
        self.retired = False
        self.connections: set[Connection] = set()
        self._limits = {"idle": idle, "head": slow, "body": stalled}
        self._sweeping: asyncio.TimerHandle | None = None

    def __call__(self) -> Connection:
        return Connection(self)

    def watch(self, connection: Connection) -> None:
        self.connections.add(connection)
        if self._sweeping is None:
            self._sweeping = connection.loop.call_later(min(30.0, *self._limits.values()), self._sweep)

    def _sweep(self) -> None:
        self._sweeping = None
        for connection in list(self.connections):
            limit = self._limits.get(connection.state)
            if limit is not None and connection.loop.time() - connection.since > limit:
                connection.give_up()
        for connection in self.connections:
            self.watch(connection)
            break

    def retire(self) -> None:
        """Close each connection as soon as its requests are answered."""
        self.retired = True
        for connection in list(self.connections):
            if connection.request is None or connection.request.finished:
                connection.transport.close()

    async def shutdown(self, patience: float) -> None:
        """Wait `patience` seconds for answers to end, then cancel them."""
        self.retire()
        if tasks := {connection.task for connection in self.connections if connection.task}:
            _, late = await asyncio.wait(tasks, timeout=patience)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=patience)
        for connection in list(self.connections):
            connection.transport.abort()
        await asyncio.sleep(0)
        if self._sweeping:
            self._sweeping.cancel()
            self._sweeping = None


class Connection(asyncio.Protocol):
    """One client's connection."""

    transport: asyncio.Transport

    def __init__(self, server: Server) -> None:
        self.server = server
        self.loop = asyncio.get_running_loop()
        self.request: HttpRequest | None = None
        self.task: asyncio.Task[None] | None = None
        self.state = "idle"
        self.since = 0.0
        self._parser = HttpRequestParser(self)
        self._queue: deque[HttpRequest | BadMessage] = deque()
        self._receiving: HttpRequest | None = None
        self._target = b""
        self._fields: list[tuple[str, str]] = []
        self._head_size = self._field_count = self._ahead = 0
        self._in_head = False
        self._bad: BadMessage | None = None
        self._lost = self._held = self._lingering = self.full = False
        self._drained: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.since = self.loop.time()
        if self.server.most is not None and len(self.server.connections) >= self.server.most:
            self._refuse(BadMessage(f"there are more than {self.server.most} connections", 503))
            self.transport.close()
        else:
            self.server.watch(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self.server.connections.discard(self)
        gone = ConnectionResetError("the client went away")
        if self._drained and not self._drained.done():
            self._drained.set_exception(gone)
            self._drained.exception()
        if self.task:
            self.task.cancel()

    def data_received(self, data: bytes) -> None:
        if self._lingering or self._bad or self.transport.is_closing():
            return
        self.since = self.loop.time() if self.state == "body" else self.since
        if self._in_head:
            self._head_size += len(data)
        if self.request and self.request.received:
            self._ahead += len(data)
            if self._ahead > AHEAD:
                self.hold()
        try:
            self._feed(data)
            if self._in_head and self._head_size > _MAX_HEAD:
                raise BadMessage(f"the head is larger than {_MAX_HEAD} bytes", 431)
        except (HttpParserError, BadMessage) as error:
            self._bad = error if isinstance(error, BadMessage) else self._bad or BadMessage(f"invalid HTTP: {error}")
            self._spoil(self._bad)

    def _feed(self, data: bytes) -> None:
        while data:
            try:
                self._parser.feed_data(data)
                break
            except HttpParserUpgrade as upgrade:  # upgrades are ignored: another request may follow
                data = data[upgrade.args[0] :]
                self._parser = HttpRequestParser(self)

    def on_message_begin(self) -> None:
        self._target, self._fields, self._field_count = b"", [], 0
        self._in_head, self._head_size = True, 0
        if self.state == "idle":
            self.state, self.since = "head", self.loop.time()

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._field_count += 1
        if self._receiving:  # trailers are dropped
            if self._field_count > 2 * _MAX_FIELDS:
                self._raise(BadMessage("too many trailers"))
        else:
            text = value.decode(errors="surrogateescape").strip(" \t")
            self._fields.append((name.decode(errors="surrogateescape"), text))

    def on_headers_complete(self) -> None:
        self._in_head = False
        size = len(self._target) + sum(len(name) + len(value) for name, value in self._fields)
        if size > _MAX_HEAD or self._field_count > _MAX_FIELDS:
            self._raise(BadMessage(f"more than {_MAX_FIELDS} headers, or of more than {_MAX_HEAD} bytes", 431))
        major, _, minor = self._parser.get_http_version().partition(".")
        if major != "1" or minor not in ("0", "1"):
            self._raise(BadMessage("unsupported version of HTTP: expected 1.0 or 1.1", 505))
        headers = CIMultiDict(self._fields)
        hosts = headers.getall("Host", ())
        if len(hosts) > 1 or (not hosts and minor == "1"):
            self._raise(BadMessage("a request needs exactly one Host"))
        target = self._target.decode(errors="surrogateescape")
        try:
            request = HttpRequest(self, self._parser.get_method().decode(), target, int(minor), headers)
        except BadMessage as error:
            self._raise(error)
        if len(self._queue) >= _MAX_QUEUED:
            self._raise(BadMessage(f"more than {_MAX_QUEUED} requests wait for their answers", 429))
        self._receiving = request
        if self.request is None:
            self._begin(request)
        else:
            self._queue.append(request)

    def on_body(self, body: bytes) -> None:
        assert self._receiving is not None
        self._receiving.feed(body)

    def on_message_complete(self) -> None:
        assert self._receiving is not None
        self._receiving.feed_end()
        if self._receiving is self.request:
            self.state = "answer"
        self._receiving = None

    def _raise(self, error: BadMessage) -> NoReturn:
        """Raise from a callback of the parser, which replaces the error by its own."""
        self._bad = error
        raise error

    def eof_received(self) -> bool:
        if self.task:
            self.transport.abort()
        return False

    def pause_writing(self) -> None:
        self.full = True

    def resume_writing(self) -> None:
        self.full = False
        if self._drained and not self._drained.done():
            self._drained.set_result(None)

    def check(self) -> None:
        if self._lost or self.transport.is_closing():
            raise ConnectionResetError("the client went away")

    async def drain(self) -> None:
        """Wait while the write buffer is full."""
        self.check()
        while self.full:
            if self._drained is None or self._drained.done():
                self._drained = self.loop.create_future()
            await asyncio.shield(self._drained)

    def hold(self) -> None:
        if not self._held:
            self._held = True
            self.transport.pause_reading()

    def resume(self) -> None:
        if self._held and not self._lost:
            self._held = False
            self.transport.resume_reading()

    def give_up(self) -> None:
        """End a connection that exceeded a time limit."""
        if self.state == "idle":
            self.transport.close()
        else:
            self._spoil(BadMessage("the request took too long", 408))

    def _begin(self, request: HttpRequest) -> None:
        """Start to answer a request, whose body may not have been received yet."""
        self.request, self._ahead = request, 0
        self.state, self.since = "answer" if request.received else "body", self.loop.time()
        self.task = self.loop.create_task(self._answer(request))

    async def _answer(self, request: HttpRequest) -> None:
        try:
            await self.server.handle(request)
            if self.full:
                await self.drain()
        except asyncio.CancelledError:
            self.transport.abort()
            raise
        except ConnectionError:
            pass
        except Exception as error:
            log.exception("a request could not be answered")
            if not request.started:
                body = self.server.refuse(500, f"the gateway failed: {type(error).__name__}")
                with suppress(ConnectionError):
                    request.reply(500, [("Content-Type", "application/json")], body, close=True)
        self._next(request)

    def _next(self, request: HttpRequest) -> None:
        """Continue after an answer: begin the next request, wait for one, or close."""
        self.task = None
        if self._lost:
            return
        if not request.finished:
            self.transport.abort()
        elif not request.received:
            self._linger()
        elif request.closing or self.server.retired:
            self.transport.close()
        elif self._queue:
            following = self._queue.popleft()
            if isinstance(following, BadMessage):
                self._refuse(following)
            else:
                self._begin(following)
        else:
            self.request = None
            self.state, self.since = "head" if self._in_head else "idle", self.loop.time()
            self.resume()

    def _spoil(self, error: BadMessage) -> None:
        """Answer the requests before invalid bytes, and ignore everything after them."""
        self._bad = error
        if self._receiving:
            self.hold()
            self._receiving.fail(error)
            self._receiving = None
        elif self.request:
            self._queue.append(error)
        else:
            self._refuse(error)

    def _refuse(self, error: BadMessage) -> None:
        self.state = "answer"
        body = self.server.refuse(error.status, str(error))
        fields = [("Content-Type", "application/json"), ("Content-Length", str(len(body))), ("Connection", "close")]
        self.transport.write(render(status_line(error.status), fields) + body)
        self._linger()

    def _linger(self) -> None:
        """Let the client read the answer, which closing with unread bytes would discard."""
        self._lingering = True
        self.resume()
        with suppress(OSError, RuntimeError):
            if self.transport.can_write_eof():
                self.transport.write_eof()
        self.loop.call_later(_LINGER, self.transport.close)
