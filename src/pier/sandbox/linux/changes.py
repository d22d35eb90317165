"""What a sandbox wrote, read from its upper layer: nothing inside can hide it.

Runs in a child of a zygote, as root of the ids that the files have. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import stat
from typing import Any

from pier.beneath import Descent, visit

_LONGEST = 4096
"""Bytes of the longest path that a program can name. What a sandbox wrote behind longer ones is told as a whole."""
_TRIES = 3
_INODE = 512
_OPAQUE = ("user.overlay.opaque", "trusted.overlay.opaque")
"""How overlays of pier's and of engines say that a directory hides those below it."""


class TooMany(Exception):
    """A tree has more entries than were to be looked at."""


def compare(upper: str, lowers: list[str], most: int | None = None) -> list[list[str]]:
    """[path, kind, mark] of each path that `upper` makes differ from `lowers` (lowest first). `TooMany` if `upper` has
    more than `most` entries."""
    found: list[list[str]] = []
    left = [0 if most is None else most]

    def look(here: int, given: tuple[str, list[str]]) -> list[tuple[str, tuple[str, list[str]]]]:
        path, below = given
        names: set[str] = set()
        deeper: list[tuple[str, tuple[str, list[str]]]] = []
        with os.scandir(here) as entries:
            for entry in entries:
                left[0] -= 1
                if most is not None and left[0] < 0:
                    raise TooMany
                names.add(entry.name)
                inner = f"{path}/{entry.name}"
                status = entry.stat(follow_symlinks=False)
                if _is_whiteout(status):
                    found.append([inner, "removed", ""])
                elif stat.S_ISDIR(status.st_mode) and len(os.fsencode(inner)) < _LONGEST:
                    deeper.append((entry.name, (inner, _merged(below, entry.name))))
                else:
                    found.append([inner, "changed" if _find(below, entry.name) else "added", _mark(status)])
        if _is_opaque(here):
            found.extend([f"{path}/{name}", "removed", ""] for name in _names(below) if name not in names)
        return deeper

    with Descent(upper) as walk:
        visit(walk, look, ("", list(reversed(lowers))), _raise)
    return found


def _raise(_: object, error: OSError) -> None:
    raise error


def merge(looks: list[list[list[Any]]]) -> list[list[Any]]:
    """Several layers' changes, lowest first, as one: what was added and then removed was never there."""
    known: dict[str, list[Any]] = {}
    for look in looks:
        for path, kind, mark in look:
            was = known.pop(path, None)
            if was is not None and was[1] == "added":
                if kind == "removed":
                    continue
                kind = "added"
            elif was is not None and was[1] == "removed" and kind == "added":
                kind = "changed"
            known[path] = [path, kind, mark]
    return list(known.values())


def measure(path: str) -> int:
    """How many bytes of disk a tree takes, at least: it may change meanwhile. An entry without content takes an inode,
    of which a disk may have too few for others."""
    largest = 0
    for _ in range(_TRIES):
        counted = [0]

        def look(here: int, _: None, counted: list[int] = counted) -> list[tuple[str, None]]:
            deeper: list[tuple[str, None]] = []
            with contextlib.suppress(OSError), os.scandir(here) as entries:
                for entry in entries:
                    status = entry.stat(follow_symlinks=False)
                    files = status.st_nlink if stat.S_ISREG(status.st_mode) else 1
                    counted[0] += max(status.st_blocks * 512, _INODE) // max(1, files)
                    if stat.S_ISDIR(status.st_mode):
                        deeper.append((entry.name, None))
            return deeper

        try:
            with Descent(path) as walk:
                visit(walk, look, None, lambda *_: None)
            return max(largest, counted[0])
        except OSError:
            largest = max(largest, counted[0])
    return largest


def _mark(status: os.stat_result) -> str:
    parts = (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino, status.st_mode, status.st_uid)
    return "-".join(map(str, parts))


def _is_whiteout(status: os.stat_result) -> bool:
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def _is_opaque(directory: str | int) -> bool:
    for name in _OPAQUE:
        with contextlib.suppress(OSError):
            if os.getxattr(directory, name) == b"y":
                return True
    return False


def _find(below: list[str], name: str) -> os.stat_result | None:
    """What the layers below (topmost first) have under a name."""
    for directory in below:
        try:
            status = os.lstat(f"{directory}/{name}")
        except OSError:
            continue
        return None if _is_whiteout(status) else status
    return None


def _merged(below: list[str], name: str) -> list[str]:
    """The directories below that would be merged under a name."""
    found: list[str] = []
    for directory in below:
        path = f"{directory}/{name}"
        try:
            status = os.lstat(path)
        except OSError:
            continue
        if not stat.S_ISDIR(status.st_mode):
            break
        found.append(path)
        if _is_opaque(path):
            break
    return found


def _names(below: list[str]) -> list[str]:
    seen: set[str] = set()
    for directory in below:
        with contextlib.suppress(OSError), os.scandir(directory) as entries:
            seen.update(entry.name for entry in entries)
    return [name for name in seen if _find(below, name) is not None]
