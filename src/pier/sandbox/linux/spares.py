"""The inits that a zygote has cloned: into fresh namespaces, with all that sandboxes have alike, and without a plan.

Making namespaces is the dearest part of a start, and it does not depend on what is started. So a zygote that starts
one sandbox after another makes an init ahead while it has nothing else to do, and hands it the next plan. A spare holds
nothing of anybody's, is not a sandbox that could leak, and ends by itself when its zygote does.
"""

from __future__ import annotations

import os
import select
import signal
import socket
from typing import Any

from pier.sandbox.linux import first, kernel, oom
from pier.sandbox.linux.root import HOST

_NAMESPACES = (
    kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
    | kernel.CLONE_NEWCGROUP | kernel.CLONE_NEWNET
)  # fmt: skip
_MOST = 1
_FROM = 2
"""The start that spares are made from on: whoever starts a second sandbox will start more."""


class Spare:
    """An init that waits for its plan. `layers` says how many the zygote had mounted when it was cloned."""

    def __init__(self, pid: int, pidfd: int, control: socket.socket, layers: int) -> None:
        self.pid = pid
        self.pidfd = pidfd
        self.control = control
        self.layers = layers

    def close(self) -> None:
        os.close(self.pidfd)
        self.control.close()


class Spares:
    """The spares of one zygote, whose socket to pier they must not hold."""

    def __init__(self, sock: socket.socket, config: dict[str, Any]) -> None:
        self._sock = sock
        self._config = config
        self._waiting: dict[int, Spare] = {}
        self._taken = 0
        self.layers = 0
        """Counts the layers that the zygote mounted. A clone finds those that were mounted before it."""

    @property
    def wanted(self) -> bool:
        return self._taken >= _FROM and len(self._waiting) < _MOST

    def take(self) -> Spare:
        """An init for a sandbox: one that waits, else a new one."""
        self._taken += 1
        while self._waiting:
            spare = self._waiting.pop(next(iter(self._waiting)))
            if _is_alive(spare):
                return spare
            spare.close()
        return self.clone(self._config["maps"])

    def add(self) -> None:
        """Make one ahead. If that is not possible now, the start that needs it will tell."""
        try:
            spare = self.clone(self._config["maps"])
        except OSError:
            self._taken = 0
        else:
            self._waiting[spare.pid] = spare

    def forget(self, pid: int) -> None:
        """Note that a child of the zygote has ended."""
        if pid in self._waiting:
            self._waiting.pop(pid).close()

    def close(self) -> None:
        """Let go of everything: at the zygote's end, and in children that are not spares. Inits that wait then end."""
        self._sock.close()
        for spare in self._waiting.values():
            spare.close()

    def end(self) -> None:
        """End all that wait, and see them gone."""
        for pid in self._waiting:
            os.kill(pid, signal.SIGKILL)
        for pid in self._waiting:
            os.waitpid(pid, 0)

    def clone(self, maps: dict[str, str]) -> Spare:
        """A new one, whose user namespace has the ids that `maps` say."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid, pidfd = kernel.clone(_NAMESPACES)
        if pid == 0:
            signal.set_wakeup_fd(-1)
            self.close()
            ours.close()
            first.main(theirs, self._config)
        theirs.close()
        spare = Spare(pid, pidfd, ours, self.layers)
        try:
            write_maps(pid, maps)
            _put_in_line(pid)
            ours.send(first.GO)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            spare.close()
            raise
        return spare


def write_maps(pid: int, maps: dict[str, str]) -> None:
    """Say which ids the user namespace of a process has. Each map is one write."""
    for name, rows in maps.items():
        fd = os.open(f"{HOST}/proc/{pid}/{name}", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, rows.encode())
        finally:
            os.close(fd)


def _put_in_line(pid: int) -> None:
    proc = os.open(f"{HOST}/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        oom.put_in_line(proc, pid, oom.SERVING)
    finally:
        os.close(proc)


def _is_alive(spare: Spare) -> bool:
    return not select.select([spare.pidfd], [], [], 0)[0]
