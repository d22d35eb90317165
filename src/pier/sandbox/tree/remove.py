"""Removal of a tree that a sandbox wrote: any depth, any names, never through a symlink."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator

from pier.sandbox.tree.descent import Descent


class _Spent(Exception):
    """There is more to remove than was allowed."""


def remove(path: str, above: int | None = None) -> None:
    """Remove `path`, from the directory `above` if it is given, and all below it; already gone is fine."""
    _remove_tree(path, above, itertools.count())


def remove_some(path: str, most: int) -> bool:
    """Remove at most so many files and directories of `path`; whether that was all of it."""
    try:
        _remove_tree(path, None, iter(range(most)))
    except _Spent:
        return False
    return True


def _remove_tree(path: str, above: int | None, budget: Iterator[int]) -> None:
    try:
        walk = Descent(path, above)
    except FileNotFoundError:
        return
    except OSError:
        os.unlink(path, dir_fd=above)
        return
    with walk:
        _empty(walk, budget)
    os.rmdir(path, dir_fd=above)


def _empty(walk: Descent, budget: Iterator[int]) -> None:
    way: list[str] = []
    todo = [os.listdir(walk.here)]
    while todo:
        if todo[-1]:
            name = todo[-1].pop()
            if next(budget, None) is None:
                raise _Spent
            if not _is_removed(name, walk.here):
                walk.enter(name)
                way.append(name)
                todo.append(os.listdir(walk.here))
            continue
        todo.pop()
        if todo:
            walk.leave()
            os.rmdir(way.pop(), dir_fd=walk.here)


def _is_removed(name: str, above: int) -> bool:
    """Remove anything but a directory that is not empty."""
    try:
        os.unlink(name, dir_fd=above)
    except FileNotFoundError:
        return True
    except (IsADirectoryError, PermissionError):
        try:
            os.rmdir(name, dir_fd=above)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return False
            raise
    return True
