"""A file system that is an overlay, as in a container: it has no other ids, and no sandbox can lie on it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def overlay(lower: Path, place: Path) -> Iterator[Path]:
    """`lower` seen through an overlay, whose parts are made in `place`. Only root can mount it."""
    upper, work, merged = (place / name for name in ("upper", "work", "merged"))
    for directory in (upper, work, merged):
        directory.mkdir()
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, str(merged)], check=True)
    try:
        yield merged
    finally:
        subprocess.run(["umount", "-l", str(merged)], check=True)
