"""Runs an open job: opens what its trials share, keeps the files up to date, and stops in good order when asked to.

The schedule decides which trial runs when: a limited number at once, retries after a pause and outside of any slot. It
knows nothing of sandboxes: it is given a function that runs one try of one trial. Workers draw from one queue, so a job
of ten thousand trials costs no more than its concurrency.

The first Ctrl-C stops the job in good order, the second bounds the clean-up, the third leaves at once. Handlers are in
place from before the event loop starts until after it ended, so that no signal finds the process without one.

One meter, which every session of the job shares, holds the limits of all trials together. What was used is written to
the journal from the moment it is used: a job that is resumed, also after its runner was killed, goes on counting where
it stopped, with tries that no longer count. `wall_time` counts from the first call of each run, on top of what earlier
runs took; a runner that is killed loses a few seconds of it at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import os
import random
import signal
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from pier.agent.contract import find_agent
from pier.errors import PierError, UsageError
from pier.job.config import AgentConfig, BudgetConfig, JobConfig, RetryConfig
from pier.job.directory import OpenJob, explained, is_full, write_result
from pier.job.ledger import Ledger, Outcome, now, outcome_of, outcome_of_error
from pier.job.load import fill
from pier.job.plan import PlannedTrial
from pier.job.progress import JobLog, Progress
from pier.job.specs import Specs
from pier.job.view import LOG
from pier.trial.result import TrialResult
from pier.trial.run import run_trial
from pier.trial.spec import TrialServices, TrialSpec, open_services

if TYPE_CHECKING:
    from pier.job.meter import JobMeter


RunTry = Callable[[PlannedTrial, int], Awaitable[Outcome]]
SetAside = Callable[[PlannedTrial, int], str | None]


class Watcher(Protocol):
    """Receives the events of a schedule."""

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
        return fault.retryable and (self.config.blame is None or fault.blame in self.config.blame)

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
        watchers: Sequence[Watcher],
        may_begin: Callable[[], bool] = lambda: True,
    ) -> None:
        self._ledger = ledger
        self._run = run
        self._set_aside = set_aside
        self._limit = limit
        self._backoff = Backoff(retry)
        self._watchers = watchers
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
                if self._later or not self.running:  # nothing else changes what a worker without a trial waits for
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
        for watcher in self._watchers:
            watcher.started(trial, number)
        try:
            outcome = await self._run(trial, number)
        except asyncio.CancelledError:
            self._ledger.end(trial.id, Outcome(cancelled=True))
            raise
        retries = self._retries.get(trial.id, 0)
        self._ledger.end(trial.id, outcome)
        if outcome.cancelled or not self._backoff.wants(outcome, retries):
            self._retries.pop(trial.id, None)
            for watcher in self._watchers:
                watcher.ended(trial, outcome)
            return
        self._ledger.again(trial.id, "retry", self._set_aside(trial, number))
        self._retries[trial.id] = retries + 1
        wait = self._backoff.wait(retries + 1)
        for watcher in self._watchers:
            watcher.retrying(trial, outcome, wait)
        heapq.heappush(self._later, (asyncio.get_running_loop().time() + wait, next(self._order), trial))


def job_meter(limits: BudgetConfig, ledger: Ledger) -> JobMeter | None:
    """The meter of a job that has limits."""
    if not (asked := limits.model_dump(exclude_none=True)):
        return None
    from pier.gateway.budget import Budget
    from pier.job.meter import JobMeter

    return JobMeter(Budget(**asked), ledger)


CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
HURRY_SECONDS = 5.0
"""How long clean-up may still take after the second one."""
EXIT_CODE = 130


class Interrupts:
    """Catches signals while the context lasts. `connect` says what the first and second one do."""

    def __init__(self) -> None:
        self.count = 0
        self._before: dict[int, Any] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: Callable[[], None] = lambda: None

    def __enter__(self) -> Interrupts:
        for number in CAUGHT:
            self._before[number] = signal.signal(number, self._notice)
        return self

    def __exit__(self, *_: object) -> None:
        """Give the signals back; after an interrupt they are ignored, since the process is on its way out."""
        for number, before in self._before.items():
            signal.signal(number, signal.SIG_IGN if self.count else before)

    def connect(self, stop: Callable[[], None]) -> None:
        """Call `stop` in this event loop on the first and second signal, at once if there was one already."""
        self._loop = asyncio.get_running_loop()
        self._stop = stop
        if self.count:
            self._loop.call_soon(stop)

    def _notice(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 2:
            os._exit(EXIT_CODE)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop)
            if self.count > 1:
                self._loop.call_soon_threadsafe(self._loop.call_later, HURRY_SECONDS, os._exit, EXIT_CODE)


RunSpec = Callable[[TrialSpec], Awaitable[TrialResult]]


class TrialHook(Watcher, Protocol):
    """Takes part in the trials of a job."""

    def opened(self, job: OpenJob, env: Mapping[str, str]) -> None:
        """Is called before the first trial of a run."""
        ...

    async def run(self, trial: PlannedTrial, spec: TrialSpec, go: RunSpec) -> TrialResult:
        """Run one try with `go`, perhaps of a changed spec. What it raises is the try's outcome."""
        ...


