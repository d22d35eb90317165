"""How many requests a provider gets, from all sessions together, and when the next attempt may be made.

One limiter is shared by all sessions that use a provider with the same key. When the provider says "later", all of them
wait, not only the call that got this answer.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

from pier.gateway.budget import Budget, Meter
from pier.gateway.clock import pause, waiting

_MORE = 10


@dataclass(frozen=True, slots=True)
class Retry:
    """How passing faults are retried: at most `attempts` requests within `patience` seconds. After a rate limit only
    time helps, so ten times as many are made within the same time."""

    attempts: int = 6
    patience: float = 180.0
    first: float = 0.5
    longest: float = 30.0

    def pause(self, attempt: int, waited: float, asked: float | None, *, limited: bool = False) -> float | None:
        """How long to wait after the attempt with this number (from 1); None to give up. `limited`: after a rate
        limit."""
        if attempt >= self.attempts * (_MORE if limited and self.attempts > 1 else 1):
            return None
        wait = asked or min(self.longest, self.first * 2 ** min(attempt - 1, 60)) * random.uniform(0.5, 1.0)
        return wait if waited + wait <= self.patience else None


def retry_after(headers: Mapping[str, str], now: float | None = None) -> float | None:
    """The seconds that an answer asks to wait, as `Retry-After` or OpenAI's and Anthropic's `retry-after-ms`."""
    try:
        if milliseconds := headers.get("retry-after-ms"):
            return max(0.0, float(milliseconds) / 1000)
        text = headers.get("Retry-After")
        if not text:
            return None
        if text.strip().replace(".", "", 1).isdigit():
            return float(text)
        return max(0.0, parsedate_to_datetime(text).timestamp() - (time.time() if now is None else now))
    except (ValueError, TypeError):
        return None


class Limiter:
    """The shared gate in front of one provider."""

    def __init__(self, requests_per_minute: int | None = None, concurrency: int | None = None) -> None:
        self._pace = Meter(Budget(requests_per_minute=requests_per_minute))
        self._slots = asyncio.Semaphore(concurrency) if concurrency else None
        self._closed_until = 0.0

    @property
    def is_closed(self) -> bool:
        """Whether the provider asked for a pause that is not over."""
        return self._closed_until > time.monotonic()

    def close_for(self, seconds: float) -> None:
        """The provider asked for a pause."""
        self._closed_until = max(self._closed_until, time.monotonic() + seconds)

    async def pass_gate(self) -> None:
        """Wait until a request may be sent."""
        left = self._closed_until - time.monotonic()
        while left > 0:
            await pause(left)
            left = self._closed_until - time.monotonic()
        await self._pace.pace()

    async def enter(self) -> None:
        """Take one of the requests that may run at the same time; `leave` when its answer is over."""
        if self._slots and self._slots.locked():
            with waiting():
                await self._slots.acquire()
        elif self._slots:
            await self._slots.acquire()

    def leave(self) -> None:
        if self._slots:
            self._slots.release()
