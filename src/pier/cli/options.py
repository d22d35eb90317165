"""Types of options and arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

PATH = click.Path(path_type=Path)
EXISTING = click.Path(exists=True, path_type=Path)
FILE = click.Path(dir_okay=False, path_type=Path)
DIRECTORY = click.Path(file_okay=False, path_type=Path)
COUNT = click.IntRange(1)
POSITIVE = click.FloatRange(0, min_open=True)
PORT = click.IntRange(0, 65535)


def combine(*options: Any) -> Any:
    """Combine decorators of options and arguments, in the order of the help."""

    def apply(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return apply
