"""The options of a job's settings, made from its model, jobs given by name, and help that shows options in groups."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    from pier.job.config import Setting

COMMON = "Most used"


_JOBS_DIR = "pier.jobs_dir"


class JobPath(click.Path):
    """The directory of a job or trial: a path or, if there is no such path, one in `--jobs-dir` (see `JOBS_DIR`)."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(value)
        named = (ctx.meta[_JOBS_DIR] if ctx else Path("jobs")) / path
        return named if not path.exists() and ".." not in path.parts and named.exists() else path


def _keep_jobs_dir(ctx: click.Context, param: click.Parameter, value: Path) -> None:
    ctx.meta[_JOBS_DIR] = value


JOBS_DIR = click.option(
    "-o",
    "--jobs-dir",
    type=click.Path(path_type=Path),
    default=Path("jobs"),
    show_default=True,
    is_eager=True,
    expose_value=False,
    callback=_keep_jobs_dir,
    help="Where a job that is given by its name is.",
)
"""Eager, so that `JobPath` knows it."""


class GroupedOption(click.Option):
    """An option that help shows in `group`, in the order of `rank`."""

    def __init__(self, *args: Any, group: str, rank: int = 0, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.group, self.rank = group, rank


class SettingOption(GroupedOption):
    """The flag of one setting of a job. Not given, it is None or empty."""

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
    """A value as the setting's model takes it."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self.name = (setting.flag and setting.flag.metavar) or "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from typing import Annotated

        from pydantic import ConfigDict, TypeAdapter, ValidationError

        from pier.errors import UsageError
        from pier.job.config import expected

        setting = self._setting
        if setting.flag is None or setting.flag.form != "value" or setting.flag.entry or _repeats(setting):
            return value
        kind: Any = Annotated[setting.field.annotation, *setting.field.metadata]  # type: ignore[valid-type]
        try:
            return TypeAdapter(kind, config=ConfigDict(allow_inf_nan=False)).validate_python(value)
        except ValidationError:
            raise UsageError(
                f"invalid value {value!r} for {setting.names[-1]}: expected {expected(setting.field)}",
                hint=f"{ctx.command_path if ctx else 'pier run'} --help",
            ) from None

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(word) for word in _choices(self._setting) if word.startswith(incomplete)] or [
            CompletionItem(incomplete, type="dir" if self.name == "DIRECTORY" else "file")
        ]


def _choices(setting: Setting) -> list[str]:
    from typing import Literal, get_args, get_origin

    match setting.key:
        case "agents.name":
            from pier.agent.registry import AGENTS

            return list(AGENTS)
        case "environment.type":
            from pier.sandbox import BACKENDS

            return list(BACKENDS)
    kinds = (setting.field.annotation, *get_args(setting.field.annotation))
    return [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]


def _repeats(setting: Setting) -> bool:
    """Whether the flag may be given several times: lists, tables, and whatever is one of several tables of a job."""
    assert setting.flag is not None
    if setting.flag.form != "value":
        return setting.flag.form != "json"
    several = setting.key in ("agents.model_name", "datasets.path", "datasets.name", "tasks.path")
    return several or "list[" in str(setting.field.annotation)


def destination(setting: Setting) -> str:
    """The name of the parameter, from the longest name of the flag: `--n-attempts` is `n_attempts`."""
    name = max((name.partition("/")[0] for name in setting.names), key=len)
    return name.lstrip("-").replace("-", "_")


def _with_default(setting: Setting) -> str:
    default = setting.field.default
    if isinstance(default, bool) or not isinstance(default, int | float | str):
        return setting.help
    return f"{setting.help}  [default: {default if isinstance(default, str) else format(default, 'g')}]"


@cache
def setting_options() -> tuple[SettingOption, ...]:
    """An option for each flag of the model."""
    from pier.job.config import settings

    return tuple(SettingOption(setting) for setting in settings() if setting.flag is not None)


class GroupedCommand(click.Command):
    """A command whose help shows options in groups; flags of Harbor that pier does not support are refused by name."""

    groups: tuple[str, ...] = ()

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            from pier.job.load import unsupported

            if refused := unsupported(error.option_name):
                raise refused from None
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows: dict[str, list[tuple[str, str]]] = {group: [] for group in (COMMON, *self.groups)}
        options = (param for param in self.get_params(ctx) if isinstance(param, click.Option))
        for param in sorted(options, key=lambda option: getattr(option, "rank", 0)):
            if (row := param.get_help_record(ctx)) is not None:
                rows.setdefault(getattr(param, "group", "Other"), []).append(row)
        for group, found in rows.items():
            if found:
                with formatter.section(group):
                    formatter.write_dl(found)


class SettingsCommand(GroupedCommand):
    """A command that takes the settings of a job; the model is loaded when they are asked for."""

    settings_below = ""
    """Only settings whose key begins with this."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        made = [option for option in setting_options() if option.setting.key.startswith(self.settings_below)]
        return [*made, *super().get_params(ctx)]


class LimitsCommand(SettingsCommand):
    """A command that takes the limits of a whole job."""

    settings_below = "budget."


def given_settings(params: dict[str, Any]) -> Iterator[tuple[Setting, Any]]:
    """The settings that the command line sets."""
    for option in setting_options():
        value = params.get(option.name or "")
        if value is not None and value != ():
            yield option.setting, value
