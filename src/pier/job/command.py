"""Runs a job from the command line or a program: progress, the final report, and the exit code."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import click

from pier.job.config import JobConfig
from pier.job.directory import OpenJob, open_existing, open_for, open_regrade, read_config, result_of
from pier.job.ledger import Ledger, size_of
from pier.job.plan import Plan, plan_job
from pier.job.progress import LiveProgress, PlainProgress, Progress, print_faults, print_report
from pier.job.runner import Interrupts, TrialHook, TrialSelection, check_models, void
from pier.job.view import JobView

_WARNINGS = 10


Show = Literal["full", "quiet", "json"]
"""Output of a run: progress and a report, errors only, or JSON at the end and errors."""


def run_and_report(
    config: JobConfig, env: Mapping[str, str], show: Show, *, yes: bool = False, hook: TrialHook | None = None
) -> int:
    """Run or continue the job for `config` and return the exit code."""
    warnings: list[str] = []
    with open_for(config, env, yes=yes, check=partial(_check, config, env), warn=warnings.append) as job:
        if show == "full":
            _print_warnings(warnings)
        return _run(job, env, show, hook)


def run_without_report(
    config: JobConfig, env: Mapping[str, str], show: Show, *, again: TrialSelection | None = None
) -> int:
    """Do the same without a report, for callers with their own. Finished trials that match `again` are run again."""
    with open_for(config, env, check=partial(_check, config, env)) as job:
        if again is not None:
            void(job, again)
        interrupted = _run_owed(job, env, _progress(job, show), None)
        if show == "full" and (interrupted or job.stopped):
            click.echo(f"{job.stopped or 'interrupted'}; run the same command to continue", err=True)
        return exit_code(job.ledger, graded=not config.verifier.disable, interrupted=interrupted)


def _print_warnings(warnings: list[str]) -> None:
    for text in warnings[:_WARNINGS]:
        click.echo(f"warning: {text}", err=True)
    if len(warnings) > _WARNINGS:
        click.echo(f"warning: {len(warnings) - _WARNINGS} more; see `pier task check`", err=True)


def _check(config: JobConfig, env: Mapping[str, str], plan: Plan) -> None:
    """Raise `UsageError` for settings and tasks that cannot be run, before anything is created."""
    from pier.job.specs import Specs

    specs = Specs(config, plan, "", env)
    check_models(config, env)
    if not config.review:  # the sandboxes of a review are not those that its tasks name
        specs.check_tasks()


def again_and_report(
    directory: Path,
    selection: TrialSelection | None,
    env: Mapping[str, str],
    show: Show,
    n_concurrent: int | None = None,
    budget: Mapping[str, Any] = MappingProxyType({}),
) -> int:
    """Continue the job in `directory`, and run finished trials that match `selection` again. The limits in `budget`
    replace those of the job."""
    with open_existing(directory) as job:
        job.config.budget = job.config.budget.model_copy(update=dict(budget))
        if n_concurrent is not None:
            job.config.n_concurrent_trials = n_concurrent
        if selection is not None and void(job, selection) == 0 and show == "full":
            click.echo("no finished trial matches", err=True)
        return _run(job, env, show)


def regrade_and_report(
    directory: Path, name: str | None, env: Mapping[str, str], show: Show, n_concurrent: int | None = None
) -> int:
    """Regrade the kept states of the job in `directory`, as the job `name` next to it."""
    config, _ = read_config(directory)
    source = directory.resolve()
    config.regrade_of = str(source)
    config.job_name = name or f"{source.name}-regrade"
    config.jobs_dir = str(directory.parent)
    config.keep_state, config.environment.delete = False, True
    if n_concurrent is not None:
        config.n_concurrent_trials = n_concurrent
    with open_regrade(source, config, env) as job:
        if job.left_out and show == "full":
            click.echo(f"skipping {job.left_out} finished trials that kept no state", err=True)
        return _run(job, env, show)


def _run(job: OpenJob, env: Mapping[str, str], show: Show, hook: TrialHook | None = None) -> int:
    progress = _progress(job, show)
    if show == "full" and job.continued:
        done, total = progress.done, len(job.ledger.plan.trials)
        click.echo(f"continuing {job.directory}: {done} of {total} trials are done", err=True)
    interrupted = _run_owed(job, env, progress, hook)
    view = JobView.of(job.ledger)
    if show == "full":
        print_report(view, seconds=progress.seconds, interrupted=interrupted, stopped=job.stopped)
    else:
        if show == "json":
            result = result_of(view, [metric.type for metric in job.config.metrics])
            click.echo(json.dumps({**result, "directory": str(job.directory)}))
        print_faults(view, to_stderr=True, ungraded=True)
    return exit_code(job.ledger, graded=not job.config.verifier.disable, interrupted=interrupted)


async def run_quietly(
    config: JobConfig, env: Mapping[str, str], *, yes: bool = False, hook: TrialHook | None = None
) -> Path:
    """Run or continue the job for `config` in the caller's event loop and return its directory. Prints nothing and
    handles no signals; cancelling the call shuts its trials down cleanly."""
    from pier.job.runner import run_job

    with ExitStack() as stack:
        opened = open_for(config, env, yes=yes, check=partial(_check, config, env))
        opening = asyncio.ensure_future(asyncio.to_thread(stack.enter_context, opened))
        try:
            job = await asyncio.shield(opening)
        except asyncio.CancelledError:
            await asyncio.wait([opening])  # the stack must not close before the job has opened
            raise
        await run_job(job, env, _progress(job, "quiet"), Interrupts(), hook)
        return job.directory


def _run_owed(job: OpenJob, env: Mapping[str, str], progress: Progress, hook: TrialHook | None = None) -> bool:
    """Run the unfinished trials and return whether the run was interrupted."""
    if progress.done == progress.total and job.ledger.finished_at and size_of(job.directory):
        if hook:
            hook.opened(job, env)
        return False
    from pier.job.runner import run_job

    gc.freeze()  # exclude the loaded modules from garbage collection
    with Interrupts() as interrupts:
        return asyncio.run(run_job(job, env, progress, interrupts, hook))


def _progress(job: OpenJob, show: Show) -> Progress:
    total, outcomes = len(job.ledger.plan.trials), job.ledger.outcomes
    finished = [outcomes[id] for id in job.ledger.plan.by_id if id in outcomes]
    if show != "full":
        return Progress(total, finished)
    if sys.stderr.isatty():
        from rich.console import Console

        return LiveProgress(total, Console(file=sys.__stderr__), finished)
    return PlainProgress(total, finished)


def print_plan(config: JobConfig, env: Mapping[str, str]) -> None:
    """Print the plan without running it."""
    warnings: list[str] = []
    plan = plan_job(config, env, yes=True, warn=warnings.append)[0](b"")
    _check(config, env, plan)
    _print_warnings(warnings)
    for task in plan.tasks:
        click.echo(f"{task.name}  {task.digest}  {task.path}")
    click.echo(
        f"{len(plan.trials)} trials: {len(plan.tasks)} tasks, {len(plan.agents)} agents, {config.n_attempts} attempts"
    )


def exit_code(ledger: Ledger, *, graded: bool = True, interrupted: bool = False) -> int:
    """Return 0 if every trial has a verdict (without grading: no error), else 1, or 130 if interrupted."""
    if interrupted:
        return 130
    outcomes = (ledger.outcomes.get(trial.id) for trial in ledger.plan.trials)
    return int(any(each is None or (each.rewards is None if graded else each.fault is not None) for each in outcomes))
