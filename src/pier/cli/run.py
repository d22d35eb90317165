"""`pier run`: run agents on tasks and grade the results. Its flags are Harbor's, where Harbor has them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pier.cli.main import enable_debug
from pier.cli.options import COMMON, GroupedOption, SettingsCommand, given_settings

if TYPE_CHECKING:
    from pier.job.command import Show
    from pier.job.config import JobConfig

_FILE = click.Path(dir_okay=False)


class RunCommand(SettingsCommand):
    groups = (
        "Tasks",
        "Agent",
        "Model",
        "Limits for each trial",
        "Limits for the whole job",
        "Sandbox",
        "Verifier",
        "Job",
        "Retries",
        "Time limits",
        "Output",
    )


def _option(*names: str, group: str, **settings: Any) -> Any:
    return click.option(*names, cls=GroupedOption, group=group, **settings)


def _with_versions(config: JobConfig) -> JobConfig:
    """Agents of the version `latest` with the number that this is now, so that the job keeps to it."""
    agents = []
    for agent in config.agents:
        if agent.name and agent.name.endswith("@latest"):
            from pier.agent.registry import resolved

            agent = agent.model_copy(update={"name": resolved(agent.name)})
            click.echo(f"the newest version is {agent.name}", err=True)
        agents.append(agent)
    return config.model_copy(update={"agents": agents})


@click.command(name="run", cls=RunCommand)
@click.argument("tasks", nargs=-1, type=click.Path())
@_option(
    "-c", "--config", multiple=True, type=_FILE, group=COMMON, rank=9, help="A job file, YAML or JSON; repeatable."
)
@_option("--env-file", type=_FILE, group="Job", help="A file of NAME=value lines for ${NAME} templates.")
@_option("-y", "--yes", is_flag=True, group="Job", help="Let tasks have the variables of yours that they ask for.")
@_option(
    "--samples",
    type=click.Path(dir_okay=False, path_type=Path),
    group="Output",
    help="Write training samples of all trials to this file: .jsonl, or .parquet.",
)
@_option("--dry-run", is_flag=True, group="Output", help="Check everything, print the plan and stop.")
@_option("--print-config", is_flag=True, group="Output", help="Print the merged configuration and stop.")
@_option("--json", "as_json", is_flag=True, group="Output", help="Print the result as JSON, and no progress.")
@_option("--debug", is_flag=True, group="Output", help="Print tracebacks and debug messages.")
def run(tasks: tuple[str, ...], **flags: Any) -> None:
    """Run agents on TASKS and grade the results.

    TASKS are directories of tasks, single tasks, or URL#PATH of git repositories. The same command again continues a
    job that was interrupted.

    \b
    Examples:
      pier run examples/tasks
      pier run ./tasks -a claude-code -m anthropic/claude-sonnet-4-5 -n 16 -k 4
    """
    from pier.job.command import Show, print_config, print_plan, run_and_report
    from pier.job.load import read_env_file, read_job

    env = dict(os.environ)
    if flags["env_file"]:
        env.update(read_env_file(Path(flags["env_file"])))
    flags["path"] = (*tasks, *flags["path"])
    config = _with_versions(read_job(flags["config"], given_settings(flags)))
    config.debug = config.debug or flags["debug"]
    if config.debug:
        enable_debug()
    if flags["print_config"]:
        print_config(config, env)
    elif flags["dry_run"]:
        print_plan(config, env)
    else:
        show = Show("json" if flags["as_json"] else "quiet" if config.quiet else "full")
        if flags["samples"]:
            raise click.exceptions.Exit(_with_samples(config, env, show, flags["samples"], yes=flags["yes"]))
        raise click.exceptions.Exit(run_and_report(config, env, show, yes=flags["yes"]))


def _with_samples(config: JobConfig, env: dict[str, str], show: Show, path: Path, *, yes: bool) -> int:
    """Run a job and write the samples of its trials, made in memory as they run. Trials that an earlier run finished
    are in the file too; a run that is interrupted leaves those of its finished trials."""
    from pier.job.command import Show, run_and_report
    from pier.rollout.export import Report, sink_for
    from pier.rollout.rollouts import Rollout, RolloutCollector

    report = Report()
    with sink_for(path) as sink:

        def write(rollout: Rollout) -> None:
            rollout.report_to(report)
            for row in rollout.rows():
                report.written += 1
                sink.add(row)

        code = run_and_report(config, env, show, yes=yes, hook=RolloutCollector(write))
    if show is Show.FULL:
        counts = report.counts
        rate = "unknown" if counts.prefix_match_rate is None else f"{counts.prefix_match_rate:.1%}"
        share = "unknown" if counts.trainable_share is None else f"{counts.trainable_share:.1%}"
        breaks = ", ".join(f"{number} {name}" for name, number in counts.splits.items()) or "none"
        click.echo(
            f"samples: {report.written} in {path}, {report.exact} exact, {report.trainable} trainable; "
            f"prefixes matched {rate}, ids trained {share}, breaks {breaks}"
        )
    return code
