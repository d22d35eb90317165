"""What a sandbox wrote, read from its upper layer, and how much disk it uses: nothing inside can hide either.

Files without a name count too, if processes of the sandbox hold them open or mapped; files on their way through a
socket are not seen. Runs in a child of a zygote, as root of the ids that the files have, which may look at all
processes of a sandbox. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
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


def measure_tree(path: str) -> int:
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


_DELETED = " (deleted)"


def measure(proc: str, init: int, root: str, *volumes: str, descend: bool = False) -> int:
    """How many bytes the trees `root` (what was written to the root) and `volumes` take, with unlinked files of theirs
    that processes of the pid namespace of `init` hold. What cannot be looked at does not count. `descend`: all these
    processes descend from `init`, so that those of other sandboxes need not be looked at."""
    named = sum(map(measure_tree, (root, *volumes)))
    held: dict[tuple[int, int], int] = {}
    devices: set[int] = set()
    for path in volumes:
        with contextlib.suppress(OSError):
            devices.add(os.stat(path).st_dev)
    with contextlib.suppress(OSError):
        elsewhere = _other_devices(f"{proc}/{init}") - devices
        for pid in _below(proc, init) if descend and _lists_children(proc) else _inside(proc, init):
            with contextlib.suppress(OSError):
                _count(f"{proc}/{pid}", elsewhere, held)
    return named + sum(held.values())


def _inside(proc: str, init: int) -> Iterator[str]:
    """The processes of the pid namespace of `init`."""
    inside = os.stat(f"{proc}/{init}/ns/pid").st_ino
    for pid in filter(str.isdigit, os.listdir(proc)):
        with contextlib.suppress(OSError):
            if os.stat(f"{proc}/{pid}/ns/pid").st_ino == inside:
                yield pid


def _lists_children(proc: str) -> bool:
    """Whether the kernel lists the children of a process."""
    return os.path.exists(f"{proc}/1/task/1/children")


def _below(proc: str, init: int) -> list[str]:
    """`init` and the processes that descend from it."""
    found = [str(init)]
    for pid in found:
        with contextlib.suppress(OSError):
            for task in os.listdir(f"{proc}/{pid}/task"):
                with open(f"{proc}/{pid}/task/{task}/children", encoding="utf-8") as children:
                    found += children.read().split()
    return found


def _other_devices(process: str) -> set[int]:
    """The devices of all but the root's own files, which an overlay gives numbers that are listed nowhere: those of
    other mounts, and that of memory which is shared without a mount."""
    fd = os.memfd_create("pier", os.MFD_CLOEXEC)
    found = {os.fstat(fd).st_dev}
    os.close(fd)
    with open(f"{process}/mountinfo", encoding="utf-8", errors="replace") as rows:
        for _, _, numbers, _, point, *_ in map(str.split, rows):
            if point != "/":
                major, _, minor = numbers.partition(":")
                found.add(os.makedev(int(major), int(minor)))
    return found


def _count(process: str, elsewhere: set[int], held: dict[tuple[int, int], int]) -> None:
    for path in (*_open_files(process), *_mapped_files(process)):
        with contextlib.suppress(OSError):
            found = os.stat(path)
            if stat.S_ISREG(found.st_mode) and found.st_nlink == 0 and found.st_dev not in elsewhere:
                held[found.st_dev, found.st_ino] = found.st_blocks * 512


def _open_files(process: str) -> Iterator[str]:
    return (f"{process}/fd/{number}" for number in os.listdir(f"{process}/fd"))


def _mapped_files(process: str) -> Iterator[str]:
    with open(f"{process}/maps", encoding="utf-8", errors="replace") as rows:
        for row in rows:
            if row.rstrip("\n").endswith(_DELETED):
                yield f"{process}/map_files/{row.split(' ', 1)[0]}"
