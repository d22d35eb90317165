"""Space on disk that a sandbox holds, also through files without a name: open or mapped, and unlinked.

Runs in a child of a zygote, which may look at all processes of a sandbox. Files on their way through a socket are not
seen. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator

from pier.sandbox.linux import changes

_DELETED = " (deleted)"


def measure(proc: str, init: int, root: str, *volumes: str, descend: bool = False) -> int:
    """How many bytes the trees `root` (what was written to the root) and `volumes` take, with unlinked files of theirs
    that processes of the pid namespace of `init` hold. What cannot be looked at does not count. `descend`: all these
    processes descend from `init`, so that those of other sandboxes need not be looked at."""
    named = sum(map(changes.measure, (root, *volumes)))
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
