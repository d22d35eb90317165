"""The `pier` command: loads only the module of the requested command, and maps errors to messages and exit codes.

Exit codes: 0 success, 1 failure, 2 invalid usage, configuration or task, 130 interrupted.
"""

from __future__ import annotations

import importlib
import io
import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click

from pier import __version__
from pier.errors import PierError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

SECTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "Evaluate": {
        "run": ("pier.cli.run:run", "Run agents on tasks and grade the results."),
        "job": ("pier.cli.job:job", "Inspect, resume, retry and regrade jobs."),
        "trial": ("pier.cli.trial:trial", "Inspect single trials."),
        "task": ("pier.cli.task:task", "Create, check and list tasks."),
    },
    "Read and review": {
        "view": ("pier.cli.view:view", "View jobs, trials and trajectories in a browser."),
        "critique": ("pier.cli.review:critique", "Review finished trials with a fresh agent."),
        "analyze": ("pier.cli.review:analyze", "Find out why trials failed."),
        "summarize": ("pier.cli.review:summarize", "Summarize the failures of a workspace or job."),
        "check": ("pier.cli.review:check", "Check the quality of tasks."),
    },
    "Workspaces": {
        "start": ("pier.cli.workspace:start", "Start a workspace: a live sandbox around a directory."),
        "exec": ("pier.cli.workspace:exec_", "Run a command or an agent in a workspace."),
        "verify": ("pier.cli.workspace:verify", "Grade the current state of a workspace."),
        "diff": ("pier.cli.workspace:diff", "Show the changes in a workspace since its start."),
        "fork": ("pier.cli.workspace:fork", "Create a second workspace from the current state."),
        "stop": ("pier.cli.workspace:stop", "Stop a workspace; its files stay."),
        "list": ("pier.cli.workspace:list_", "List workspaces."),
        "capture": ("pier.cli.traces:capture", "Save the trajectory of an agent session, here or in a workspace."),
        "traces": ("pier.cli.traces:traces", "List, show and export captured sessions."),
        "skills": ("pier.cli.workspace:skills", "Register a task's skills with the agents in use."),
        "login": ("pier.cli.login:login", "Show the logins that pier can use instead of API keys."),
    },
    "Train and record": {
        "rollout": ("pier.cli.rollout:rollout", "Roll out environments for evaluation and training."),
        "gateway": ("pier.cli.gateway:gateway", "Intercept, record and replay model calls."),
        "samples": ("pier.cli.samples:samples", "Export and check training samples."),
        "trajectory": ("pier.cli.trajectory:trajectory", "Convert, validate and show trajectories."),
    },
    "This machine": {
        "agent": ("pier.cli.agent:agent", "Build and inspect agent packs."),
        "sandbox": ("pier.cli.sandbox:sandbox", "Run commands in sandboxes."),
        "image": ("pier.cli.image:image", "Import, pull, build and remove images."),
        "doctor": ("pier.cli.doctor:doctor", "Check this machine and suggest fixes."),
        "gc": ("pier.cli.gc:gc", "Remove leftovers of dead runs, and unused images."),
        "completion": ("pier.cli.main:completion", "Print shell completion for bash, zsh or fish."),
    },
}
"""The commands by section of the help: location (`module:attribute`) and help line, so that `pier --help` imports no
command."""
COMMANDS = {name: row for section in SECTIONS.values() for name, row in section.items()}

FIRST_STEPS = """\
pier runs coding agents in sandboxes, records everything they do, and grades the result.

Start here:
  pier doctor                         check this machine
  pier task init hello                create a task
  pier run hello --image host         run its reference solution with this machine's software, and grade it
  pier run hello -a AGENT -m MODEL    run an agent, e.g. -a claude-code -m anthropic/claude-sonnet-4-5

All commands: pier --help"""

_state = {"debug": False}


def enable_debug() -> None:
    """Enable debug messages and tracebacks of errors."""
    import logging
    import platform

    if not _state["debug"]:
        _state["debug"] = True
        logging.basicConfig(format="%(name)s: %(message)s")
        logging.getLogger("pier").setLevel(logging.DEBUG)
        about = (__version__, platform.python_version(), platform.platform())
        logging.getLogger("pier").debug("version %s, Python %s, %s", *about)


