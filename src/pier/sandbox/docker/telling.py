"""Tells how much of a long stream has passed, now and then."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

from pier.image.model import OnProgress

_PAUSE = 1.0


async def said(stream: AsyncIterator[bytes], what: str, on_progress: OnProgress | None) -> AsyncIterator[bytes]:
    """Pass a stream on; `what` is said with the size so far once it takes longer than a moment."""
    size, last = 0, time.monotonic()
    async for data in stream:
        yield data
        size += len(data)
        if on_progress is not None and time.monotonic() - last > _PAUSE:
            last = time.monotonic()
            on_progress(f"{what}: {size / 1e6:.0f} MB")
