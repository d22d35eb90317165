"""A program as process 1 of a process namespace of its own, inside a container that pier has entered.

The container's own first process does nothing but keep it open. A program that has to be process 1, an init system for
example, is that in an inner namespace, with a /proc that shows it, and commands that come later join it there. Root
file system, network and limits are the container's, and outlive the program: when it ends, what it started ends, and
it can be started again. A keeper outside the inner namespace waits for its end. Standard library only.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pier.sandbox.linux import kernel, wire, worker

_SECONDS = 10.0
"""How long a keeper may take to make the namespaces."""
_PROC = "/proc"
_FLAGS = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC


class Inner:
    """The inner namespaces, as whoever serves the container sees them. `proc` is the /proc of its own namespace."""

    def __init__(self, proc: int, first: int, keeper: int) -> None:
        self.keeper = keeper
        self.idle: list[int] = []
        """Workers inside that have nothing to do."""
        self.members: set[int] = set()
        """All workers inside."""
        self._inside = [_open(proc, keeper, name) for name in ("pid_for_children", "mnt")]
        self._outside = [_open(proc, first, name) for name in ("pid", "mnt")]
        self.namespace = os.fstat(self._inside[0]).st_ino

    @contextmanager
    def entered(self) -> Iterator[None]:
        """What is forked meanwhile is born inside, and has the mounts from there."""
        try:
            for namespace in self._inside:
                kernel.enter(namespace)
            yield
        finally:
            for namespace in self._outside:
                kernel.enter(namespace)

    def close(self) -> None:
        for fd in (*self._inside, *self._outside):
            os.close(fd)
        self._inside = self._outside = []


def _open(proc: int, pid: int, name: str) -> int:
    return os.open(f"{pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)


def keep(own: socket.socket, control: socket.socket, settings: dict[str, Any]) -> None:
    """The keeper: makes the namespaces, runs the one program that it is told to, and says when that has ended."""
    kernel.set_name("pier-keeper")
    try:
        kernel.unshare(kernel.CLONE_NEWNS)
        kernel.mount("", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
        kernel.unshare(kernel.CLONE_NEWPID)
    except OSError as error:
        wire.send(own, {"error": str(error)})
        return
    worker.serve(own, control, settings, first=lambda: _begin(own, settings))


def wait_for(own: socket.socket) -> dict[str, Any]:
    """What a keeper says first: that its program is about to run (`ready`), or why it cannot."""
    own.settimeout(_SECONDS)
    received = wire.receive(own)
    if received is None or "error" in received[0]:
        raise OSError(0, received[0]["error"] if received else "the process that keeps the program has died")
    return received[0]


def _begin(own: socket.socket, settings: dict[str, Any]) -> None:
    """Process 1, before it becomes the program: the program's first instruction is run when commands can join it."""
    _mount_proc()
    wire.send(own, {"ready": True})
    if wire.receive(own) is None:
        raise BrokenPipeError(errno.EPIPE, "the caller is gone")
    signal.set_wakeup_fd(-1)
    worker.confine(settings)
    worker.give_labels(settings)


def _mount_proc() -> None:
    """Put a /proc of this process's own namespace in the place of the container's, with the same parts of it hidden or
    read-only."""
    below = [row for row in _mounts() if row[0].startswith(f"{_PROC}/")]
    hidden = [(path, kernel.open_tree(path)) for path, kind in below if kind != "proc"]
    kernel.mount("proc", _PROC, "proc", _FLAGS)
    for path, kind in below:
        if kind == "proc":
            kernel.bind(path, path, read_only=True, flags=_FLAGS)
    for path, tree in hidden:
        kernel.attach(tree, path)
        os.close(tree)


def _mounts() -> list[tuple[str, str]]:
    """Where something is mounted, and of what kind it is."""
    found: list[tuple[str, str]] = []
    with open(f"{_PROC}/self/mountinfo", errors="surrogateescape") as stream:
        for line in stream:
            before, _, after = line.partition(" - ")
            found.append((before.split()[4], after.split()[0]))
    return found
