"""Trees that lie deeper than the longest path that can be told to the kernel."""

from __future__ import annotations

import os
from pathlib import Path

LEVELS = 1300
"""More than Python's limit on recursion, and than the usual limit on open files."""
NAME = "d" * 20


def make_deep(top: Path, levels: int = LEVELS, name: str = NAME) -> None:
    """Make a directory with directories in each other."""
    top.mkdir()
    here = os.open(top, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir(name, dir_fd=here)
        below = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
