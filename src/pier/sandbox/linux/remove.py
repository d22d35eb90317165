"""Removal of a tree that a sandbox wrote: any depth, any names, never through a symlink."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator

_DEEP = 64
"""Directories below this depth are moved to the top of the tree and removed from there, so that neither the stack nor
descriptors run out."""
_numbers = itertools.count()
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class _Spent(Exception):
    """There is more to remove than was allowed."""


def remove(path: str) -> None:
    """Remove `path` and all below it; already gone is fine."""
    _remove_tree(path, itertools.count())


def remove_some(path: str, most: int) -> bool:
    """Remove at most so many files and directories of `path`; whether that was all of it."""
    try:
        _remove_tree(path, iter(range(most)))
    except _Spent:
        return False
    return True


def _remove_tree(path: str, budget: Iterator[int]) -> None:
    try:
        top = os.open(path, _DIRECTORY)
    except FileNotFoundError:
        return
    except OSError:
        os.unlink(path)
        return
    try:
        while True:
            for child in os.listdir(top):
                _remove(top, child, (top, budget), 1)
            if _is_removed(path):
                return
    finally:
        os.close(top)


def _remove(above: int, name: str, tree: tuple[int, Iterator[int]], depth: int) -> None:
    top, budget = tree
    if next(budget, None) is None:
        raise _Spent
    try:
        os.unlink(name, dir_fd=above)
        return
    except FileNotFoundError:
        return
    except (IsADirectoryError, PermissionError):
        pass
    if _is_removed(name, above):
        return
    if depth > _DEEP:
        os.rename(name, f".deep-{os.getpid()}-{next(_numbers)}", src_dir_fd=above, dst_dir_fd=top)
        return
    here = os.open(name, _DIRECTORY, dir_fd=above)
    try:
        for child in os.listdir(here):
            _remove(here, child, tree, depth + 1)
    finally:
        os.close(here)
    os.rmdir(name, dir_fd=above)


def _is_removed(directory: str, above: int | None = None) -> bool:
    """Remove a directory if it is empty."""
    try:
        os.rmdir(directory, dir_fd=above)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True
