"""Puts what runs in sandboxes first in line when the kernel has to kill for want of memory. Standard library only."""

from __future__ import annotations

import os

SCORE = 1000
SERVING = 500
"""The score of what serves a sandbox: before all else on the machine, and behind every command in the sandbox. Were it
the same, many small processes could have it killed in their place, and their trial would end without a verdict."""


def put_in_line(proc: int, pid: str | int = "self", score: int = SCORE) -> None:
    """Put a process, and all that it will start, in line. `proc` is an open /proc."""
    fd = os.open(f"{pid}/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc)
    try:
        os.write(fd, b"%d" % score)
    finally:
        os.close(fd)


def score(proc: int, pid: int) -> int:
    """What is written down for a process."""
    return int(_read(proc, f"{pid}/oom_score_adj"))


def _read(proc: int, path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
    try:
        return os.read(fd, 1 << 16)
    finally:
        os.close(fd)
