"""What a sandbox's upper layer holds beyond its image, seen by a zygote: from outside, with the rights to see it all.

Standard library only: this runs in the zygote.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

Row = tuple[str, str, str]
"""Path, kind, mark."""


def changes(upper: str, layers: list[str], budget: int | None = None) -> list[Row] | None:
    """The files, links and removals in `upper`, with paths as the sandbox sees them; None past `budget` entries."""
    rows: list[Row] = []
    seen = 0
    for path, status in _walk(upper):
        seen += 1
        if budget is not None and seen > budget:
            return None
        if stat.S_ISDIR(status.st_mode):
            continue
        inside = path[len(upper) :]
        if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
            rows.append((inside, "removed", ""))
            continue
        was_there = any(os.path.lexists(layer.rstrip("/") + inside) for layer in layers)
        numbers = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_mode)
        rows.append((inside, "changed" if was_there else "added", ".".join(map(str, numbers))))
    return rows


def _walk(directory: str) -> Iterator[tuple[str, os.stat_result]]:
    pending = [directory]
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                found = [(entry.path, entry.stat(follow_symlinks=False)) for entry in entries]
        except OSError:
            continue
        for path, status in found:
            yield path, status
            if stat.S_ISDIR(status.st_mode):
                pending.append(path)
