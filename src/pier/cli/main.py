"""The `pier` command: finds the group, loads only its module, and turns errors into words and exit codes.

Exit codes: 0 done, 1 something failed, 2 wrong usage or configuration (a task that cannot be read, too), 130
interrupted.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

import click

from pier import __version__
from pier.errors import PierError

COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("pier.cli.run:run", "Run agents on tasks and grade the results."),
    "job": ("pier.cli.job:job", "Look at, resume, retry and regrade jobs."),
    "trial": ("pier.cli.trial:trial", "Look at single trials."),
    "task": ("pier.cli.task:task", "Make, check and list tasks."),
    "agent": ("pier.cli.agent:agent", "Build and look at agent packs."),
    "gateway": ("pier.cli.gateway:gateway", "Intercept, record and replay model calls."),
    "trajectory": ("pier.cli.trajectory:trajectory", "Convert, validate and show trajectories."),
    "sandbox": ("pier.cli.sandbox:sandbox", "Run commands in sandboxes."),
    "image": ("pier.cli.image:image", "Import, pull, build and remove images."),
    "doctor": ("pier.cli.doctor:doctor", "Check this machine and suggest fixes."),
    "gc": ("pier.cli.gc:gc", "Remove what dead runs left behind."),
}
"""Every command: where it is (`module:attribute`) and its one line of help, so that help imports no command."""


class LazyGroup(click.Group):
    """A group that imports a command's module only when that command is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        return getattr(importlib.import_module(module), attribute)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            from difflib import get_close_matches

            near = get_close_matches(args[0], COMMANDS, n=1)
            question = f" Did you mean {near[0]!r}?" if near else ""
            raise click.UsageError(error.message + question, ctx) from None


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="pier")
def cli() -> None:
    """Run coding agents in sandboxes, record everything they do, and grade the result so that it can be trusted."""


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    try:
        code = cli.main(args=args, prog_name="pier", standalone_mode=False)
    except click.exceptions.Exit as stop:
        code = stop.exit_code
    except click.ClickException as error:
        error.show()
        code = 2
    except click.Abort:
        code = 130
    except PierError as error:
        click.echo(f"pier: {error.explain()}", err=True)
        code = 2 if error.blame in ("user", "task") else 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code if isinstance(code, int) else 0)
