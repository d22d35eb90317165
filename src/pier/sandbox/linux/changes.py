"""What a sandbox wrote, read from its upper layer: nothing inside can hide it.

Runs in a child of a zygote, as root of the ids that the files have. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from typing import Any

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PARTS = 15
"""So many parts of a path can be opened at once, however long their names are."""
_LONG = 3800
"""Bytes of a path that leave room for one more name."""
_OPAQUE = ("user.overlay.opaque", "trusted.overlay.opaque")
"""How overlays of pier's and of engines say that a directory hides those below it."""


class TooMany(Exception):
    """A tree has more entries than were to be looked at."""


def compare(upper: str, lowers: list[str], most: int | None = None) -> list[list[str]]:
    """[path, kind, mark] of each path that `upper` makes differ from `lowers` (lowest first). `TooMany` if `upper` has
    more than `most` entries."""
    found: list[list[str]] = []
    seen = 0
    todo = [(upper, list(reversed(lowers)), "")]
    while todo:
        above, below, path = todo.pop()
        opaque = _is_opaque(above)
        names = set()
        with _scan(above) as entries:
            for entry in entries:
                seen += 1
                if most is not None and seen > most:
                    raise TooMany
                names.add(entry.name)
                here = f"{path}/{entry.name}"
                status = entry.stat(follow_symlinks=False)
                known = _find(below, entry.name)
                if _is_whiteout(status):
                    found.append([here, "removed", ""])
                elif stat.S_ISDIR(status.st_mode):
                    todo.append((f"{above}/{entry.name}", _merged(below, entry.name), here))
                else:
                    found.append([here, "changed" if known else "added", _mark(status)])
        if opaque:
            found.extend([f"{path}/{name}", "removed", ""] for name in _names(below) if name not in names)
    return found


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
    """How many bytes of disk a tree takes."""
    total = 0
    todo = [path]
    while todo:
        above = todo.pop()
        with contextlib.suppress(OSError), _scan(above) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                total += status.st_blocks * 512 // max(1, status.st_nlink if stat.S_ISREG(status.st_mode) else 1)
                if stat.S_ISDIR(status.st_mode):
                    todo.append(f"{above}/{entry.name}")
    return total


@contextlib.contextmanager
def _scan(directory: str) -> Iterator[Iterator[os.DirEntry[str]]]:
    """What is in a directory, also if its path is longer than the kernel takes: whoever wrote it came there step by
    step."""
    fd = _open_long(directory) if len(os.fsencode(directory)) > _LONG else -1
    entries = os.scandir(directory if fd < 0 else fd)
    try:
        with entries:
            yield entries
    finally:
        if fd >= 0:
            os.close(fd)


def _open_long(directory: str) -> int:
    parts = directory.split("/")
    fd = os.open("/", _DIRECTORY)
    for start in range(1, len(parts), _PARTS):
        try:
            step = os.open("/".join(parts[start : start + _PARTS]), _DIRECTORY, dir_fd=fd)
        finally:
            os.close(fd)
        fd = step
    return fd


def _mark(status: os.stat_result) -> str:
    parts = (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino, status.st_mode, status.st_uid)
    return "-".join(map(str, parts))


def _is_whiteout(status: os.stat_result) -> bool:
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def _is_opaque(path: str) -> bool:
    for name in _OPAQUE:
        with contextlib.suppress(OSError):
            if os.getxattr(path, name, follow_symlinks=False) == b"y":
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
