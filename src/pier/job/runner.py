"""Runs an open job: lends trials what they share, keeps the files up to date, and ends in good order when asked to."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from pier.errors import PierError
from pier.job.budget import JobBudget
from pier.job.directory import Job
from pier.job.files import explained, is_full
from pier.job.interrupts import Interrupts
from pier.job.layout import LOG, write_result
from pier.job.ledger import Outcome, now
from pier.job.log import JobLog
from pier.job.numbers import JobNumbers
from pier.job.outcome import outcome_of, outcome_of_error
from pier.job.plan import PlannedTrial
from pier.job.progress import Progress
from pier.job.schedule import Schedule, Watcher
from pier.job.specs import Specs
from pier.job.templates import fill
from pier.lease import Lease, sweep
from pier.sandbox import open_backend
from pier.trial.images import open_images
from pier.trial.run import run_trial
from pier.trial.spec import TrialServices


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


async def run_job(job: Job, env: Mapping[str, str], progress: Progress, interrupts: Interrupts) -> bool:
    """Run all that is owed. Says whether the user interrupted it. Whatever ends it, the files tell where it stands."""
    specs = Specs(job.config, job.ledger.plan, job.ledger.id, env)
    log = JobLog(job.directory / LOG, specs.redactor)
    owed = [job.ledger.plan.by_id[id] for id in job.ledger.owed()]
    job.ledger.write({"e": "run", "pid": os.getpid(), "at": now(), "owed": len(owed)})
    log.say(f"process {os.getpid()} runs {len(owed)} of {len(job.ledger.plan.trials)} trials")
    try:
        with explained(job.directory):
            interrupted = bool(owed) and await _run_owed(job, owed, specs, log, progress, env, interrupts)
            if not interrupted and not job.stopped and job.ledger.finished_at is None:
                job.ledger.finish()
            log.say("interrupted" if interrupted else f"stopped: {job.stopped}" if job.stopped else "done")
        return interrupted
    finally:
        log.close()
        with contextlib.suppress(OSError):
            write_result(job.ledger, job.config, durable=True)
            job.ledger.sync()


async def _run_owed(
    job: Job,
    owed: list[PlannedTrial],
    specs: Specs,
    log: JobLog,
    progress: Progress,
    env: Mapping[str, str],
    interrupts: Interrupts,
) -> bool:
    budget = JobBudget(job.config.budget, job.ledger)
    async with _services(job, env, budget) as services:

        async def run_try(trial: PlannedTrial, number: int) -> Outcome:
            directory = job.trial_path(trial)
            try:
                spec = specs.spec(trial, directory)
                result = await run_trial(
                    spec,
                    services,
                    lambda phase: progress.phase(trial.name, phase),
                    lambda line: progress.detail(trial.name, line),
                )
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
            watcher=_Watchers((progress, log)),
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
async def _services(job: Job, env: Mapping[str, str], budget: JobBudget) -> AsyncIterator[TrialServices]:
    """What all trials share: opened before the first, closed after the last."""
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
        models = {agent.model_name for agent in job.config.agents if agent.model_name and not agent.direct}
        if models and job.config.regrade_of is None:
            from pier.gateway import Directory, Gateway
            from pier.gateway.limiter import Retry

            wanted = job.config.provider_retry
            retry = Retry(attempts=wanted.max_attempts, patience=wanted.max_wait_sec)
            gateway = await stack.enter_async_context(Gateway(providers=Directory.load(env), retry=retry))
            for model in models:
                await gateway.session(fill(model, env), pool=budget.pool).close()
        yield TrialServices(backend=backend, images=images, gateway=gateway, pool=budget.pool, environ=env)


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


async def _keep_up(job: Job, schedule: Schedule, budget: JobBudget, numbers: JobNumbers) -> None:
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
                if (wish := specs.build_wish(task)) is not None:
                    await services.images.get(wish)

    places = iter(dict.fromkeys(trial.task for trial in owed))
    async with asyncio.TaskGroup() as group:
        for _ in range(specs.builds):
            group.create_task(build())
