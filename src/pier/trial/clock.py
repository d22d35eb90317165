"""The clocks of a trial: which phase it is in, how long each took, and the limit of each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime

from pier.errors import PierError
from pier.trial.model import TimingInfo
from pier.trial.record import TrialRecord
from pier.trial.spec import OnPhase, Phase


class Clock:
    """Reports each phase when it begins, and adds up the time it took."""

    def __init__(self, record: TrialRecord, on_phase: OnPhase | None) -> None:
        self.current: Phase = "prepare"
        self.seconds: dict[str, float] = {}
        self._record = record
        self._on_phase = on_phase

    @contextmanager
    def phase(self, name: Phase) -> Iterator[TimingInfo]:
        """A phase, with its times as they go into the result."""
        self.current = name
        self._record.log(f"phase {name}")
        if self._on_phase is not None:
            self._on_phase(name)
        begun, timing = time.monotonic(), TimingInfo(started_at=now())
        try:
            yield timing
        finally:
            timing.finished_at = now()
            self.seconds[name] = round(self.seconds.get(name, 0.0) + time.monotonic() - begun, 6)


@asynccontextmanager
async def limit(seconds: float | None, error: Callable[[], PierError]) -> AsyncIterator[None]:
    """Raise `error` when what is inside takes longer. A timeout that something inside raised for itself passes."""
    scope = asyncio.timeout(seconds)
    try:
        async with scope:
            yield
    except TimeoutError:
        if scope.expired():
            raise error() from None
        raise


def now() -> datetime:
    return datetime.now(UTC)
