"""Puts what runs in sandboxes first in line when the kernel has to kill for want of memory. Standard library only."""

from __future__ import annotations

import os

SCORE = 1000
_SYS_RESOURCE = 24
_ALL_IDS = ["0", "0", "4294967295"]


def put_first(proc: int, pid: str | int = "self") -> None:
    """Put a process, and all that it will start, first in line. `proc` is an open /proc."""
    fd = os.open(f"{pid}/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc)
    try:
        os.write(fd, b"%d" % SCORE)
    finally:
        os.close(fd)


def score(proc: int, pid: int) -> int:
    """What is written down for a process."""
    return int(_read(proc, f"{pid}/oom_score_adj"))


def is_final(proc: int) -> bool:
    """Whether a score that this process gives cannot be lowered by those that it is given to: the kernel keeps the one
    that somebody with CAP_SYS_RESOURCE over the machine gave."""
    rows = dict(row.split(b":", 1) for row in _read(proc, "self/status").splitlines() if b":" in row)
    over_all = _read(proc, "self/uid_map").decode().split() == _ALL_IDS
    return over_all and bool(int(rows[b"CapEff"], 16) >> _SYS_RESOURCE & 1)


def _read(proc: int, path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
    try:
        return os.read(fd, 1 << 16)
    finally:
        os.close(fd)
