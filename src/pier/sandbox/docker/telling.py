"""Long streams to an engine: progress is reported, and a stream that stalls is given up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from aiodocker.exceptions import DockerError

from pier.errors import ImageError
from pier.image.model import OnProgress

STALL_SECONDS = 900.0
"""How long an engine may take nothing and say nothing while something is sent to it. Some unpack all of it after the
last byte, before they answer."""
_PAUSE = 1.0


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
            if on_progress is not None and time.monotonic() - last > _PAUSE:
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
