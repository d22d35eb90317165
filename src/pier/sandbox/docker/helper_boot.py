"""Where the helper's interpreter begins: `python helper_boot.py`. Packages are stubbed, as for a zygote.

With `--keep` it is the first process of the helper's container, which ends the container when no session has used it
for a while. With `--parts` it lists the files that the helper is made of. Else it is a session: one for each pier that
uses the engine, holding a lock for as long as it lives. A session that finds the end decided exits, and pier makes
another helper. Standard library only, and nothing of pier's before the packages are stubbed.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import sys
import time
import types

MARK = "PIER_MARK"
"""The variable that names, for a session, a file that the engine's host has if it shares the disk of pier's machine."""
IDLE_SECONDS = 10.0
_LOOK_SECONDS = 0.5
_LOCK = "/tmp/sessions"
"""Sessions share a lock on it. It has a byte once the end is decided."""


def main() -> None:
    source = __file__.removesuffix("/pier/sandbox/docker/helper_boot.py")
    own = source + "/pier/sandbox/docker"
    sys.path[:] = [path for path in sys.path if path != own]
    if sys.argv[1:] == ["--keep"]:
        _keep()
        return
    sys.modules["ssl"] = None  # type: ignore[assignment]
    for name in ("pier", "pier.network", "pier.sandbox", "pier.sandbox.linux", "pier.sandbox.docker"):
        module = types.ModuleType(name)
        module.__path__ = ["/".join([source, *name.split(".")])]
        sys.modules[name] = module
    session = importlib.import_module("pier.sandbox.docker.helper_session")
    session.list_parts() if sys.argv[1:] == ["--parts"] else session.main()


def _keep() -> None:
    """Wait until there was no session for a while."""
    fd = _open_lock()
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
    fd = _open_lock()
    fcntl.flock(fd, fcntl.LOCK_SH)
    return os.fstat(fd).st_size == 0


def _open_lock() -> int:
    return os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


if __name__ == "__main__":
    main()
