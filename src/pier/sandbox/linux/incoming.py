"""What a worker writes into a pipe, taken by the loop while it is little, and else by a thread."""

from __future__ import annotations

import asyncio
import io
import os
from collections.abc import Callable
from typing import IO, Any, Generic, TypeVar

T = TypeVar("T")

SMALL = 1 << 17
"""Bytes that are worth no thread."""


class Incoming(Generic[T]):
    """What a worker writes into a pipe: kept here while it is little, else handed to a thread that does the work."""

    def __init__(self, fd: int, work: Callable[[IO[bytes]], T]) -> None:
        self._fd = fd
        self._work = work
        self._kept = bytearray()
        self._loop = asyncio.get_running_loop()
        self._all: asyncio.Future[None] = self._loop.create_future()
        self._thread: asyncio.Future[T] | None = None
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, self._read)

    def _read(self) -> bool:
        """Take what is there; whether there may be more at once."""
        try:
            data = os.read(self._fd, SMALL)
        except BlockingIOError:
            return False
        self._kept += data
        if data and len(self._kept) <= SMALL:
            return True
        self._loop.remove_reader(self._fd)
        self._all.set_result(None)
        if data:
            os.set_blocking(self._fd, True)
            self._thread = asyncio.ensure_future(asyncio.to_thread(self._work_on_all))
        return False

    def _work_on_all(self) -> T:
        try:
            with open(self._fd, "rb", closefd=False) as rest:
                return self._work(io.BufferedReader(_Joined(bytes(self._kept), rest), SMALL))
        except BaseException:
            self._hang_up()
            raise

    def _hang_up(self) -> None:
        """Nobody reads any more, which the worker must learn, or it would wait for ever."""
        nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        os.dup2(nothing, self._fd, inheritable=False)
        os.close(nothing)

    async def ended(self) -> None:
        """Wait for the end of the stream, which the worker has closed."""
        while not self._all.done() and self._read():
            pass
        await self._all

    async def close(self) -> None:
        """Wait for the thread, which ends when the pipe does."""
        if self._thread is not None:
            await asyncio.wait([self._thread])
            self._thread.exception()
        elif not self._all.done():
            self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def result(self) -> T:
        """What the work gave, or its error."""
        return self._thread.result() if self._thread is not None else self._work(io.BytesIO(self._kept))


class _Joined(io.RawIOBase):
    """Bytes, and then the rest of a stream."""

    def __init__(self, first: bytes, rest: IO[bytes]) -> None:
        self._first = first
        self._rest = rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._first[: len(buffer)] or self._rest.read(len(buffer))
        self._first = self._first[len(data) :]
        buffer[: len(data)] = data
        return len(data)
