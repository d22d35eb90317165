"""Files of a store and their locks. Standard library only: this runs in a user namespace without other packages.

A lock holds one key, inside a process by an asyncio lock and between processes by a file lock. The file lock is polled,
since a thread that blocks in flock could not be cancelled.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import hashlib
import io
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import BinaryIO
from weakref import WeakKeyDictionary, WeakValueDictionary

from pier.errors import ImageError


@contextmanager
def told_by_disk(what: str) -> Iterator[None]:
    """Turn an OSError into an `ImageError`: code `disk_full` if there is no space left, else `files`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ImageError(
                f"the disk is full: {error}", code="disk_full", hint="pier image gc --max-size 10G", retryable=True
            ) from error
        raise ImageError(f"{what}: {error}", code="files") from error


def write_all(sink: BinaryIO | io.FileIO, data: bytes) -> None:
    """Write to an unbuffered file, which may take less than it is given."""
    view = memoryview(data)
    while view:
        view = view[sink.write(view) or 0 :]


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
