"""One at a time for one key: inside a process by an asyncio lock, between processes by a file lock.

The file lock is polled, not waited for: a thread that blocks in flock could not be cancelled.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from weakref import WeakKeyDictionary, WeakValueDictionary

_held: WeakKeyDictionary[asyncio.AbstractEventLoop, WeakValueDictionary[str, asyncio.Lock]] = WeakKeyDictionary()


@asynccontextmanager
async def only_one(directory: Path, key: str) -> AsyncIterator[None]:
    """Hold `key` among all tasks and processes that use the same `directory`."""
    path = directory / hashlib.sha256(key.encode()).hexdigest()[:32]
    locks = _held.setdefault(asyncio.get_running_loop(), WeakValueDictionary())
    lock = locks.setdefault(str(path), asyncio.Lock())
    async with lock:
        directory.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            await _acquire(fd)
            yield
        finally:
            os.close(fd)


async def _acquire(fd: int) -> None:
    pause = 0.005
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            await asyncio.sleep(pause)
            pause = min(pause * 2, 0.2)
