"""`pier run`, and the options that other commands share with it. Flags follow Harbor's. They are generated from the
model of a job's settings and shown in groups."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from pier.cli.main import enable_debug
from pier.cli.options import FILE, PATH
from pier.errors import PierError

if TYPE_CHECKING:
    from pier.job.command import Show
    from pier.job.config import JobConfig, Setting


COMMON = "Most used"
_JOBS_DIR = "pier.jobs_dir"


class JobPath(click.Path):
    """The directory of a job or trial: an existing path, else a name in `--jobs-dir` (see `JOBS_DIR`)."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(value)
        named = (ctx.meta if ctx else {}).get(_JOBS_DIR, Path("jobs")) / path
        return named if not path.exists() and ".." not in path.parts and named.exists() else path

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        base, _, last = incomplete.rpartition("/")
        paths = sorted(ctx.meta.get(_JOBS_DIR, Path("jobs")).joinpath(base).glob(f"{glob.escape(last)}*/"))
        names = [path.name for path in paths if not path.name.startswith(".")]
        items = [CompletionItem(f"{base}/{name}" if base else name) for name in names]
        return items or [CompletionItem(incomplete, type="dir")]


JOBS_DIR = click.option(
    "-o",
    "--jobs-dir",
    type=PATH,
    default=Path("jobs"),
    is_eager=True,
    expose_value=False,
    callback=lambda ctx, param, value: ctx.meta.__setitem__(_JOBS_DIR, value),
    help="Directory of jobs.",
)
"""Eager, so that it is processed before `JobPath` arguments."""


