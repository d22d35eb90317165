"""Who is about to make a container from an image holds a lock on its name, so that no collection takes it away; who
makes something at an engine is alone while that lasts."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path

from pier.home import pier_home
from pier.image.disk import only_one

_PAUSE = 0.02


@asynccontextmanager
async def holding(name: str) -> AsyncIterator[None]:
    """Keep an image while a container is made from it. Many may at once; waits while it is being removed."""
    fd = os.open(_place(name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                break
            await asyncio.sleep(_PAUSE)
        yield
    finally:
        os.close(fd)


def making(name: str) -> AbstractAsyncContextManager[None]:
    """While something is made at an engine under a name: others of this user wait."""
    return only_one(pier_home() / "docker" / "locks", name)


@contextmanager
def letting_go(name: str) -> Iterator[bool]:
    """While an image is removed: whether nobody holds it."""
    fd = os.open(_place(name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(fd)


def _place(name: str) -> Path:
    directory = pier_home() / "docker" / "held"
    directory.mkdir(parents=True, exist_ok=True)
    return directory / name.replace("/", "-")