def _debug_option() -> click.Option:
    def callback(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if value:
            enable_debug()

    help = "Print tracebacks and debug messages."
    return click.Option(["--debug"], is_flag=True, expose_value=False, callback=callback, help=help)


def _with_debug(command: click.Command) -> click.Command:
    """Add `--debug` to the command and its subcommands."""
    if not any("--debug" in param.opts for param in command.params):
        command.params.append(_debug_option())
    for inner in command.commands.values() if isinstance(command, click.Group) else ():
        _with_debug(inner)
    return command


class LazyGroup(click.Group):
    """A group that imports the module of a command only when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        return _with_debug(getattr(importlib.import_module(module), attribute))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        items = [CompletionItem(name, help=COMMANDS[name][1]) for name in COMMANDS if name.startswith(incomplete)]
        return [*items, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for title, commands in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), text) for name, (_, text) in commands.items()])


@click.group(
    cls=LazyGroup,
    commands={name: click.Command(name) for name in COMMANDS},  # for click's suggestions
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
    invoke_without_command=True,
    params=[_debug_option()],
)
@click.option("--version", is_flag=True, help="Print the version; with -v also Python, platform and backends.")
@click.option("-v", "--verbose", is_flag=True, help="Print more with --version.")
@click.pass_context
def cli(ctx: click.Context, version: bool, verbose: bool) -> None:
    """Run coding agents in sandboxes, record everything they do, and grade the result so that it can be trusted."""
    if version:
        _print_version(verbose)
        ctx.exit()
    if verbose:
        raise click.UsageError("-v requires --version", ctx)
    if ctx.invoked_subcommand is None:
        from pathlib import Path

        fresh = not any(Path(name).exists() for name in ("jobs", "tasks", "task.toml"))
        click.echo(FIRST_STEPS if fresh else ctx.get_help())


@click.command
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script for SHELL.

    \b
    Add one of these to your shell's configuration:
      eval "$(pier completion bash)"
      eval "$(pier completion zsh)"
      pier completion fish | source
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "pier", "_PIER_COMPLETE").source())


def _print_version(verbose: bool) -> None:
    click.echo(f"pier, version {__version__}")
    if verbose:
        import platform

        from pier.cli.doctor import usable_backends

        click.echo(f"python   {platform.python_version()} ({sys.executable})")
        click.echo(f"platform {platform.platform()}")
        for name, usable in usable_backends().items():
            click.echo(f"backend  {name}: {'usable' if usable else 'not usable here; see pier doctor'}")


def _expected(kind: click.ParamType[object]) -> str | None:
    """Describe the values that a number or a choice accepts, as in pier's errors; None for other types."""
    if isinstance(kind, click.Choice):
        return f"one of {', '.join(map(str, kind.choices))}"
    ranged = isinstance(kind, click.IntRange | click.FloatRange)
    if not ranged and kind not in (click.INT, click.FLOAT):
        return None
    noun = "an integer" if kind is click.INT or isinstance(kind, click.IntRange) else "a number"
    low = [f"{'>' if kind.min_open else '>='} {kind.min}"] if ranged and kind.min is not None else []
    high = [f"{'<' if kind.max_open else '<='} {kind.max}"] if ranged and kind.max is not None else []
    return f"{noun} {' and '.join(low + high)}".rstrip()


def _invalid_value(error: click.ClickException) -> str | None:
    """Return the message for an invalid value in pier's style; None for other errors."""
    if not isinstance(error, click.BadParameter) or isinstance(error, click.MissingParameter) or error.param is None:
        return None
    name = error.param.opts[-1] if isinstance(error.param, click.Option) else error.param.human_readable_name
    if path := re.fullmatch(r"(?:File|Directory|Path) ('.*') (?:is )?(does not exist|not .*|a .*)\.", error.message):
        kinds = {"does not exist": "an existing path", "a file": "a directory", "a directory": "a file"}
        return f"invalid value {path[1]} for {name}: expected {kinds.get(path[2], 'an accessible path')}"
    if own := re.fullmatch(r"(expected .*), got (.*)", error.message, re.DOTALL):
        return f"invalid value {own[2]} for {name}: {own[1]}"
    value, separator, _ = error.message.rpartition(" is not ")
    if not separator or (expected := _expected(error.param.type)) is None:
        return None
    shown = value if value[:1] in ("'", '"') else repr(value)
    return f"invalid value {shown} for {name}: expected {expected}"


def explain_failure(error: Exception) -> int:
    """Print the message of an error and return the exit code. Bugs in pier are raised again."""
    guard_terminals()
    if isinstance(error, click.exceptions.Exit):
        return error.exit_code
    if isinstance(error, click.ClickException):
        text = _invalid_value(error) or error.format_message()
        context = error.ctx if isinstance(error, click.UsageError) else None
        hint = f"\nhint: {context.command_path} --help" if context else ""
        click.echo(f"pier: {text[:1].lower()}{text[1:].rstrip('.')}{hint}", err=True)
        return 2
    if isinstance(error, click.Abort):
        return 130
    if isinstance(error, PierError):
        if _state["debug"]:
            import traceback

            traceback.print_exception(error)
        click.echo(f"pier: {error.explain()}", err=True)
        return 2 if error.blame in ("user", "task") else 1
    if isinstance(error, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    raise error


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    guard_terminals()
    try:
        code = cli.main(args=args, prog_name="pier", standalone_mode=False)
    except Exception as error:  # noqa: BLE001 - explain_failure raises unknown errors again
        code = explain_failure(error)
    sys.exit(code if isinstance(code, int) else 0)


class _Terminal(io.TextIOWrapper):
    def write(self, text: str, /) -> int:
        if not text.isprintable() and text != "\n":
            text = without_controls(text)
        return super().write(text)


def guard_terminals() -> None:
    """Filter terminal output through `without_controls`. Progress displays and commands in sandboxes
    bypass it: they write to `sys.__stderr__` and to the descriptors."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper and stream.isatty():
            stream.flush()
            setattr(sys, name, _Terminal(stream.buffer, stream.encoding, stream.errors, line_buffering=True))


JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")

_CONTROL = re.compile(
    r"\x1b\[[0-9;]*m|\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)?|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)


def echo(value: Any, as_json: bool, lines: Iterable[str]) -> None:
    """Print a value as JSON, or its lines for people."""
    import json

    text = json.dumps(value, indent=2, default=str) if as_json else "\n".join(lines)
    if text:
        click.echo(text)


def without_controls(text: str) -> str:
    """Remove control sequences except colours from the text of a task or an agent."""
    return _CONTROL.sub(lambda found: found[0] if re.fullmatch(r"\x1b\[[0-9;]*m", found[0]) else "", text)
