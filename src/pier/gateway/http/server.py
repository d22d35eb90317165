"""Answers agents: an asyncio protocol per connection, a task per request, nothing in between.

Requests of a connection are answered one after another, also when they come in one go. A connection that ends while
its request is being answered cancels the answer, whether the client closed it or only its own half. A client that sends
slower or reads slower than we do makes us wait, with bounded memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from pier.gateway.http.message import BadMessage, find_head, parse_request, render, status_line
from pier.gateway.http.request import AHEAD, HttpRequest

log = logging.getLogger(__name__)
_LINGER = 2.0
"""Seconds in which a client may read an answer that came before it had sent its whole request."""

Handle = Callable[[HttpRequest], Awaitable[None]]
Refuse = Callable[[int, str], bytes]
"""The JSON body of an error, for what is not even a request."""


class Server:
    """A factory of protocols. `idle`, `slow` and `stalled` are in seconds: between requests, for a whole head, and
    between two pieces of a body. `most` is how many connections there may be at once; more are turned away."""

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
        """Close each connection as soon as it has nothing to answer."""
        self.retired = True
        for connection in list(self.connections):
            if connection.request is None or connection.request.finished:
                connection.close()

    async def shutdown(self, patience: float) -> None:
        """Let answers end within `patience` seconds, then cut them off."""
        self.retire()
        if tasks := {connection.task for connection in self.connections if connection.task}:
            _, late = await asyncio.wait(tasks, timeout=patience)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=patience)
        for connection in list(self.connections):
            connection.abort()
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
        self._rest = b""
        self._lost = self._held = self._lingering = self.full = False
        self._drained: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.since = self.loop.time()
        if self.server.most is not None and len(self.server.connections) >= self.server.most:
            self._refuse(BadMessage(f"there are more than {self.server.most} connections", 503))
            self.close()
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
        if self._lingering:
            return
        self._rest = self._rest + data if self._rest else data
        try:
            self._advance()
        except BadMessage as error:
            self._refuse(error)

    def eof_received(self) -> bool:
        if self.task:
            self.abort()
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
        """Wait while too much is on its way to the client."""
        self.check()
        while self.full:
            if self._drained is None or self._drained.done():
                self._drained = self.loop.create_future()
            await asyncio.shield(self._drained)

    def hold(self) -> None:
        """Take in no more for now."""
        if not self._held:
            self._held = True
            self.transport.pause_reading()

    def resume(self) -> None:
        if self._held and not self._lost:
            self._held = False
            self.transport.resume_reading()

    def close(self) -> None:
        self.transport.close()

    def abort(self) -> None:
        self.transport.abort()

    def give_up(self) -> None:
        """The client takes too long."""
        if self.state == "idle":
            self.close()
        else:
            self._refuse(BadMessage("the request took too long", 408))

    def _advance(self) -> None:
        """Make of what was received what can be made of it."""
        while self._rest:
            request = self.request
            if request is None:
                if not self._begin():
                    return
            elif not request.received:
                self.since = self.loop.time()
                self._rest = request.feed(self._rest)
                if request.received:
                    self.state = "answer"
                    request.feed(b"")
                elif not self._rest:
                    return
            else:
                if len(self._rest) > AHEAD:
                    self.hold()
                return

    def _begin(self) -> bool:
        """Start to answer a request, if its head is here."""
        if self._rest.startswith(b"\r\n"):
            self._rest = self._rest[2:]
        if self.state == "idle" and self._rest:
            self.state, self.since = "head", self.loop.time()
        end = find_head(self._rest)
        if not end or self.transport.is_closing():
            return False
        head, self._rest = self._rest[:end], self._rest[end:]
        self.request = HttpRequest(self, parse_request(head))
        self.state = "answer" if self.request.received else "body"
        self.task = self.loop.create_task(self._answer(self.request))
        return True

    async def _answer(self, request: HttpRequest) -> None:
        try:
            await self.server.handle(request)
            if self.full:
                await self.drain()
        except asyncio.CancelledError:
            self.abort()
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
        """The answer is out: be ready for another request, or close."""
        self.task = None
        if self._lost:
            return
        if not request.finished:
            self.abort()
        elif not request.received:
            self._linger()
        elif request.closing or self.server.retired:
            self.close()
        else:
            self.request = None
            self.state, self.since = "idle", self.loop.time()
            self.resume()
            if self._rest:
                self.data_received(b"")

    def _refuse(self, error: BadMessage) -> None:
        """What came cannot be understood, so nothing after it can be either."""
        self._rest = b""
        self.state = "answer"
        if self.request:
            self.hold()
            self.request.fail(error)
            return
        body = self.server.refuse(error.status, str(error))
        fields = [("Content-Type", "application/json"), ("Content-Length", str(len(body))), ("Connection", "close")]
        self.transport.write(render(status_line(error.status), fields) + body)
        self._linger()

    def _linger(self) -> None:
        """Let the client read the answer: closing over unread bytes would take it away again."""
        self._lingering, self._rest = True, b""
        self.resume()
        with suppress(OSError, RuntimeError):
            if self.transport.can_write_eof():
                self.transport.write_eof()
        self.loop.call_later(_LINGER, self.close)
