"""Runs an open job: opens the services that its trials share, keeps its files up to date, and shuts down cleanly.

The schedule limits the number of concurrent trials; retries wait without occupying a slot. It is independent of
sandboxes: a callback runs one try of one trial. Workers take trials from one queue, so the overhead of a job depends on
its concurrency, not on its number of trials.

The first Ctrl-C shuts the job down cleanly, the second limits the time for clean-up, the third exits at once. Signal
handlers are installed before the event loop starts and removed after it ended.

All sessions of the job share one meter, which enforces the limits of all trials together. Usage is written to the
journal immediately, so a resumed job continues from it, even if its runner was killed; tries that no longer count are
included. `wall_time` counts from the first call of each run, in addition to earlier runs; a killed runner loses a few
seconds at most.
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
    """Retry policy and delays."""

    config: RetryConfig

    def wants(self, outcome: Outcome, retries: int) -> bool:
        """Whether to retry a trial that was already retried `retries` times."""
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
        """Return the seconds before retry number `retries` (from 1): exponential with 50% jitter, so that trials that
        failed together are not retried together."""
        exponent = min(retries - 1, 60)
        longest = min(self.config.max_wait_sec, self.config.min_wait_sec * self.config.wait_multiplier**exponent)
        return longest * random.uniform(0.5, 1.0)


@dataclass
class Schedule:
    """Runs trials. `stop` cancels running trials, which stay owed. Once `may_begin` returns False, no further trial
    starts, and running ones continue."""

    ledger: Ledger
    run_try: RunTry
    set_aside: SetAside
    limit: int
    retry: RetryConfig
    watchers: Sequence[Watcher]
    may_begin: Callable[[], bool] = lambda: True
    running: int = 0
    stopping: bool = False

    def __post_init__(self) -> None:
        self._backoff = Backoff(self.retry)
        self._ready: deque[PlannedTrial] = deque()
        self._later: list[tuple[float, int, PlannedTrial]] = []
        self._order = itertools.count()
        self._retries: dict[str, int] = {}
        self._changed = asyncio.Event()
        self._workers: list[asyncio.Task[None]] = []

    async def run(self, trials: Iterable[PlannedTrial]) -> None:
        """Run these trials until all have ended, or until `stop`."""
        self._ready.extend(trials)
        count = min(self.limit, len(self._ready))
        async with asyncio.TaskGroup() as group:
            if not self.stopping:
                self._workers = [group.create_task(self._work()) for _ in range(count)]

    def stop(self) -> None:
        """Start no further trials and cancel running ones. A second call also cancels their clean-up."""
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
                if self._later or not self.running:  # the only events that idle workers wait for
                    self._changed.set()

    async def _next(self) -> PlannedTrial | None:
        """Wait for the next trial; None if there will be no more."""
        loop = asyncio.get_running_loop()
        while not self.stopping and self.may_begin():
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
        number = self.ledger.begin(trial.id)
        for watcher in self.watchers:
            watcher.started(trial, number)
        try:
            outcome = await self.run_try(trial, number)
        except asyncio.CancelledError:
            self.ledger.end(trial.id, Outcome(cancelled=True))
            raise
        retries = self._retries.get(trial.id, 0)
        self.ledger.end(trial.id, outcome)
        if outcome.cancelled or not self._backoff.wants(outcome, retries):
            self._retries.pop(trial.id, None)
            for watcher in self.watchers:
                watcher.ended(trial, outcome)
            return
        self.ledger.again(trial.id, "retry", self.set_aside(trial, number))
        self._retries[trial.id] = retries + 1
        wait = self._backoff.wait(retries + 1)
        for watcher in self.watchers:
            watcher.retrying(trial, outcome, wait)
        heapq.heappush(self._later, (asyncio.get_running_loop().time() + wait, next(self._order), trial))


def job_meter(limits: BudgetConfig, ledger: Ledger) -> JobMeter | None:
    """Create the meter of a job with limits; None without limits."""
    if not (limits_set := limits.model_dump(exclude_none=True)):
        return None
    from pier.gateway.budget import Budget
    from pier.job.meter import JobMeter

    return JobMeter(Budget(**limits_set), ledger)


CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
HURRY_SECONDS = 5.0
"""Time limit for clean-up after the second signal."""
EXIT_CODE = 130


class Interrupts:
    """Handles signals while the context lasts. `connect` sets the action for the first and second signal."""

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
        """Restore the signal handlers; after an interrupt ignore signals, since the process is about to exit."""
        for number, before in self._before.items():
            signal.signal(number, signal.SIG_IGN if self.count else before)

    def connect(self, stop: Callable[[], None]) -> None:
        """Call `stop` in this event loop on the first and second signal, at once if one has already arrived."""
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
    """Observes and wraps the trials of a job."""

    def opened(self, job: OpenJob, env: Mapping[str, str]) -> None:
        """Prepare for a run; called before its first trial."""
        ...

    async def run(self, trial: PlannedTrial, spec: TrialSpec, go: RunSpec) -> TrialResult:
        """Run one try by calling `go`, optionally with a changed spec. An exception becomes the outcome."""
        ...


async def run_job(
    job: OpenJob, env: Mapping[str, str], progress: Progress, interrupts: Interrupts, hook: TrialHook | None = None
) -> bool:
    """Run all unfinished trials and return whether the user interrupted. The job's files are up to date in any case.
    With a `hook`, attempts at one task run consecutively."""
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
            interrupted = bool(owed) and await _Run(job, specs, progress, hook).run(owed, env, log, interrupts)
            if not interrupted and not job.stopped and job.ledger.finished_at is None:
                job.ledger.finish()
            log.write("interrupted" if interrupted else f"stopped: {job.stopped}" if job.stopped else "done")
        return interrupted
    finally:
        log.close()
        with contextlib.suppress(OSError):
            write_result(job.ledger, job.config, durable=True)
            job.ledger.sync()


@dataclass(frozen=True, slots=True)
class _Run:
    job: OpenJob
    specs: Specs
    progress: Progress
    hook: TrialHook | None

    async def run(self, owed: list[PlannedTrial], env: Mapping[str, str], log: JobLog, interrupts: Interrupts) -> bool:
        """Run the owed trials and return whether the user interrupted."""
        job, progress = self.job, self.progress
        pool = job_meter(job.config.budget, job.ledger)
        async with _services(job, env, pool) as services:
            schedule = Schedule(
                job.ledger,
                lambda trial, _: self._try(trial, services),
                job.set_aside,
                limit=job.config.n_concurrent_trials,
                retry=job.config.retry,
                watchers=(progress, log, self.hook) if self.hook else (progress, log),
                may_begin=lambda: pool is None or pool.exhausted() is None,
            )

            def stop() -> None:
                progress.stop_noticed()
                schedule.stop()

            interrupts.connect(stop)
            builds = _build_ahead(self.specs, owed, services)
            with progress.show():
                async with _background(_keep_files(job, schedule, pool)), _background(builds):
                    try:
                        await schedule.run(owed)
                    finally:
                        if pool:
                            pool.save()
            job.stopped = pool.exhausted() if pool and any(True for _ in job.ledger.owed()) else None
            interrupts.connect(lambda: None)
        return schedule.stopping

    async def _try(self, trial: PlannedTrial, services: TrialServices) -> Outcome:
        directory, progress = self.job.trial_path(trial), self.progress
        on_phase, on_detail = partial(progress.phase, trial.name), partial(progress.detail, trial.name)

        async def go(spec: TrialSpec) -> TrialResult:
            return await run_trial(spec, services, on_phase, on_detail)

        try:
            spec = self.specs.spec(trial, directory)
            result = await (self.hook.run(trial, spec, go) if self.hook else go(spec))
        except Exception as error:
            # An error becomes the outcome of its trial and does not affect others, except for a full disk.
            if is_full(error):
                raise
            return outcome_of_error(error, self.specs.redactor)
        return outcome_of(result, directory)


@asynccontextmanager
async def _services(job: OpenJob, env: Mapping[str, str], pool: JobMeter | None) -> AsyncIterator[TrialServices]:
    """Open the services that all trials share."""
    check_models(job.config, env)
    environment, label, builds = job.config.environment, f"job {job.directory.name}", job.config.n_concurrent_builds
    async with AsyncExitStack() as stack:
        opened = open_services(environment.backend, label=label, options=environment.kwargs, builds=builds)
        services = await stack.enter_async_context(opened)
        gateway = None
        if _models(job.config):
            from pier.gateway import Directory, Gateway
            from pier.gateway.budget import Retry

            settings = job.config.provider_retry
            retry = Retry(attempts=settings.max_attempts, patience=settings.max_wait_sec)
            gateway = await stack.enter_async_context(Gateway(providers=Directory.load(env), retry=retry))
        yield replace(services, gateway=gateway, pool=pool, environ=env)


def _models(config: JobConfig) -> list[AgentConfig]:
    if config.regrade_of is not None:
        return []
    return [agent for agent in config.agents if agent.model_name and not agent.direct]


def check_models(config: JobConfig, env: Mapping[str, str]) -> None:
    """Raise `UsageError` if a model has no provider, no key, or no price for a budget in money."""
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
        answerer = gateway.answerer(model, Terms(model=model, budget=own, shared=shared), upstream)
        login = answerer.target.provider.login if isinstance(answerer, ByProvider) else None
        if login and find_agent(agent.label).name != login.client:
            raise UsageError(
                f"cannot run {agent.name} with the login of {login.title}: it is valid for {login.title} only",
                hint=f"export {login.key_name}=..., or choose -a {login.client}",
                code="login-client",
            )


@asynccontextmanager
async def _background(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run `work` while the context lasts."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _keep_files(job: OpenJob, schedule: Schedule, pool: JobMeter | None) -> None:
    """Update `result.json` and sync the journal periodically, using at most 1% of the time."""
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
    """Build the images of upcoming tasks, so that builds and running trials have separate limits."""

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
class TrialSelection:
    """A filter for finished trials: by kind (`infra`, `errored`, `failed`), type of error, and name."""

    kind: str | None = None
    types: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()

    def matches(self, name: str, outcome: Outcome) -> bool:
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


def void(job: OpenJob, selection: TrialSelection) -> int:
    """Void the finished trials that match, so that they run again, and return their number."""
    unknown = selection.names - {trial.name for trial in job.ledger.plan.trials}
    if unknown:
        name, hint = sorted(unknown)[0], f"pier job show {job.directory} --trials"
        raise UsageError(f"{job.directory} has no trial {name}", hint=hint)
    count = 0
    for trial in job.ledger.plan.trials:
        outcome = job.ledger.outcomes.get(trial.id)
        if outcome is not None and selection.matches(trial.name, outcome):
            job.ledger.again(trial.id, "asked", job.set_aside(trial, job.ledger.tries.get(trial.id, 1)))
            count += 1
    return count
