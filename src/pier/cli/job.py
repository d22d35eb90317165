"""`pier job`: inspect, compare, follow, stop, resume, retry, regrade and remove jobs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from pier.cli.main import JSON, echo
from pier.cli.options import COUNT, PATH, combine
from pier.cli.run import JOBS_DIR, HarborCommand, JobPath, LimitsCommand, given_settings, run
from pier.errors import UsageError

_JOB_PATH = "pier.job_path"


def _job(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path:
    if (found := value or ctx.meta.get(_JOB_PATH)) is None:
        raise click.UsageError("Missing argument 'JOB'.")
    return found


JOBS = click.argument("directories", metavar="JOB...", type=JobPath(), nargs=-1, required=True)
JOB = click.argument("directory", metavar="JOB", type=JobPath(), required=False, callback=_job)
JOB_PATH = click.option(
    "-p",
    "--job-path",
    type=JobPath(),
    hidden=True,
    expose_value=False,
    callback=lambda ctx, param, value: ctx.meta.__setitem__(_JOB_PATH, value),
)
"""Harbor's spelling of the argument. Click processes options before arguments, and eager options (`JOBS_DIR`) first."""


_again = combine(
    *(JOB, JOB_PATH, JOBS_DIR),
    click.option("-n", "--n-concurrent", type=COUNT, help="Number of concurrent trials."),
    click.option("--env-file", type=click.Path(dir_okay=False), help="A file of NAME=value lines."),
    click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors."),
    JSON,
)
"""The parameters of a command that runs trials of a job again."""


@click.group(name="job")
def job() -> None:
    """Inspect, compare, stop, resume, retry, regrade and remove jobs. JOB is a directory, or a name in --jobs-dir."""


job.command_class = HarborCommand
job.add_command(run, "start")


@job.command(name="list")
@click.argument("jobs_dir", type=PATH, default=Path("jobs"))
@JSON
def list_(jobs_dir: Path, as_json: bool) -> None:
    """List the jobs in JOBS_DIR, newest first. Includes jobs of Harbor and datacurve pier."""
    from pier.job.report import print_jobs
    from pier.job.view import list_jobs

    print_jobs(list_jobs(jobs_dir), jobs_dir, as_json=as_json)


@job.command()
@JOB
@JOB_PATH
@JOBS_DIR
@click.option("--trials", is_flag=True, help="List every trial.")
@JSON
def show(directory: Path, trials: bool, as_json: bool) -> None:
    """Show the state and results of a job."""
    from pier.job.report import print_job
    from pier.job.view import JobView

    print_job(JobView.open(directory), trials=trials, as_json=as_json)


@job.command()
@JOBS
@JOBS_DIR
@JSON
def compare(directories: tuple[Path, ...], as_json: bool) -> None:
    """Compare jobs, or the agents of one job, in total and per task. The first one is the baseline."""
    from pier.job.report import print_comparison
    from pier.job.view import JobView

    print_comparison([JobView.open(directory) for directory in directories], as_json=as_json)


@job.command()
@click.argument("directory", metavar="JOB", type=JobPath())
@click.argument("trial", required=False)
@JOBS_DIR
@click.option("-f", "--follow", is_flag=True, help="Print new lines until the job, or the trial, has ended.")
@click.option("--json", "as_json", is_flag=True, help="Print each line as a JSON object.")
def logs(directory: Path, trial: str | None, follow: bool, as_json: bool) -> None:
    """Print the log of a job, or of one of its trials."""
    from pier.job.report import print_log
    from pier.job.view import TRIAL_LOG, JobView

    if (directory / TRIAL_LOG).is_file():
        hint = f"pier job logs {directory.parent} {directory.name}"
        raise UsageError(f"{directory} is a trial, not a job", hint=hint)
    print_log(JobView.open(directory), trial, follow=follow, as_json=as_json)


