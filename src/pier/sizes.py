"""Parsing and formatting of sizes, and alignment of tables."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from pier.errors import UsageError

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_size(text: str, where: str) -> int:
    """Parse a size such as 500M or 20G into bytes. `where` names the flag or key in the error."""
    number = text.strip().lower().removesuffix("b").removesuffix("i")
    unit = number[-1:] if number[-1:] in _UNITS and not number[-1:].isdigit() else ""
    try:
        size = int(float(number.removesuffix(unit)) * _UNITS[unit])
    except (ValueError, OverflowError):
        size = -1
    if size < 0:
        raise UsageError(f"invalid value {text!r} for {where}: expected a size such as 500M or 20G")
    return size


def size_text(size: float) -> str:
    """Format a number of bytes, such as 1.5 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def columns(*rows: Sequence[object]) -> list[str]:
    """Align rows of cells in columns and return the lines. A cell may have several lines. Numeric columns are
    right-aligned below their heading; None is shown as `-`."""
    texts = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    cells = [line for row in texts for line in zip_longest(*(cell.split("\n") for cell in row), fillvalue="")]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    right = [all(isinstance(row[at], int | float | None) for row in rows[1:]) for at in range(len(widths))]
    return [
        "  ".join(
            cell.rjust(width) if is_number else cell.ljust(width)
            for cell, width, is_number in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in cells
    ]
