"""Removal of a tree that a sandbox wrote: any depth, any names, never through a symlink."""

from __future__ import annotations

import itertools
import os

_DEEP = 64
"""Directories below this depth are moved up before they are emptied, so that neither stack nor descriptors run out."""
_numbers = itertools.count()


def remove(path: str) -> None:
    """Remove `path` and all below it; already gone is fine."""
    parent, name = os.path.split(path)
    try:
        above = os.open(parent or "/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        _remove(above, name, above, 0)
    finally:
        os.close(above)


def _remove(above: int, name: str, top: int, depth: int) -> None:
    try:
        os.unlink(name, dir_fd=above)
        return
    except FileNotFoundError:
        return
    except (IsADirectoryError, PermissionError):
        pass
    if depth >= _DEEP:
        moved = f".deep-{os.getpid()}-{next(_numbers)}"
        os.rename(name, moved, src_dir_fd=above, dst_dir_fd=top)
        _remove(top, moved, top, 0)
        return
    try:
        here = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    except FileNotFoundError:
        return
    try:
        for child in os.listdir(here):
            _remove(here, child, top, depth + 1)
    finally:
        os.close(here)
    try:
        os.rmdir(name, dir_fd=above)
    except FileNotFoundError:
        return