@job.command()
@JOBS
@JOBS_DIR
@JSON
def stop(directories: tuple[Path, ...], as_json: bool) -> None:
    """Stop running jobs. No new trials start, running ones are cancelled and cleaned up.

    Waits until the jobs have stopped. Stopping a job again limits its clean-up to five seconds.
    """
    from pier.job.ledger import stop_owner
    from pier.job.view import JobView

    views = [JobView.open(directory) for directory in directories]
    for view in views:
        if view.owner is not None:
            stop_owner(view.directory, view.owner)
    for view in views:
        _wait_for_end(view.directory)
    rows = [{"directory": str(view.directory), "was_running": view.owner is not None} for view in views]
    resume = "{0}: stopped; continue with: pier job resume {0}"
    lines = ((resume if view.owner else "{0}: not running").format(view.directory) for view in views)
    echo(rows, as_json, lines)


@job.command()
@JOBS
@JOBS_DIR
@click.option("--stop", "first_stop", is_flag=True, help="Stop running jobs first, instead of failing.")
@JSON
def rm(directories: tuple[Path, ...], first_stop: bool, as_json: bool) -> None:
    """Remove jobs with all their trials."""
    from pier.job.directory import remove_job
    from pier.job.ledger import current_owner, stop_owner, taken

    for directory in directories:
        if owner := current_owner(directory):
            if not first_stop:
                raise taken(directory, owner)
            stop_owner(directory, owner)
            _wait_for_end(directory)
        remove_job(directory)
    names = [str(directory) for directory in directories]
    echo({"removed": names}, as_json, (f"removed {name}" for name in names))


@job.command(cls=LimitsCommand)
@click.option("--filter-error-type", "error_types", multiple=True, help="Also retry trials with these errors.")
@_again
def resume(directory: Path, error_types: tuple[str, ...], **flags: Any) -> None:
    """Run the unfinished trials of a job."""
    from pier.job.command import again_and_report
    from pier.job.runner import TrialSelection

    selection = TrialSelection(types=frozenset(error_types)) if error_types else None
    _exit(again_and_report(directory, selection, *_run_options(flags), _limits(flags)))


@job.command(cls=LimitsCommand)
@click.option(
    "--only",
    type=click.Choice(["infra", "errored", "failed"]),
    help="infra: no verdict because of pier or the provider. errored: any error. failed: a reward below 1.",
)
@click.option("--trial", "names", multiple=True, metavar="NAME", help="Only this trial.")
@_again
def retry(directory: Path, only: str | None, names: tuple[str, ...], **flags: Any) -> None:
    """Run finished trials again. Their previous directories are kept in `.retries`."""
    from pier.job.command import again_and_report
    from pier.job.runner import TrialSelection

    if only is None and not names:
        raise click.UsageError("missing --only infra, --only errored, --only failed or --trial NAME")
    selection = TrialSelection(kind=only, names=frozenset(names))
    _exit(again_and_report(directory, selection, *_run_options(flags), _limits(flags)))


@job.command()
@click.option("--job-name", "name", help="Name of the new job.  [default: JOB-regrade]")
@_again
def regrade(directory: Path, name: str | None, **flags: Any) -> None:
    """Run the verifier again on kept states, as a new job.

    The old job must have been run with --keep-state; it is not changed. Tasks are loaded in their present form.
    """
    from pier.job.command import regrade_and_report

    _exit(regrade_and_report(directory, name, *_run_options(flags)))


def _wait_for_end(directory: Path) -> None:
    from pier.job.ledger import current_owner

    while current_owner(directory):
        time.sleep(0.05)


def _run_options(flags: dict[str, Any]) -> tuple[dict[str, str], Any, int | None]:
    from pier.job.load import environ_with

    show = "json" if flags["as_json"] else "quiet" if flags["quiet"] else "full"
    return environ_with(flags["env_file"]), show, flags["n_concurrent"]


def _limits(flags: dict[str, Any]) -> dict[str, Any]:
    from pier.job.load import read_job

    return read_job((), given_settings(flags)).budget.model_dump(exclude_none=True)


def _exit(code: int) -> None:
    raise click.exceptions.Exit(code)
