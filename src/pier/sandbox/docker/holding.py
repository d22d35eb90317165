"""Who is about to make a container from an image holds a lock on its name, so that no collection takes it away; who
makes something at an engine is alone while that lasts.

Long streams to an engine: progress is reported, and a stream that stalls is given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from pathlib import Path

import aiohttp
from aiodocker.exceptions import DockerError

from pier.errors import ImageError
from pier.files import locked
from pier.home import pier_home
from pier.image.disk import only_one
from pier.image.model import OnProgress

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


def letting_go(name: str) -> AbstractContextManager[bool]:
    """While an image is removed: whether nobody holds it."""
    return locked(_place(name), wait=False)


def _place(name: str) -> Path:
    directory = pier_home() / "docker" / "held"
    directory.mkdir(parents=True, exist_ok=True)
    return directory / name.replace("/", "-")


STALL_SECONDS = 900.0
"""How long an engine may take nothing and say nothing while something is sent to it. Some unpack all of it after the
last byte, before they answer."""
_REPORT_EVERY = 1.0


@asynccontextmanager
async def sending(
    parts: AsyncIterator[bytes], what: str, on_progress: OnProgress | None
) -> AsyncIterator[AsyncIterator[bytes]]:
    """Give `parts` to be sent inside of this. `what` is said with the size so far once it takes longer than a moment.
    A connection that breaks is a `DockerError`, an engine that takes nothing more an `ImageError`: nothing that is held
    meanwhile is held for ever."""
    patience = asyncio.timeout(STALL_SECONDS)

    async def watched() -> AsyncIterator[bytes]:
        size, last = 0, time.monotonic()
        async for data in parts:
            patience.reschedule(asyncio.get_running_loop().time() + STALL_SECONDS)
            yield data
            size += len(data)
            if on_progress is not None and time.monotonic() - last > _REPORT_EVERY:
                last = time.monotonic()
                on_progress(f"{what}: {size / 1e6:.0f} MB")

    try:
        async with patience:
            yield watched()
    except TimeoutError:
        if not patience.expired():
            raise
        message = f"{what}: the engine took nothing for {STALL_SECONDS:g} s"
        raise ImageError(message, code="engine_stalled", retryable=True, hint="pier doctor") from None
    except aiohttp.ClientError as error:
        raise DockerError(900, f"{what}: {error}") from error
