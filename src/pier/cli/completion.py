"""`pier completion`: shell completion."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from pier.cli.main import cli


@click.command(name="completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print completion for SHELL.

    \b
    Add one of these to your shell's configuration:
      eval "$(pier completion bash)"
      eval "$(pier completion zsh)"
      pier completion fish | source
    """
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "pier", "_PIER_COMPLETE").source())