async def run_job(
    job: OpenJob,
    env: Mapping[str, str],
    progress: Progress,
    interrupts: Interrupts,
    hook: TrialHook | None = None,
) -> bool:
    """Run all that is owed; whether the user interrupted it. Whatever ends it, the files are up to date. With a `hook`,
    attempts at one task follow each other."""
    specs = Specs(job.config, job.ledger.plan, job.ledger.id, env)
    log = JobLog(job.directory / LOG, specs.redactor)
    owed = [job.ledger.plan.by_id[id] for id in job.ledger.owed()]
    if hook:
        owed.sort(key=lambda trial: (trial.task, trial.agent, trial.attempt))
        hook.opened(job, env)
    job.ledger.write({"e": "run", "pid": os.getpid(), "at": now(), "owed": len(owed)})
    log.write(f"process {os.getpid()} runs {len(owed)} of {len(job.ledger.plan.trials)} trials")
    try:
        with explained(job.directory):
            interrupted = bool(owed) and await _run_owed(job, owed, specs, log, progress, env, interrupts, hook)
            if not interrupted and not job.stopped and job.ledger.finished_at is None:
                job.ledger.finish()
            log.write("interrupted" if interrupted else f"stopped: {job.stopped}" if job.stopped else "done")
        return interrupted
    finally:
        log.close()
        with contextlib.suppress(OSError):
            write_result(job.ledger, job.config, durable=True)
            job.ledger.sync()


async def _run_owed(
    job: OpenJob,
    owed: list[PlannedTrial],
    specs: Specs,
    log: JobLog,
    progress: Progress,
    env: Mapping[str, str],
    interrupts: Interrupts,
    hook: TrialHook | None,
) -> bool:
    pool = job_meter(job.config.budget, job.ledger)
    async with _services(job, env, pool) as services:
        schedule = Schedule(
            job.ledger,
            partial(_run_try, job=job, specs=specs, services=services, progress=progress, hook=hook),
            job.set_aside,
            limit=job.config.n_concurrent_trials,
            retry=job.config.retry,
            watchers=(progress, log, hook) if hook else (progress, log),
            may_begin=lambda: pool is None or pool.exhausted() is None,
        )

        def stop() -> None:
            progress.stop_noticed()
            schedule.stop()

        interrupts.connect(stop)
        with progress.show():
            async with _beside(_keep_up(job, schedule, pool)), _beside(_build_ahead(specs, owed, services)):
                try:
                    await schedule.run(owed)
                finally:
                    if pool:
                        pool.save()
        job.stopped = pool.exhausted() if pool and any(True for _ in job.ledger.owed()) else None
        interrupts.connect(lambda: None)
    return schedule.stopping


async def _run_try(
    trial: PlannedTrial,
    number: int,
    *,
    job: OpenJob,
    specs: Specs,
    services: TrialServices,
    progress: Progress,
    hook: TrialHook | None,
) -> Outcome:
    directory, name = job.trial_path(trial), trial.name

    async def go(spec: TrialSpec) -> TrialResult:
        on_phase, on_detail = partial(progress.phase, name), partial(progress.detail, name)
        return await run_trial(spec, services, on_phase, on_detail)

    try:
        spec = specs.spec(trial, directory)
        result = await (hook.run(trial, spec, go) if hook else go(spec))
    except Exception as error:
        # A trial's outcome is captured here: whatever broke it may not end its siblings, save a full disk.
        if is_full(error):
            raise
        return outcome_of_error(error, specs.redactor)
    return outcome_of(result, directory)


