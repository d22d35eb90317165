"""What a session, or a whole job, may use, and what it has used.

A turn is reserved before its generation starts, spent when that begins to come, and given back when the upstream failed
to give one. A call for which every turn is reserved waits to see what becomes of them, so a budget of N turns means
exactly N generations, also with calls in parallel. Tokens and money are known only after a turn: no call begins once
the line is crossed, and those under way go on.

A `Limiter` is shared by all sessions that use a provider with the same key. When the provider says "later", all of them
wait, not only the call that got this answer. `CallClock` keeps the time that a call spends in such waits, for metrics.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from pier.wire.turn import Usage


@dataclass(slots=True)
class CallClock:
    """Moments of one call, by the monotonic clock. `waited` is time given to limits and pauses before retries."""

    began: float = field(default_factory=time.monotonic)
    waits: int = 0
    waited: float = 0.0
    cost_usd: float | None = None
    streams: bool = False
    retries: int = 0


CLOCK: ContextVar[CallClock | None] = ContextVar("pier_gateway_clock", default=None)


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


_TIMER_SLACK = 0.002
"""A timer may be early by this many seconds."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits; None means unlimited. `wall_time` is in seconds from the first call on. `requests_per_minute` slows down,
    the others end the session."""

    turns: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    total_tokens: int | None = None
    cost_usd: float | None = None
    wall_time: float | None = None
    requests_per_minute: int | None = None

    @property
    def counts_tokens(self) -> bool:
        counted = (self.input_tokens, self.output_tokens, self.total_tokens, self.cost_usd)
        return any(limit is not None for limit in counted)


BudgetStop = Literal[
    "max_turns", "max_input_tokens", "max_output_tokens", "max_tokens", "max_cost", "max_time", "stopped"
]
"""Why a session gives no further turn: a limit of its budget by name, or another reason."""


class Limit(NamedTuple):
    """A limit that is used up, by name and as a description."""

    reason: BudgetStop
    description: str


class Reservation:
    """The turn of one call, as a context manager: once reserved it is given back unless `spend` was called, since an
    upstream that fails costs nothing."""

    def __init__(self, meters: tuple[Meter, ...]) -> None:
        self._meters = meters
        self._reserved = False
        self.spent = False

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *_: object) -> None:
        self._settle(spent=False)

    def reserve(self) -> Meter | None:
        """Hold one turn of each meter; None if that was possible, else a meter whose turns are all taken or held."""
        for meter in self._meters:
            if meter.is_full:
                return meter
        for meter in self._meters:
            meter.held += 1
        self._reserved = True
        return None

    def spend(self) -> None:
        """The upstream began to answer."""
        self.spent = True
        self._settle(spent=True)

    def _settle(self, *, spent: bool) -> None:
        if self._reserved:
            self._reserved = False
            for meter in self._meters:
                meter.settle(spent=spent)

    def add(self, usage: Usage | None, cost: float | None) -> None:
        for meter in self._meters:
            meter.add(usage, cost)
        if clock := CLOCK.get():
            clock.cost_usd = cost


class Meter:
    """What was used of one budget. Several sessions may share one, next to their own."""

    def __init__(self, budget: Budget = Budget(), *, owner: str = "session") -> None:  # noqa: B008 - it is frozen
        self.budget = budget
        self.owner = owner
        self.turns = 0
        self.held = 0
        """Turns that are reserved and may yet be given back; `turns` does not count them."""
        self.input_tokens = 0
        self.output_tokens = 0
        self.cost_usd = 0.0
        self._started: float | None = None
        self._recent: deque[float] = deque()
        self._watching: list[asyncio.Future[None]] = []

    @property
    def is_full(self) -> bool:
        """Whether each turn is spent or held."""
        return self.budget.turns is not None and self.turns + self.held >= self.budget.turns

    def settle(self, *, spent: bool) -> None:
        """One turn is no longer held."""
        self.held -= 1
        self.turns += spent
        self.wake()

    def wake(self) -> None:
        """Let all who wait for a change look again."""
        watching, self._watching = self._watching, []
        for future in watching:
            if not future.done():
                future.set_result(None)

    async def change(self) -> None:
        """Wait until a held turn is spent or given back."""
        future = asyncio.get_running_loop().create_future()
        self._watching.append(future)
        with waiting():
            await future

    def add(self, usage: Usage | None, cost: float | None) -> None:
        if usage:
            self.input_tokens += usage.input_tokens or 0
            self.output_tokens += usage.output_tokens or 0
        self.cost_usd += cost or 0.0

    def start(self) -> None:
        """The clock of `wall_time` runs from here; only the first call counts."""
        if self._started is None:
            self._started = time.monotonic()

    @property
    def seconds_left(self) -> float | None:
        if self.budget.wall_time is None:
            return None
        return self.budget.wall_time - (time.monotonic() - self._started if self._started is not None else 0.0)

    def exhausted(self) -> str | None:
        """A description of the limit that is used up for good; None if there is room for a turn, or may yet be."""
        reached = self.reached()
        return reached.description if reached else None

    def reached(self) -> Limit | None:
        """The limit that is used up for good; None if there is room for a turn, or may yet be."""
        budget = self.budget
        rows: tuple[tuple[BudgetStop, str, int, int | None], ...] = (
            ("max_turns", "turns", self.turns, budget.turns),
            ("max_input_tokens", "input tokens", self.input_tokens, budget.input_tokens),
            ("max_output_tokens", "output tokens", self.output_tokens, budget.output_tokens),
            ("max_tokens", "tokens", self.input_tokens + self.output_tokens, budget.total_tokens),
        )
        for reason, name, used, limit in rows:
            if limit is not None and used >= limit:
                return Limit(reason, f"{used} of {limit} {name} of this {self.owner} are used")
        if budget.cost_usd is not None and self.cost_usd >= budget.cost_usd:
            spent = f"${self.cost_usd:.4f} of ${budget.cost_usd:.4f} of this {self.owner} are spent"
            return Limit("max_cost", spent)
        if (left := self.seconds_left) is not None and left <= _TIMER_SLACK:
            return Limit("max_time", f"the {budget.wall_time:g} seconds of this {self.owner} are over")
        return None

    async def pace(self) -> None:
        """Wait until another request fits into this minute."""
        limit = self.budget.requests_per_minute
        if not limit:
            return
        while True:
            now = time.monotonic()
            while self._recent and now - self._recent[0] >= 60:
                self._recent.popleft()
            if len(self._recent) < limit:
                self._recent.append(now)
                return
            await pause(60 - (now - self._recent[0]))


_RATE_LIMIT_FACTOR = 10


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
        if attempt >= self.attempts * (_RATE_LIMIT_FACTOR if limited and self.attempts > 1 else 1):
            return None
        wait = asked or min(self.longest, self.first * 2 ** min(attempt - 1, 60)) * random.uniform(0.5, 1.0)
        return wait if waited + wait <= self.patience else None


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

    async def acquire(self) -> None:
        """Take one of the requests that may run at the same time."""
        if self._slots and self._slots.locked():
            with waiting():
                await self._slots.acquire()
        elif self._slots:
            await self._slots.acquire()

    def release(self) -> None:
        if self._slots:
            self._slots.release()
