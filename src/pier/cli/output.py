"""Parts that commands share: `--json`, a value printed for programs or as lines for people, and terminals
that text of tasks and agents cannot drive: file names, error messages, logs and trajectories may hold escape
sequences."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import click

JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")

_CONTROL = re.compile(
    r"\x1b\[[0-9;]*m|\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)?|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)


def echo(value: Any, as_json: bool, lines: Iterable[str]) -> None:
    """Print a value as JSON, or the lines that say the same to people."""
    text = json.dumps(value, indent=2, default=str) if as_json else "\n".join(lines)
    if text:
        click.echo(text)


def shown(text: str) -> str:
    """Text of a task or an agent without what would move the cursor; colours stay."""
    return _CONTROL.sub(lambda found: found[0] if re.fullmatch(r"\x1b\[[0-9;]*m", found[0]) else "", text)
