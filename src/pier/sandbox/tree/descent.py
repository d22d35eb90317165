"""Walks through trees of any depth: one name at a time, with few descriptors, never through a link."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_HELD = 32
"""So many directories on the way are held open; the way up to others leads through `..`."""


class Descent:
    """Where a walk is. Directories on the way up are the same ones that it came by, or an ESTALE says that somebody has
    moved one meanwhile."""

    def __init__(self, top: str | int, above: int | None = None) -> None:
        self._way = [os.open(top, _DIRECTORY, dir_fd=above) if isinstance(top, str) else os.dup(top)]
        self._left: dict[int, tuple[int, int]] = {}

    @property
    def here(self) -> int:
        """The directory that the walk is in."""
        return self._way[-1]

    def enter(self, name: str) -> None:
        self._way.append(os.open(name, _DIRECTORY, dir_fd=self.here))
        far = len(self._way) - 1 - _HELD
        if far >= 0 and self._way[far] >= 0:
            self._left[far] = _identity(self._way[far])
            os.close(self._way[far])
            self._way[far] = -1

    def leave(self) -> None:
        below = self._way.pop()
        try:
            if self._way[-1] < 0:
                self._way[-1] = os.open("..", _DIRECTORY, dir_fd=below)
                if _identity(self._way[-1]) != self._left.pop(len(self._way) - 1):
                    raise OSError(errno.ESTALE, "a directory was moved during a walk through it")
        finally:
            os.close(below)

    def close(self) -> None:
        while self._way:
            if (fd := self._way.pop()) >= 0:
                os.close(fd)

    def __enter__(self) -> Descent:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def visit(
    walk: Descent, look: Callable[[int, Any], list[tuple[str, Any]]], first: Any, missed: Callable[[Any, OSError], None]
) -> None:
    """Look at a directory, and then at each below it that a look has named, with what the look gave along. `missed` is
    told of those that cannot be opened."""
    todo = [look(walk.here, first)]
    while todo:
        if not todo[-1]:
            todo.pop()
            if todo:
                walk.leave()
            continue
        name, given = todo[-1].pop()
        try:
            walk.enter(name)
        except OSError as error:
            missed(given, error)
        else:
            todo.append(look(walk.here, given))
