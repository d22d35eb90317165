"""The stages of the call that the current task serves, for metrics.

Code that waits for a provider's limits says so here; nothing else in the gateway depends on metrics.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(slots=True)
class Clock:
    """Moments of one call, by the monotonic clock. `waited` is time given to limits and pauses before retries."""

    began: float = field(default_factory=time.monotonic)
    waits: int = 0
    waited: float = 0.0
    cost_usd: float | None = None
    streams: bool = False
    retries: int = 0


CLOCK: ContextVar[Clock | None] = ContextVar("pier_gateway_clock", default=None)


@contextmanager
def waiting() -> Iterator[None]:
    """The time in which the current call stands still because of a limit."""
    clock, began = CLOCK.get(), time.monotonic()
    try:
        yield
    finally:
        if clock is not None:
            clock.waits += 1
            clock.waited += time.monotonic() - began


async def pause(seconds: float) -> None:
    """Sleep because of a limit."""
    with waiting():
        await asyncio.sleep(seconds)