class GroupedOption(click.Option):
    """An option that help shows in `group`, sorted by `rank`."""

    def __init__(self, *args: Any, group: str, rank: int = 0, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.group, self.rank = group, rank


class SettingOption(GroupedOption):
    """The flag of a job setting. Without the flag, its value is None or empty."""

    def __init__(self, setting: Setting) -> None:
        assert setting.flag is not None
        self.setting, flag = setting, setting.flag
        switch = setting.field.annotation is bool
        common = flag.common and not setting.key.startswith("budget.")
        super().__init__(
            [*setting.names, destination(setting)],
            is_flag=switch,
            default=None,
            multiple=_repeats(setting),
            type=click.BOOL if switch else SettingValue(setting),
            metavar=None if switch else flag.metavar,
            hidden=flag.hidden,
            help=_with_default(setting),
            group=COMMON if common else setting.group,
            rank=flag.common if common else 0,
        )


class SettingValue(click.ParamType):
    """A value that the model of settings validates, with completion of its choices."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self.name = (setting.flag and setting.flag.metavar) or "text"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(word) for word in _choices(self._setting) if word.startswith(incomplete)] or [
            CompletionItem(incomplete, type="dir" if self.name == "DIRECTORY" else "file")
        ]


def _choices(setting: Setting) -> list[str]:
    from typing import Literal, get_args, get_origin

    match setting.key:
        case "agents.name":
            from pier.agent.contract import AGENTS

            return list(AGENTS)
        case "environment.type":
            from pier.sandbox import BACKENDS

            return list(BACKENDS)
    kinds = (setting.field.annotation, *get_args(setting.field.annotation))
    return [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]


def _repeats(setting: Setting) -> bool:
    """Whether the flag is repeatable: lists, tables, and settings of tables that a job has several of."""
    assert setting.flag is not None
    if setting.flag.form != "value":
        return setting.flag.form != "json"
    several = setting.key in ("agents.model_name", "datasets.path", "datasets.name", "tasks.path")
    return several or "list[" in str(setting.field.annotation)


def destination(setting: Setting) -> str:
    """Return the name of the parameter, from the longest name of the flag: `--n-attempts` is `n_attempts`."""
    name = max((name.partition("/")[0] for name in setting.names), key=len)
    return name.lstrip("-").replace("-", "_")


def _with_default(setting: Setting) -> str:
    default = setting.field.default
    if isinstance(default, bool) or not isinstance(default, int | float | str):
        return setting.help
    return f"{setting.help}  [default: {default if isinstance(default, str) else format(default, 'g')}]"


@cache
def setting_options() -> tuple[SettingOption, ...]:
    """Return an option for each flag of the model."""
    from pier.job.config import settings

    return tuple(SettingOption(setting) for setting in settings() if setting.flag is not None)


class HarborCommand(click.Command):
    """A command that refuses unsupported flags of Harbor by name."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if refused := self.refusal(error.option_name):
                raise refused from None
            raise

    def refusal(self, flag: str) -> PierError | None:
        """Return the error for a flag that another program has; None for an unknown one."""
        from pier.job.load import unsupported

        return unsupported(flag)


class SettingsCommand(HarborCommand):
    """A command with flags for the settings of a job. Its help shows options in groups."""

    groups: tuple[str, ...] = ()
    settings_below = ""
    """Prefix of the keys of its settings."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        options = [option for option in setting_options() if option.setting.key.startswith(self.settings_below)]
        return [*options, *super().get_params(ctx)]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows: dict[str, list[tuple[str, str]]] = {group: [] for group in (COMMON, *self.groups)}
        options = (param for param in self.get_params(ctx) if isinstance(param, click.Option))
        for param in sorted(options, key=lambda option: getattr(option, "rank", 0)):
            if (row := param.get_help_record(ctx)) is not None:
                rows.setdefault(getattr(param, "group", "Other"), []).append(row)
        for group, records in rows.items():
            if records:
                with formatter.section(group):
                    formatter.write_dl(records)


class LimitsCommand(SettingsCommand):
    """A command with flags for the limits of a whole job."""

    settings_below = "budget."


def given_settings(params: dict[str, Any]) -> Iterator[tuple[Setting, Any]]:
    """Yield the settings that the command line sets."""
    for option in setting_options():
        value = params.get(option.name or "")
        if value is not None and value != ():
            yield option.setting, value


_FILE = click.Path(dir_okay=False)


class RunCommand(SettingsCommand):
    groups = (
        *("Tasks", "Agent", "Model", "Limits for each trial", "Limits for the whole job", "Sandbox", "Verifier", "Job"),
        *("Retries", "Time limits", "Output"),
    )


def grouped_option(*names: str, group: str, **settings: Any) -> Any:
    return click.option(*names, cls=GroupedOption, group=group, **settings)


def _with_versions(config: JobConfig) -> JobConfig:
    """Replace the agent version `latest` by the current number, so that the job keeps using it."""
    agents = []
    for agent in config.agents:
        if agent.name and agent.name.endswith("@latest"):
            from pier.agent.contract import resolved

            agent = agent.model_copy(update={"name": resolved(agent.name)})
            click.echo(f"using the newest version: {agent.name}", err=True)
        agents.append(agent)
    return config.model_copy(update={"agents": agents})


@click.command(name="run", cls=RunCommand)
@click.argument("tasks", nargs=-1, type=click.Path())
@grouped_option(
    "-c", "--config", multiple=True, type=_FILE, group=COMMON, rank=9, help="A job file, YAML or JSON; repeatable."
)
@grouped_option("--env-file", type=_FILE, group="Job", help="A file of NAME=value lines for ${NAME} templates.")
@grouped_option(
    "-y", "--yes", is_flag=True, group="Job", help="Give tasks the environment variables that they request."
)
@grouped_option(
    "--samples",
    type=FILE,
    group="Output",
    help="Write training samples of all trials to this file: .jsonl, or .parquet.",
)
@grouped_option("--dry-run", is_flag=True, group="Output", help="Check everything, print the plan and stop.")
@grouped_option("--print-config", is_flag=True, group="Output", help="Print the merged configuration and stop.")
@grouped_option("--json", "as_json", is_flag=True, group="Output", help="Print the result as JSON, and no progress.")
@grouped_option("--debug", is_flag=True, group="Output", help="Print tracebacks and debug messages.")
def run(tasks: tuple[str, ...], **flags: Any) -> None:
    """Run agents on TASKS and grade the results.

    TASKS are directories of tasks, single tasks, or URL#PATH of git repositories. Repeat the command to continue an
    interrupted job.

    \b
    Examples:
      pier run examples/tasks
      pier run ./tasks -a claude-code -m anthropic/claude-sonnet-4-5 -n 16 -k 4
    """
    from pier.job.command import print_plan, run_and_report
    from pier.job.load import environ_with, read_job, to_disk

    env = environ_with(flags["env_file"])
    flags["path"] = (*tasks, *flags["path"])
    config = _with_versions(read_job(flags["config"], given_settings(flags)))
    config.debug = config.debug or flags["debug"]
    if config.debug:
        enable_debug()
    if flags["print_config"]:
        click.echo(json.dumps(to_disk(config, env), indent=2))
    elif flags["dry_run"]:
        print_plan(config, env)
    else:
        show = "json" if flags["as_json"] else "quiet" if config.quiet else "full"
        if flags["samples"]:
            raise click.exceptions.Exit(_with_samples(config, env, show, flags["samples"], yes=flags["yes"]))
        raise click.exceptions.Exit(run_and_report(config, env, show, yes=flags["yes"]))


def _with_samples(config: JobConfig, env: dict[str, str], show: Show, path: Path, *, yes: bool) -> int:
    """Run a job and write the samples of its trials while they run. The file includes trials of earlier runs; after an
    interrupt it contains the finished trials."""
    from pier.job.command import run_and_report
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
    if show == "full":
        counts = report.counts
        rate = "unknown" if counts.prefix_match_rate is None else f"{counts.prefix_match_rate:.1%}"
        share = "unknown" if counts.trainable_share is None else f"{counts.trainable_share:.1%}"
        breaks = ", ".join(f"{number} {name}" for name, number in counts.splits.items()) or "none"
        click.echo(
            f"samples: {report.written} in {path}, {report.exact} exact, {report.trainable} trainable; "
            f"prefixes matched {rate}, ids trained {share}, breaks {breaks}"
        )
    return code
