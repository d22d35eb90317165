"""pier's end of a socket to a zygote or an init: requests with numbers, answers as futures, events as callbacks.

When the other end is gone every waiter gets the same `SandboxError`; nobody waits for ever.

Frees pier from commands that keep their own output from being read.

A program that splices a stalled socket into its output holds the lock of that pipe while it waits, and a read by pier
waits for the lock in the kernel, even if the pipe is non-blocking. The event loop stands still then, with everything
that pier runs. A thread watches how long such a call takes, and has the command killed, which frees the lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from pier.errors import ArgumentError, SandboxError
from pier.sandbox.linux import wire

Answer = tuple[dict[str, Any], list[int]]
OnAnswer = Callable[[dict[str, Any], list[int]], None]


class Channel:
    """One connection. `ended` is called once, when the other end is gone or `close` was called."""

    def __init__(
        self, sock: socket.socket, gone: str, ended: Callable[[], None] | None = None, *, code: str = "sandbox_gone"
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._gone = gone
        self._code = code
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._numbers = 0
        self._heard: dict[int, OnAnswer] = {}
        self._unsent: list[tuple[bytes, list[int]]] = []
        self.closed = False
        self._loop.add_reader(sock.fileno(), self._read)

    def number(self) -> int:
        """A number that no request of this connection had yet."""
        self._numbers += 1
        return self._numbers

    def hear(self, number: int, callback: OnAnswer) -> None:
        """Call `callback` with each message about `number` until `forget`; with an empty one at the end of it all."""
        self._heard[number] = callback
        if self.closed:
            self._loop.call_soon(callback, {}, [])

    def forget(self, number: int) -> None:
        self._heard.pop(number, None)

    async def ask(self, message: dict[str, Any], fds: list[int] | None = None) -> Answer:
        """Send a request and wait for its one answer. An answer with an error is raised as a `SandboxError`."""
        number = self.number()
        return await self.wait(number, lambda: self.send(message | {"id": number}, fds))

    async def wait(self, number: int, begin: Callable[[], None] | None = None) -> Answer:
        """Wait for one message about `number`."""
        future: asyncio.Future[Answer] = self._loop.create_future()

        def settle(message: dict[str, Any], fds: list[int]) -> None:
            if not future.done():
                future.set_result((message, fds))
            else:
                close_all(fds)

        self.hear(number, settle)
        try:
            if begin is not None:
                begin()
            message, fds = await future
        finally:
            self.forget(number)
            if future.cancelled():
                self._heard[number] = lambda _, fds: close_all(fds)
        if not message:
            raise self.lost()
        if "error" in message:
            close_all(fds)
            raise failure_of(message)
        return message, fds

    def send(self, message: dict[str, Any], fds: list[int] | None = None) -> None:
        """Send a message; the files may be closed as soon as this returns."""
        if self.closed:
            raise self.lost()
        data, files, extra = wire.encode(message, fds or [])
        try:
            if self._unsent:
                raise BlockingIOError
            wire.send_packet(self._sock, data, files)
        except BlockingIOError:
            self._unsent.append((data, [os.dup(fd) for fd in files]))
            self._loop.add_writer(self._sock.fileno(), self._flush)
        except OSError:
            self.close()
            raise self.lost() from None
        finally:
            if extra >= 0:
                os.close(extra)

    def send_now(self, data: bytes, files: list[int], extra: int) -> None:
        """Send an encoded message from another thread, while the event loop stands still; `OSError` if that fails."""
        try:
            wire.send_packet(self._sock, data, files)
        finally:
            if extra >= 0:
                os.close(extra)

    def resize(self, job: int, terminal: int, rows: int, columns: int) -> None:
        """Tell the terminal of a command its size."""
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def lost(self) -> SandboxError:
        return SandboxError(self._gone, code=self._code)

    def _flush(self) -> None:
        while self._unsent:
            data, fds = self._unsent[0]
            try:
                wire.send_packet(self._sock, data, fds)
            except BlockingIOError:
                return
            except OSError:
                self.close()
                return
            close_all(fds)
            del self._unsent[0]
        self._loop.remove_writer(self._sock.fileno())

    def _read(self) -> None:
        """Take one message; the loop calls again while there are more."""
        try:
            received = wire.receive(self._sock)
        except BlockingIOError:
            return
        except (OSError, ValueError):
            received = None
        if received is None:
            self.close()
            return
        message, fds = received
        callback = self._heard.get(message.get("id", -1))
        if callback is None:
            close_all(fds)
        else:
            callback(message, fds)

    def close(self, why: str = "") -> None:
        """Close the connection, for everybody who still waits with the reason `why`. Idempotent."""
        if self.closed:
            return
        self._gone = why or self._gone
        self.closed = True
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        for _, fds in self._unsent:
            close_all(fds)
        self._unsent.clear()
        for callback in list(self._heard.values()):
            callback({}, [])
        if self._ended is not None:
            self._ended()


def failure_of(answer: dict[str, Any]) -> SandboxError:
    """The error that an answer reports."""
    code = answer.get("code", SandboxError.code)
    if code == ArgumentError.code:
        return ArgumentError(answer["error"])
    return SandboxError(answer["error"], code=code)


def close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


_PATIENCE = 2.0
"""Seconds that one read or write may take before its command is killed; after twice as long, all commands are."""


class Watch:
    """Watches the calls of one thread, the event loop's. Its own thread starts with the first call."""

    def __init__(self) -> None:
        self._since = 0.0
        self._channel: Channel | None = None
        self._job = 0
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def over(self, channel: Channel, job: int) -> Iterator[None]:
        """Watch a read or write of a pipe that the command `job` of a sandbox has the other end of."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pier-stuck", daemon=True)
            self._thread.start()
        self._channel, self._job, self._since = channel, job, time.monotonic()
        try:
            yield
        finally:
            self._since = 0.0

    def _run(self) -> None:
        while True:
            time.sleep(_PATIENCE / 4)
            since, channel, job = self._since, self._channel, self._job
            if channel is not None and since and time.monotonic() > since + _PATIENCE:
                patient = time.monotonic() < since + 2 * _PATIENCE
                order = {"op": "kill", "id": 0, "job": job} if patient else {"op": "kill_all", "id": 0}
                with contextlib.suppress(OSError):
                    channel.send_now(*wire.encode(order, []))


WATCH = Watch()
