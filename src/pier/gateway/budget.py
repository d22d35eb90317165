"""What a session, or a whole job, may use, and what it has used.

A turn is reserved before its generation starts, spent when that begins to come, and given back when the upstream failed
to give one. A call for which every turn is reserved waits to see what becomes of them, so a budget of N turns means
exactly N generations, also with calls in parallel. Tokens and money are known only after a turn: no call begins once
the line is crossed, and those under way go on.

A `Limiter` is shared by all sessions that use a provider with the same key. When the provider says "later", all calls
of the session wait, not only the one that got this answer; and all sessions wait when it says so to most of them.
`CallClock` keeps the time that a call spends in such waits, for metrics.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
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

    @property
    def counts_tokens(self) -> bool:
        return any(meter.budget.counts_tokens for meter in self._meters)

    def guess(self, input_tokens: int, output_tokens: int, cost: float) -> None:
        """Count what a provider may have charged for a call that the agent gave up before its usage came."""
        for meter in self._meters:
            meter.guessed = Guess(
                meter.guessed.input_tokens + input_tokens,
                meter.guessed.output_tokens + output_tokens,
                meter.guessed.cost_usd + cost,
            )


class Guess(NamedTuple):
    """Estimated use, which counts against limits and is reported nowhere."""

    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: float = 0.0


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
        self.guessed = Guess()
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
        budget, guessed = self.budget, self.guessed
        inward, outward = self.input_tokens + guessed.input_tokens, self.output_tokens + guessed.output_tokens
        cost = self.cost_usd + guessed.cost_usd
        rows: tuple[tuple[BudgetStop, str, int, int | None], ...] = (
            ("max_turns", "turns", self.turns, budget.turns),
            ("max_input_tokens", "input tokens", inward, budget.input_tokens),
            ("max_output_tokens", "output tokens", outward, budget.output_tokens),
            ("max_tokens", "tokens", inward + outward, budget.total_tokens),
        )
        for reason, name, used, limit in rows:
            if limit is not None and used >= limit:
                return Limit(reason, f"{used} of {limit} {name} of this {self.owner} are used")
        if budget.cost_usd is not None and cost >= budget.cost_usd:
            spent = f"${cost:.4f} of ${budget.cost_usd:.4f} of this {self.owner} are spent"
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


_RECENT = 300.0
"""Seconds for which a session counts as one that uses a provider."""


def _ignore() -> None:
    """Report no pause."""


class Limiter:
    """The shared gate in front of one provider. A pause that the provider asks for holds the session that it answered,
    and all others once most of the sessions that use it were answered so: one of them may have caused it by itself."""

    def __init__(self, requests_per_minute: int | None = None, concurrency: int | None = None) -> None:
        self._pace = Meter(Budget(requests_per_minute=requests_per_minute))
        self._slots = asyncio.Semaphore(concurrency) if concurrency else None
        self._pauses: dict[Hashable, float] = {}
        """When each session that was asked to pause may go on."""
        self._recent: OrderedDict[Hashable, float] = OrderedDict()
        """The sessions that use the provider, and when each last did."""

    def forget(self, session: Hashable) -> None:
        """A session is over."""
        self._pauses.pop(session, None)
        self._recent.pop(session, None)

    def closed_for(self, session: Hashable) -> float:
        """Seconds until the provider takes requests of a session again."""
        if not self._pauses:
            return 0.0
        now = time.monotonic()
        self._pauses = {each: until for each, until in self._pauses.items() if until > now}
        until = self._pauses.get(session, now)
        if 2 * len(self._pauses) > len(self._recent.keys() | self._pauses.keys() | {session}):
            until = max(until, min(self._pauses.values()))
        return until - now

    def close_for(self, session: Hashable, seconds: float) -> None:
        """The provider asked a session for a pause."""
        self._pauses[session] = max(self._pauses.get(session, 0.0), time.monotonic() + seconds)

    async def acquire(self, session: Hashable, on_hold: Callable[[], None] = _ignore) -> float:
        """Wait until a request of the session may be sent, and take one of those that may run at the same time. The
        seconds that were spent on limits of this gateway, not on pauses that the provider asked for: `on_hold` is
        called when one of these begins."""
        queued = 0.0
        now = self._recent[session] = time.monotonic()
        self._recent.move_to_end(session)
        while now - next(iter(self._recent.values())) > _RECENT:
            self._recent.popitem(last=False)
        while True:
            while (left := self.closed_for(session)) > 0:
                on_hold()
                await pause(left)
            since = time.monotonic()
            if self._slots and self._slots.locked():
                with waiting():
                    await self._slots.acquire()
            elif self._slots:
                await self._slots.acquire()
            queued += time.monotonic() - since
            if self.closed_for(session) <= 0:
                break
            self.release()
        since = time.monotonic()
        try:
            await self._pace.pace()
        except BaseException:
            self.release()
            raise
        return queued + time.monotonic() - since

    def release(self) -> None:
        if self._slots:
            self._slots.release()
