"""What commands have in common: `--json`, and a value printed for programs or as lines for people."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import click

JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")


def echo(value: Any, as_json: bool, lines: Iterable[str]) -> None:
    """Print a value as JSON, or the lines that say the same to people."""
    text = json.dumps(value, indent=2) if as_json else "\n".join(lines)
    if text:
        click.echo(text)
