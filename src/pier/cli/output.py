"""What commands have in common: `--json`, a value printed for programs or as lines for people, and terminals that text
of tasks and agents cannot drive: file names, error messages, logs and trajectories may hold escape sequences."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterable
from typing import Any

import click

JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")

_CONTROL = re.compile(
    r"\x1b\[[0-9;]*m|\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)?|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)


def echo(value: Any, as_json: bool, lines: Iterable[str]) -> None:
    """Print a value as JSON, or the lines that say the same to people."""
    text = json.dumps(value, indent=2) if as_json else "\n".join(lines)
    if text:
        click.echo(text)


def shown(text: str) -> str:
    """Text of a task or an agent without what would move the cursor; colours stay."""
    return _CONTROL.sub(lambda found: found[0] if re.fullmatch(r"\x1b\[[0-9;]*m", found[0]) else "", text)


class _Terminal(io.TextIOWrapper):
    def write(self, text: str, /) -> int:
        return super().write(text if text.isprintable() else shown(text))


def guard_terminals() -> None:
    """Have everything that is printed on a terminal pass `shown`. Progress displays and commands in sandboxes write to
    `sys.__stderr__` and to the descriptors."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper and stream.isatty():
            stream.flush()
            setattr(sys, name, _Terminal(stream.buffer, stream.encoding, stream.errors, line_buffering=True))
