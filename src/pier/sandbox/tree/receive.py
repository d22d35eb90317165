"""A tree that comes out of a sandbox, put on the host: all of it appears under its name at once, or nothing does."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import IO

from pier.beneath import DIRECTORY, remove
from pier.sandbox.tree.unpack import unpack

_SINGLE = "content"


def receive(stream: IO[bytes], target: Path, *, max_bytes: int | None = None) -> list[str]:
    """Unpack what `pack` made to the host path `target`, which must not exist or be an empty directory. Parents are
    made. Answers what was left out. Raises FileExistsError if something is there already."""
    if target.is_symlink() or (target.exists() and not _is_empty(target)):
        raise FileExistsError(f"{target} exists already")
    target.parent.mkdir(parents=True, exist_ok=True)
    unborn = Path(tempfile.mkdtemp(prefix=".pier-", suffix=".tmp", dir=target.parent))
    try:
        root = os.open(unborn, DIRECTORY)
        try:
            unpacked = unpack(stream, root, max_bytes=max_bytes, single=_SINGLE)
        finally:
            os.close(root)
        if unpacked.alone and not unpacked.skipped:
            if target.is_dir():
                target.rmdir()
            (unborn / _SINGLE).rename(target)
        elif not unpacked.alone:
            unborn.chmod(0o755)
            unborn.rename(target)
    finally:
        with contextlib.suppress(OSError):
            remove(str(unborn))
    return unpacked.skipped


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())
