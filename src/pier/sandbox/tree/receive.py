"""A tree that comes out of a sandbox, put on the host: all of it appears under its name at once, or nothing does."""

from __future__ import annotations

import contextlib
import os
import secrets
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
    unborn = _make_beside(target)
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


def _make_beside(target: Path) -> Path:
    """A new directory next to `target`. Parents are made."""
    unborn = target.with_name(f".pier-{secrets.token_hex(6)}.tmp")
    try:
        unborn.mkdir(0o700)
    except FileNotFoundError:
        target.parent.mkdir(parents=True, exist_ok=True)
        unborn.mkdir(0o700)
    return unborn


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())
