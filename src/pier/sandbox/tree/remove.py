"""Removal of a tree that a sandbox wrote: any depth, any names, never through a symlink."""

from __future__ import annotations

import contextlib
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
    """Remove all that is in a directory. Each directory is emptied before it is removed, so that no call is in vain."""
    way: list[str] = []
    todo = [_look(walk.here, budget)]
    while todo:
        if todo[-1]:
            name = todo[-1].pop()
            walk.enter(name)
            way.append(name)
            todo.append(_look(walk.here, budget))
            continue
        todo.pop()
        if todo:
            walk.leave()
            os.rmdir(way.pop(), dir_fd=walk.here)


def _look(here: int, budget: Iterator[int]) -> list[str]:
    """Remove what is no directory, and tell which directories there are."""
    found: list[str] = []
    with os.scandir(here) as entries:
        for entry in list(entries):
            if next(budget, None) is None:
                raise _Spent
            if entry.is_dir(follow_symlinks=False):
                found.append(entry.name)
            else:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(entry.name, dir_fd=here)
    return found
