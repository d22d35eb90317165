"""What commands have in common: `--json`, and a value printed for programs or as lines for people."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import click

JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")


def echo(value: Any, as_json: bool, lines: Iterable[str]) -> None:
    """Print a value as JSON, or the lines that say the same to people."""
    text = json.dumps(value, indent=2) if as_json else "\n".join(lines)
    if text:
        click.echo(text)


def columns(*rows: Sequence[object]) -> list[str]:
    """Rows of cells as lines, with the cells one below the other: numbers to the right, None as `-`."""
    cells = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    right = [all(isinstance(row[at], int | float | None) for row in rows[1:]) for at in range(len(widths))]
    return [
        "  ".join(
            cell.rjust(width) if is_number else cell.ljust(width)
            for cell, width, is_number in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in cells
    ]
