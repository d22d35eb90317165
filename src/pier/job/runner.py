"""Runs an open job: opens what its trials share, keeps the files up to date, and stops in good order when asked to.

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
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from pier.agent.registry import find_agent
from pier.errors import PierError, UsageError
from pier.job.config import AgentConfig, BudgetConfig, JobConfig
from pier.job.directory import OpenJob, explained, is_full, write_result
from pier.job.ledger import Ledger, Used, now
from pier.job.load import fill
from pier.job.outcome import Outcome, outcome_of, outcome_of_error
from pier.job.plan import PlannedTrial
from pier.job.progress import JobLog, Progress
from pier.job.results import JobNumbers
from pier.job.schedule import Schedule, Watcher
from pier.job.specs import Specs
from pier.job.view import LOG
from pier.lease import Lease, sweep
from pier.sandbox import open_backend
from pier.trial.images import open_images
from pier.trial.result import TrialResult
from pier.trial.run import run_trial
from pier.trial.spec import TrialServices, TrialSpec

if TYPE_CHECKING:
    from pier.job.meter import JobMeter


class JobBudget:
    """The budget of a job that runs. Without any limit it has no `pool`, and costs nothing."""

    def __init__(self, limits: BudgetConfig, ledger: Ledger) -> None:
        self._ledger = ledger
        self.pool = _pool(limits, ledger.used, self.save)

    def used_up(self) -> str | None:
        """A description of the limit that is reached; None while trials may begin."""
        return self.pool.exhausted() if self.pool else None

    def save(self) -> None:
        """Write down what was used, if that has changed."""
        if self.pool is not None and (used := self.pool.used) != self._ledger.used:
            self._ledger.note_used(used)


def _pool(limits: BudgetConfig, used: Used, changed: Callable[[], None]) -> JobMeter | None:
    asked = limits.model_dump(exclude_none=True)
    if not asked:
        return None
    from pier.gateway.budget import Budget
    from pier.job.meter import JobMeter

    return JobMeter(Budget(**asked), used, changed)


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
            self._loop.call_soon_threadsafe(self._act)

    def _act(self) -> None:
        self._stop()
        if self.count > 1 and self._loop is not None:
            self._loop.call_later(HURRY_SECONDS, os._exit, EXIT_CODE)


@dataclass(frozen=True, slots=True)
class _Watchers:
    """Several watchers as one."""

    all: Sequence[Watcher]

    def started(self, trial: PlannedTrial, number: int) -> None:
        for watcher in self.all:
            watcher.started(trial, number)

    def ended(self, trial: PlannedTrial, outcome: Outcome) -> None:
        for watcher in self.all:
            watcher.ended(trial, outcome)

    def retrying(self, trial: PlannedTrial, outcome: Outcome, wait: float) -> None:
        for watcher in self.all:
            watcher.retrying(trial, outcome, wait)


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
    budget = JobBudget(job.config.budget, job.ledger)
    async with _services(job, env, budget) as services:

        async def run_try(trial: PlannedTrial, number: int) -> Outcome:
            directory = job.trial_path(trial)

            async def go(spec: TrialSpec) -> TrialResult:
                return await run_trial(
                    spec,
                    services,
                    lambda phase: progress.phase(trial.name, phase),
                    lambda line: progress.detail(trial.name, line),
                )

            try:
                spec = specs.spec(trial, directory)
                result = await (hook.run(trial, spec, go) if hook else go(spec))
            except Exception as error:
                # A trial's outcome is captured here: whatever broke it may not end its siblings, save a full disk.
                if is_full(error):
                    raise
                return outcome_of_error(error, specs.redactor)
            return outcome_of(result, directory)

        schedule = Schedule(
            job.ledger,
            run_try,
            job.set_aside,
            limit=job.config.n_concurrent_trials,
            retry=job.config.retry,
            watcher=_Watchers((progress, log, hook) if hook else (progress, log)),
            may_begin=lambda: budget.used_up() is None,
        )

        def stop() -> None:
            progress.stop_noticed()
            schedule.stop()

        interrupts.connect(stop)
        metrics = services.gateway.metrics if services.gateway else None
        numbers = JobNumbers(job.directory, metrics)
        async with AsyncExitStack() as beside:
            beside.enter_context(progress.show())
            if metrics:
                await beside.enter_async_context(_beside(metrics.sample_lag()))
            await beside.enter_async_context(_beside(_keep_up(job, schedule, budget, numbers)))
            await beside.enter_async_context(_beside(_build_ahead(specs, owed, services)))
            try:
                await schedule.run(owed)
            finally:
                budget.save()
                numbers.save()
        job.stopped = budget.used_up() if any(True for _ in job.ledger.owed()) else None
        interrupts.connect(lambda: None)
    return schedule.stopping


@asynccontextmanager
async def _services(job: OpenJob, env: Mapping[str, str], budget: JobBudget) -> AsyncIterator[TrialServices]:
    """What all trials share: opened before the first, closed after the last."""
    check_models(job.config, env)
    async with AsyncExitStack() as stack:
        environment = job.config.environment
        lease = stack.enter_context(Lease(label=f"job {job.directory.name}"))
        backend = await stack.enter_async_context(open_backend(environment.backend, lease, environment.kwargs))
        await (
            backend.capabilities()
        )  # a backend that cannot be reached at all fails the run, and not each of its trials
        await sweep(dict.fromkeys(backend.kinds, backend.destroy))
        images = open_images(backend, builds=job.config.n_concurrent_builds)
        stack.push_async_callback(images.close)
        gateway = None
        if _models(job.config):
            from pier.gateway import Directory, Gateway
            from pier.gateway.budget import Retry

            wanted = job.config.provider_retry
            retry = Retry(attempts=wanted.max_attempts, patience=wanted.max_wait_sec)
            gateway = await stack.enter_async_context(Gateway(providers=Directory.load(env), retry=retry))
        yield TrialServices(backend=backend, images=images, gateway=gateway, pool=budget.pool, environ=env)


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
                f"cannot run {agent.name} with the login of {login.title}: it serves {login.title} alone",
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


async def _keep_up(job: OpenJob, schedule: Schedule, budget: JobBudget, numbers: JobNumbers) -> None:
    """Keep `result.json` fresh and the journal on disk, seldom enough that it costs next to nothing."""
    pause = 1.0
    while True:
        await asyncio.sleep(pause)
        began = time.monotonic()
        numbers.save()
        write_result(job.ledger, job.config, schedule.running)
        budget.save()
        pause = max(1.0, 30 * (time.monotonic() - began))
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
