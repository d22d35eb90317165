"""Limits on what a session, or a whole job, may use, and meters of its use.

A turn is reserved before its generation starts, spent when the answer begins, and released if the upstream fails. While
all turns are reserved, further calls wait for the outcome, so a budget of N turns means exactly N generations, also
with parallel calls. Tokens and money are known only after a turn: no call begins once a limit is exceeded, and calls in
progress continue.

A `Limiter` is shared by all sessions that use a provider with the same key. When the provider asks for a pause, all
calls of that session wait, and those of all sessions if most of them were asked. `CallClock` measures the time that a
call spends in such waits, for metrics.
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
    """Measurements of one call. `waited` is the time spent on limits and pauses before retries, in seconds."""

    began: float = field(default_factory=time.monotonic)
    waits: int = 0
    waited: float = 0.0
    cost_usd: float | None = None
    streams: bool = False
    retries: int = 0


CLOCK: ContextVar[CallClock | None] = ContextVar("pier_gateway_clock", default=None)


@contextmanager
def waiting() -> Iterator[None]:
    """Measure the time in which the current call waits for a limit."""
    clock, began = CLOCK.get(), time.monotonic()
    try:
        yield
    finally:
        if clock is not None:
            clock.waits += 1
            clock.waited += time.monotonic() - began


async def pause(seconds: float) -> None:
    """Sleep, measured as a wait for a limit."""
    with waiting():
        await asyncio.sleep(seconds)


_TIMER_SLACK = 0.002
"""Seconds by which a timer may be early."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits; None means unlimited. `wall_time` is in seconds from the first call. `requests_per_minute` delays calls,
    all others end the session."""

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
"""The reason why a session gives no further turn: the name of a budget's limit, or another one."""


class Limit(NamedTuple):
    reason: BudgetStop
    description: str


class Reservation:
    """The turn of one call, as a context manager: a reserved turn is released unless `spend` was called, since an
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
        """Reserve one turn of each meter and return None, or return a meter whose turns are all spent or reserved."""
        for meter in self._meters:
            if meter.is_full:
                return meter
        for meter in self._meters:
            meter.held += 1
        self._reserved = True
        return None

    def spend(self) -> None:
        """Spend the turn: the upstream began to answer."""
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
        """Count the estimated charge for a call that the agent cancelled before its usage was known."""
        for meter in self._meters:
            meter.guessed = Guess(
                meter.guessed.input_tokens + input_tokens,
                meter.guessed.output_tokens + output_tokens,
                meter.guessed.cost_usd + cost,
            )


class Guess(NamedTuple):
    """Estimated use, which counts against limits but is not reported."""

    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: float = 0.0


class Meter:
    """The use of one budget. Sessions may share one in addition to their own."""

    def __init__(self, budget: Budget = Budget(), *, owner: str = "session") -> None:  # noqa: B008 - it is frozen
        self.budget = budget
        self.owner = owner
        self.turns = 0
        self.held = 0
        """Number of reserved turns, which may be released; `turns` does not include them."""
        self.input_tokens = 0
        self.output_tokens = 0
        self.cost_usd = 0.0
        self.guessed = Guess()
        self._started: float | None = None
        self._recent: deque[float] = deque()
        self._watching: list[asyncio.Future[None]] = []

    @property
    def is_full(self) -> bool:
        """Whether all turns are spent or reserved."""
        return self.budget.turns is not None and self.turns + self.held >= self.budget.turns

    def settle(self, *, spent: bool) -> None:
        """Spend or release a reserved turn."""
        self.held -= 1
        self.turns += spent
        self.wake()

    def wake(self) -> None:
        watching, self._watching = self._watching, []
        for future in watching:
            if not future.done():
                future.set_result(None)

    async def change(self) -> None:
        """Wait until a reserved turn is spent or released."""
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
        """Start the clock of `wall_time` unless it runs already."""
        if self._started is None:
            self._started = time.monotonic()

    @property
    def seconds_left(self) -> float | None:
        if self.budget.wall_time is None:
            return None
        return self.budget.wall_time - (time.monotonic() - self._started if self._started is not None else 0.0)

    def exhausted(self) -> str | None:
        """A description of the limit that is used up; None if a turn is or may become available."""
        reached = self.reached()
        return reached.description if reached else None

    def reached(self) -> Limit | None:
        """The limit that is used up; None if a turn is or may become available."""
        budget, guessed = self.budget, self.guessed
        input_tokens = self.input_tokens + guessed.input_tokens
        output_tokens = self.output_tokens + guessed.output_tokens
        cost = self.cost_usd + guessed.cost_usd
        rows: tuple[tuple[BudgetStop, str, int, int | None], ...] = (
            ("max_turns", "turns", self.turns, budget.turns),
            ("max_input_tokens", "input tokens", input_tokens, budget.input_tokens),
            ("max_output_tokens", "output tokens", output_tokens, budget.output_tokens),
            ("max_tokens", "tokens", input_tokens + output_tokens, budget.total_tokens),
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
    """The policy for retrying transient faults: at most `attempts` requests within `patience` seconds. After rate
    limits ten times as many requests are allowed within the same time, since only time helps."""

    attempts: int = 6
    patience: float = 180.0
    first: float = 0.5
    longest: float = 30.0

    def pause(self, attempt: int, waited: float, asked: float | None, *, limited: bool = False) -> float | None:
        """Seconds to wait after the attempt with this number (from 1); None to give up. `limited`: after a rate
        limit."""
        if attempt >= self.attempts * (_RATE_LIMIT_FACTOR if limited and self.attempts > 1 else 1):
            return None
        wait = asked or min(self.longest, self.first * 2 ** min(attempt - 1, 60)) * random.uniform(0.5, 1.0)
        return wait if waited + wait <= self.patience else None


_RECENT = 300.0
"""Seconds after its last request for which a session counts as a user of a provider."""


def _ignore() -> None:
    """Report no pause."""


class Limiter:
    """The shared limits of one provider. A pause that it requests applies to the session that was answered so, and to
    all sessions once most of those using it were: a single session may have caused it alone."""

    def __init__(self, requests_per_minute: int | None = None, concurrency: int | None = None) -> None:
        self._pace = Meter(Budget(requests_per_minute=requests_per_minute))
        self._slots = asyncio.Semaphore(concurrency) if concurrency else None
        self._pauses: dict[Hashable, float] = {}
        """The end of the pause of each session that was asked for one."""
        self._recent: OrderedDict[Hashable, float] = OrderedDict()
        """Times of the last requests of the sessions that use the provider."""

    def forget(self, session: Hashable) -> None:
        self._pauses.pop(session, None)
        self._recent.pop(session, None)

    def closed_for(self, session: Hashable) -> float:
        """Seconds until the provider accepts requests of a session again."""
        if not self._pauses:
            return 0.0
        now = time.monotonic()
        self._pauses = {each: until for each, until in self._pauses.items() if until > now}
        until = self._pauses.get(session, now)
        if 2 * len(self._pauses) > len(self._recent.keys() | self._pauses.keys() | {session}):
            until = max(until, min(self._pauses.values()))
        return until - now

    def close_for(self, session: Hashable, seconds: float) -> None:
        """Note that the provider asked a session for a pause."""
        self._pauses[session] = max(self._pauses.get(session, 0.0), time.monotonic() + seconds)

    async def acquire(self, session: Hashable, on_hold: Callable[[], None] = _ignore) -> float:
        """Wait until a request of the session may be sent, and take one of the concurrent slots. Return the seconds
        spent on the gateway's limits, excluding pauses that the provider requested; `on_hold` is called when one
        begins."""
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
