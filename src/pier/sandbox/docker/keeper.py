"""The first process of the helper's container, which ends it when nobody has used it for a while.

Each pier that uses the engine has a session in the helper: a process of its own, which holds a lock for as long as it
lives. Whoever finds that the keeper has decided to end goes away too, and pier makes another helper. Standard library
only.
"""

from __future__ import annotations

import fcntl
import os
import time

MARK = "PIER_MARK"
"""The variable that tells a session of a file which the engine's host has if it shares the disk of pier's machine."""
IDLE_SECONDS = 10.0
_LOOK_SECONDS = 0.5
_PLACE = "/tmp/sessions"
"""Sessions share a lock on it. It has a byte once the end is decided."""


def main() -> None:
    """Wait until there was no session for a while."""
    fd = _open()
    os.ftruncate(fd, 0)
    used = time.monotonic()
    while True:
        time.sleep(_LOOK_SECONDS)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            used = time.monotonic()
            continue
        if time.monotonic() - used > IDLE_SECONDS:
            os.write(fd, b"!")
            return
        fcntl.flock(fd, fcntl.LOCK_UN)


def join() -> bool:
    """Keep the helper for as long as this process lives; False if its end is decided."""
    fd = _open()
    fcntl.flock(fd, fcntl.LOCK_SH)
    return os.fstat(fd).st_size == 0


def _open() -> int:
    return os.open(_PLACE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
