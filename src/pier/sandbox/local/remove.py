"""Removal of a tree that a sandbox wrote: any depth, any names, never through a symlink."""

from __future__ import annotations

import itertools
import os

_DEEP = 64
"""Directories below this depth are moved to the top of the tree and removed from there, so that neither the stack nor
descriptors run out."""
_numbers = itertools.count()
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove(path: str) -> None:
    """Remove `path` and all below it; already gone is fine."""
    try:
        top = os.open(path, _DIRECTORY)
    except FileNotFoundError:
        return
    except OSError:
        os.unlink(path)
        return
    try:
        while children := os.listdir(top):
            for child in children:
                _remove(top, child, top, 1)
    finally:
        os.close(top)
    os.rmdir(path)


def _remove(above: int, name: str, top: int, depth: int) -> None:
    try:
        os.unlink(name, dir_fd=above)
        return
    except FileNotFoundError:
        return
    except (IsADirectoryError, PermissionError):
        pass
    if depth > _DEEP:
        os.rename(name, f".deep-{os.getpid()}-{next(_numbers)}", src_dir_fd=above, dst_dir_fd=top)
        return
    here = os.open(name, _DIRECTORY, dir_fd=above)
    try:
        for child in os.listdir(here):
            _remove(here, child, top, depth + 1)
    finally:
        os.close(here)
    os.rmdir(name, dir_fd=above)
