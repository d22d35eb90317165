"""One runner per job directory.

The runner holds a record lock on `.owner` in the job's directory, which the kernel drops when the process ends in any
way and which no child inherits. So a lock that can be taken has no living owner, and one that cannot names its owner.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from pier.errors import JobError

OWNER = ".owner"
_FLOCK = "hh4xqqi4x"
"""`struct flock` of 64-bit Linux, for asking who holds a lock without taking it."""

_held: set[Path] = set()


@contextmanager
def owning(directory: Path) -> Iterator[None]:
    """Be the one runner of the job in `directory`; a `JobError` names the runner that already is."""
    path = directory.resolve() / OWNER
    if path in _held:
        raise _taken(directory, f"this process ({os.getpid()})")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise _taken(directory, _describe(fd)) from None
        _held.add(path)
        try:
            me = {"pid": os.getpid(), "host": socket.gethostname(), "since": datetime.now(UTC).isoformat()}
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps(me).encode(), 0)
            yield
        finally:
            _held.discard(path)
    finally:
        os.close(fd)


def current_owner(directory: Path) -> str | None:
    """A description of the runner of the job, or None if it is not running."""
    path = directory.resolve() / OWNER
    if path in _held:
        return f"this process ({os.getpid()})"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        holder = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, asked))
        return None if holder[0] == fcntl.F_UNLCK else _describe(fd)
    finally:
        os.close(fd)


def _describe(fd: int) -> str:
    try:
        who = json.loads(os.pread(fd, 4096, 0))
        return f"process {who['pid']} on {who['host']} since {who['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process"


def _taken(directory: Path, owner: str) -> JobError:
    return JobError(
        f"the job {directory} is being run by {owner}",
        hint=f"wait for it to end, or look on with: pier job show {directory}",
        code="job-owned",
    )
