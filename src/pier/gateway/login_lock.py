"""Locks that agents' own clients take while they refresh a login, taken the same way. `TimeoutError` if another
program holds one for too long."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

_PATIENCE = 45.0
"""Seconds to wait for a lock; a refresh takes one."""
_STALE = 60.0
"""Seconds after which a lock directory was left behind by a dead client."""
_PAUSE = 0.1


@asynccontextmanager
async def lock_file(path: Path, title: str) -> AsyncIterator[None]:
    """Hold an exclusive `flock` on a file, as Codex does."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await _wait(deadline, path, title)
        yield
    finally:
        os.close(fd)


@asynccontextmanager
async def lock_directory(path: Path, title: str) -> AsyncIterator[None]:
    """Hold a lock that is a directory, as Claude Code does. One that was not renewed for a minute is taken over."""
    deadline = time.monotonic() + _PATIENCE + _STALE
    while True:
        try:
            path.mkdir(mode=0o700)
            break
        except FileExistsError:
            with contextlib.suppress(OSError):
                if time.time() - path.lstat().st_mtime > _STALE:
                    path.rmdir()
                    continue
            await _wait(deadline, path, title)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.rmdir()


async def _wait(deadline: float, path: Path, title: str) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError(f"another program is refreshing the login of {title} and holds {path}")
    await asyncio.sleep(_PAUSE)
