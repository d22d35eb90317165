"""Files into and out of a local sandbox: a worker inside does its half, a thread or the loop here does the other."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from pier.errors import SandboxError
from pier.sandbox import tree
from pier.sandbox.local.channel import Channel

_CHUNK = 1 << 20
_BLAMED_ON_TASK = {"not_regular", "too_large", "unsafe_archive", "no_such_user", "broken_archive"}


async def copy(
    channel: Channel,
    request: dict[str, Any],
    *,
    inward: bool,
    work: Callable[[int], Awaitable[Any]],
    cancellable: bool = False,
) -> tuple[list[str], Any]:
    """Have a worker do `request` with one end of a pipe while `work` has the other, which it closes. What the worker
    left out, and what `work` gave. `cancellable`: `work` may be cancelled, else it ends because the pipe is closed."""
    if channel.closed:
        raise channel.lost()
    read, write = os.pipe2(os.O_CLOEXEC)
    theirs, ours = (read, write) if inward else (write, read)
    number = channel.number()

    def begin() -> None:
        try:
            channel.send({"op": "copy", "id": number, "request": request}, [theirs])
        finally:
            os.close(theirs)

    answer = asyncio.ensure_future(channel.wait(number, begin))
    half = asyncio.ensure_future(work(ours))
    try:
        message, _ = await answer
    except asyncio.CancelledError:
        with contextlib.suppress(SandboxError):
            await asyncio.shield(channel.ask({"op": "kill", "job": number}))
        raise
    finally:
        if cancellable:
            half.cancel()
        done = await _finish(half)
    _raise_if_failed(message)
    if isinstance(done, BaseException):
        raise done
    return message.get("skipped", []), done


async def _finish(half: asyncio.Future[Any]) -> Any:
    await asyncio.wait([half])
    return None if half.cancelled() else half.exception() or half.result()


def _raise_if_failed(message: dict[str, Any]) -> None:
    if message.get("ok"):
        return
    text, code = message.get("message", "the sandbox lost the copy"), message.get("code", "sandbox")
    if code == "not_found":
        raise FileNotFoundError(text)
    if message.get("errno") == 28:
        raise SandboxError(text, code="disk_full", retryable=False)
    if code in _BLAMED_ON_TASK:
        raise SandboxError(text, code=code, blame="task", retryable=False)
    raise SandboxError(text, code=code)


async def write_bytes(fd: int, data: bytes) -> None:
    """The near half of a write: all of `data` into the pipe."""
    if len(data) <= 65536:
        _feed(fd, data)
    else:
        await asyncio.to_thread(_feed, fd, data)


def _feed(fd: int, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError), open(fd, "wb", buffering=0) as stream:
        view = memoryview(data)
        while view:
            view = view[stream.write(view) or 0 :]


async def read_bytes(fd: int) -> bytes:
    """The near half of a read."""

    def read() -> bytes:
        with open(fd, "rb", buffering=0) as stream:
            return stream.read()

    return await asyncio.to_thread(read)


async def pack(fd: int, source: Path) -> None:
    """The near half of an upload: a file's bytes, or a directory as a tar stream."""

    def send() -> None:
        with contextlib.suppress(BrokenPipeError):
            if source.is_dir():
                _pack_tree(source, fd)
            else:
                with source.open("rb") as stream:
                    while data := stream.read(_CHUNK):
                        view = memoryview(data)
                        while view:
                            view = view[os.write(fd, view) :]

    try:
        await asyncio.to_thread(send)
    finally:
        os.close(fd)


def _pack_tree(source: Path, fd: int) -> None:
    root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        tree.pack(root, str(source), fd)
    finally:
        os.close(root)


async def unpack(fd: int, target: Path, max_bytes: int | None) -> list[str] | None:
    """The near half of a download. What the far half reports goes before what goes wrong here because of it."""

    def take() -> list[str]:
        with open(fd, "rb") as stream:
            try:
                return tree.receive(stream, target, max_bytes=max_bytes)
            except tree.TreeError as error:
                raise SandboxError(str(error), code=error.code, blame="task", retryable=False) from error

    return await asyncio.to_thread(take)


async def feed_stream(fd: int, stream: AsyncIterator[bytes]) -> None:
    """The near half of unpacking a stream that somebody else makes. It may be cancelled at any moment."""
    os.set_blocking(fd, False)
    try:
        async for data in stream:
            view = memoryview(data)
            while view:
                try:
                    view = view[os.write(fd, view) :]
                except BlockingIOError:
                    await _ready(fd, writable=True)
    except BrokenPipeError:
        return
    finally:
        os.close(fd)


async def _ready(fd: int, *, writable: bool) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    add, remove = (loop.add_writer, loop.remove_writer) if writable else (loop.add_reader, loop.remove_reader)
    add(fd, lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        remove(fd)


async def stream(channel: Channel, request: dict[str, Any]) -> AsyncIterator[bytes]:
    """Have a worker pack something and give what it writes, as it comes."""
    chunks: asyncio.Queue[bytes] = asyncio.Queue(maxsize=4)

    async def take(fd: int) -> None:
        os.set_blocking(fd, False)
        try:
            while True:
                try:
                    data = os.read(fd, _CHUNK)
                except BlockingIOError:
                    await _ready(fd, writable=False)
                    continue
                if not data:
                    return
                await chunks.put(data)
        finally:
            os.close(fd)

    work = asyncio.ensure_future(copy(channel, request, inward=False, work=take))
    try:
        while not (work.done() and chunks.empty()):
            getter = asyncio.ensure_future(chunks.get())
            await asyncio.wait([getter, work], return_when=asyncio.FIRST_COMPLETED)
            if getter.done():
                yield getter.result()
            else:
                getter.cancel()
        work.result()
    finally:
        if not work.done():
            work.cancel()
            while not work.done():
                if not chunks.empty():
                    chunks.get_nowait()
                await asyncio.wait([work], timeout=0.01)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)