@asynccontextmanager
async def _services(job: OpenJob, env: Mapping[str, str], pool: JobMeter | None) -> AsyncIterator[TrialServices]:
    """The services that all trials share: opened before the first, closed after the last."""
    check_models(job.config, env)
    environment, label, builds = job.config.environment, f"job {job.directory.name}", job.config.n_concurrent_builds
    async with AsyncExitStack() as stack:
        opened = open_services(environment.backend, label=label, options=environment.kwargs, builds=builds)
        services = await stack.enter_async_context(opened)
        gateway = None
        if _models(job.config):
            from pier.gateway import Directory, Gateway
            from pier.gateway.budget import Retry

            wanted = job.config.provider_retry
            retry = Retry(attempts=wanted.max_attempts, patience=wanted.max_wait_sec)
            gateway = await stack.enter_async_context(Gateway(providers=Directory.load(env), retry=retry))
        yield replace(services, gateway=gateway, pool=pool, environ=env)


def _models(config: JobConfig) -> list[AgentConfig]:
    if config.regrade_of is not None:
        return []
    return [agent for agent in config.agents if agent.model_name and not agent.direct]


def check_models(config: JobConfig, env: Mapping[str, str]) -> None:
    """`UsageError` if a model has no provider, no key, or no price for a budget in money."""
    agents = [] if config.skip_credential_checks else _models(config)
    if not agents:
        return
    from pier.gateway import Budget, Directory, Gateway
    from pier.gateway.session import ByProvider, Terms

    gateway = Gateway(providers=Directory.load(env))
    shared = Budget(**config.budget.model_dump(exclude_none=True))
    for agent in agents:
        model, upstream = fill(agent.model_name, env), None
        if agent.connection:
            target = gateway.directory.connected(model, env, **fill(agent.connection, env))
            model, upstream = target.model, target.provider
        own = Budget(**agent.budget.model_dump(exclude_none=True))
        found = gateway.answerer(model, Terms(model=model, budget=own, shared=shared), upstream)
        login = found.target.provider.login if isinstance(found, ByProvider) else None
        if login and find_agent(agent.label).name != login.client:
            raise UsageError(
                f"cannot run {agent.name} with the login of {login.title}: it is valid for {login.title} only",
                hint=f"export {login.key_name}=..., or choose -a {login.client}",
                code="login-client",
            )


@asynccontextmanager
async def _beside(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Do `work` while the context lasts, and no longer."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _keep_up(job: OpenJob, schedule: Schedule, pool: JobMeter | None) -> None:
    """Keep `result.json` fresh and the journal on disk, seldom enough that it costs next to nothing."""
    pause = 1.0
    while True:
        await asyncio.sleep(pause)
        began = time.monotonic()
        write_result(job.ledger, job.config, schedule.running)
        if pool:
            pool.save()
        pause = max(1.0, 100 * (time.monotonic() - began))
        await asyncio.to_thread(job.ledger.sync)


async def _build_ahead(specs: Specs, owed: Sequence[PlannedTrial], services: TrialServices) -> None:
    """Build the images of tasks that are still to come, so that builds and running trials have separate limits."""

    async def build() -> None:
        for task in places:
            with contextlib.suppress(PierError, OSError):
                if (request := specs.build_request(task)) is not None:
                    await services.images.get(request)

    places = iter(dict.fromkeys(trial.task for trial in owed))
    async with asyncio.TaskGroup() as group:
        for _ in range(specs.builds):
            group.create_task(build())


@dataclass(frozen=True, slots=True)
class Wanted:
    """A choice of finished trials: by kind (`infra`, `errored`, `failed`), by type of error, by name."""

    kind: str | None = None
    types: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()

    def takes(self, name: str, outcome: Outcome) -> bool:
        if self.names and name not in self.names:
            return False
        fault = outcome.fault
        if self.types:
            return fault is not None and bool({fault.type, fault.code} & self.types)
        match self.kind:
            case "infra":
                return fault is not None and fault.blame in ("infra", "provider") and outcome.rewards is None
            case "errored":
                return fault is not None
            case "failed":
                return outcome.rewards is not None and any(value < 1 for value in outcome.rewards.values())
        return True


def void(job: OpenJob, wanted: Wanted) -> int:
    """Set the wanted trials aside so that they are owed again; how many there were."""
    unknown = wanted.names - {trial.name for trial in job.ledger.plan.trials}
    if unknown:
        raise UsageError(f"{job.directory} has no trial {sorted(unknown)[0]}", hint=f"pier job show {job.directory}")
    count = 0
    for trial in job.ledger.plan.trials:
        outcome = job.ledger.outcomes.get(trial.id)
        if outcome is not None and wanted.takes(trial.name, outcome):
            job.ledger.again(trial.id, "asked", job.set_aside(trial, job.ledger.tries.get(trial.id, 1)))
            count += 1
    return count
