"""The near end of a command in a sandbox: this process's own streams, and its terminal in raw mode if it has one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import termios
import threading
import tty
from collections.abc import Awaitable, Callable, Iterator

from pier.beneath import write_all

_CHUNK = 65536


def size() -> tuple[int, int]:
    """Rows and columns of this terminal."""
    try:
        found = os.get_terminal_size(0)
    except OSError:
        return 24, 80
    return found.lines or 24, found.columns or 80


def write(stream: str, data: bytes) -> None:
    """Write output of the command to this process's stream of the same name."""
    write_all(1 if stream == "stdout" else 2, data)


@contextlib.contextmanager
def raw() -> Iterator[None]:
    """The terminal passes every key on while this lasts. Without a terminal nothing changes."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(0)
    tty.setraw(0, termios.TCSADRAIN)
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


async def pump(on_data: Callable[[bytes], Awaitable[None]], on_end: Callable[[], Awaitable[None]]) -> None:
    """Pass this process's stdin on until its end. The thread that reads dies with the process."""
    loop = asyncio.get_running_loop()
    chunks: asyncio.Queue[bytes] = asyncio.Queue()
    room = threading.Semaphore(16)

    def read() -> None:
        data = b"?"
        while data:
            room.acquire()
            try:
                data = os.read(0, _CHUNK)
            except OSError:
                data = b""
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(chunks.put_nowait, data)

    threading.Thread(target=read, daemon=True, name="pier-stdin").start()
    while data := await chunks.get():
        await on_data(data)
        room.release()
    await on_end()


@contextlib.contextmanager
def resizing(on_resize: Callable[[int, int], Awaitable[None]]) -> Iterator[None]:
    """Report each change of this terminal's size."""
    loop = asyncio.get_running_loop()
    telling: set[asyncio.Future[None]] = set()

    def changed() -> None:
        task = asyncio.ensure_future(on_resize(*size()))
        telling.add(task)
        task.add_done_callback(telling.discard)

    loop.add_signal_handler(signal.SIGWINCH, changed)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)
