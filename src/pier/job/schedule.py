"""Which trial runs when: a limited number at once, retries after a pause and outside of any slot, and an orderly stop.

The schedule knows nothing of sandboxes: it is given a function that runs one try of one trial. Workers draw from one
queue, so a job of ten thousand trials costs no more than its concurrency.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from pier.job.config import RetryConfig
from pier.job.ledger import Ledger
from pier.job.outcome import Outcome
from pier.job.plan import PlannedTrial

RunTry = Callable[[PlannedTrial, int], Awaitable[Outcome]]
SetAside = Callable[[PlannedTrial, int], str | None]


class Watcher(Protocol):
    """Is notified of what happens."""

    def started(self, trial: PlannedTrial, number: int) -> None: ...

    def ended(self, trial: PlannedTrial, outcome: Outcome) -> None: ...

    def retrying(self, trial: PlannedTrial, outcome: Outcome, wait: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Backoff:
    """When to try again, and after how long."""

    config: RetryConfig

    def wants(self, outcome: Outcome, retries: int) -> bool:
        """Whether a trial that was already tried again `retries` times is to be tried once more."""
        fault = outcome.fault
        if fault is None or retries >= self.config.max_retries:
            return False
        names = {fault.type, fault.code}
        if names & set(self.config.exclude_exceptions or ()):
            return False
        if self.config.include_exceptions is not None:
            return bool(names & set(self.config.include_exceptions))
        return fault.retryable

    def wait(self, retries: int) -> float:
        """Seconds before retry number `retries` (from 1): exponential, with the upper half left to chance so that
        trials which failed together do not come back together."""
        exponent = min(retries - 1, 60)
        longest = min(self.config.max_wait_sec, self.config.min_wait_sec * self.config.wait_multiplier**exponent)
        return longest * random.uniform(0.5, 1.0)


class Schedule:
    """Runs what is owed. `stop` ends it early; what was running is cancelled and stays owed. Once `may_begin` says no,
    no further trial begins, and those that run go on to their end."""

    def __init__(
        self,
        ledger: Ledger,
        run: RunTry,
        set_aside: SetAside,
        *,
        limit: int,
        retry: RetryConfig,
        watcher: Watcher,
        may_begin: Callable[[], bool] = lambda: True,
    ) -> None:
        self._ledger = ledger
        self._run = run
        self._set_aside = set_aside
        self._limit = limit
        self._backoff = Backoff(retry)
        self._watcher = watcher
        self._may_begin = may_begin
        self._ready: deque[PlannedTrial] = deque()
        self._later: list[tuple[float, int, PlannedTrial]] = []
        self._order = itertools.count()
        self._retries: dict[str, int] = {}
        self._changed = asyncio.Event()
        self._workers: list[asyncio.Task[None]] = []
        self.running = 0
        self.stopping = False

    async def run(self, trials: Iterable[PlannedTrial]) -> None:
        """Run these trials to their end, or until `stop`."""
        self._ready.extend(trials)
        count = min(self._limit, len(self._ready))
        async with asyncio.TaskGroup() as group:
            if not self.stopping:
                self._workers = [group.create_task(self._work()) for _ in range(count)]

    def stop(self) -> None:
        """Start nothing more and cancel what is running. What is cancelled twice gives up its clean-up."""
        self.stopping = True
        for worker in self._workers:
            worker.cancel()

    async def _work(self) -> None:
        while (trial := await self._next()) is not None:
            self.running += 1
            try:
                await self._try(trial)
            finally:
                self.running -= 1
                self._changed.set()

    async def _next(self) -> PlannedTrial | None:
        """The next trial, as soon as there is one; None when there will be none."""
        loop = asyncio.get_running_loop()
        while not self.stopping and self._may_begin():
            if self._later and self._later[0][0] <= loop.time():
                return heapq.heappop(self._later)[2]
            if self._ready:
                return self._ready.popleft()
            if not self._later and not self.running:
                return None
            self._changed.clear()
            delay = self._later[0][0] - loop.time() if self._later else None
            try:
                async with asyncio.timeout(delay):
                    await self._changed.wait()
            except TimeoutError:
                continue
        return None

    async def _try(self, trial: PlannedTrial) -> None:
        number = self._ledger.begin(trial.id)
        self._watcher.started(trial, number)
        try:
            outcome = await self._run(trial, number)
        except asyncio.CancelledError:
            self._ledger.end(trial.id, Outcome(cancelled=True))
            raise
        retries = self._retries.get(trial.id, 0)
        self._ledger.end(trial.id, outcome)
        if outcome.cancelled or not self._backoff.wants(outcome, retries):
            self._retries.pop(trial.id, None)
            self._watcher.ended(trial, outcome)
            return
        self._ledger.again(trial.id, "retry", self._set_aside(trial, number))
        self._retries[trial.id] = retries + 1
        wait = self._backoff.wait(retries + 1)
        self._watcher.retrying(trial, outcome, wait)
        heapq.heappush(self._later, (asyncio.get_running_loop().time() + wait, next(self._order), trial))
