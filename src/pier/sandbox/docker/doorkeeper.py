"""The helper's warm process, from which the attendants of containers are forked. Standard library only.

As a zygote does for local sandboxes, it has one thread and has everything imported beforehand. It ends when the helper
does.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
from typing import Any

from pier.sandbox import tree
from pier.sandbox.linux import attendant, changes, kernel, unlinked, wire

_MOST_CHANGES = 20_000
_LONGEST_CHANGES = 1 << 20
"""Letters of their paths. More than that the engine is asked for, which does not hold up what else pier is told."""


def fork_doorkeeper() -> socket.socket:
    """Start it; the socket to it. Call this before there is a second thread or a loop."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        try:
            ours.close()
            nothing = os.open(os.devnull, os.O_RDWR)
            for number in (0, 1):
                os.dup2(nothing, number)
            os.close(nothing)
            _serve(theirs)
        finally:
            os._exit(0)
    theirs.close()
    return ours


def _serve(sock: socket.socket) -> None:
    kernel.set_name("pier-doorkeeper")
    tree.warm()
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, _reap)
    with contextlib.suppress(ConnectionError):
        while True:
            try:
                received = wire.receive(sock)
            except ValueError:
                continue
            if received is None:
                return
            message, fds = received
            try:
                _enter(sock, message, fds) if message["op"] == "enter" else _look(sock, message)
            except Exception as error:  # noqa: BLE001 - the boundary to pier: no request ends this process
                wire.send(sock, wire.failure(message, error))
            finally:
                for fd in fds:
                    os.close(fd)


def _enter(sock: socket.socket, message: dict[str, Any], fds: list[int]) -> None:
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        sock.close()
        attendant.main(socket.socket(fileno=fds[0]), message["pid"], message["plan"])
    pidfd = os.pidfd_open(pid)
    try:
        wire.send(sock, {"id": message["id"], "pid": pid}, [pidfd])
    finally:
        os.close(pidfd)


def _look(sock: socket.socket, message: dict[str, Any]) -> None:
    """Have a child look at the files of a container."""
    if os.fork() == 0:
        try:
            found = _measure(message) if message["op"] == "measure" else _compare(message)
            wire.send(sock, {"id": message["id"]} | found)
        finally:
            os._exit(0)


def _measure(message: dict[str, Any]) -> dict[str, Any]:
    return {"bytes": unlinked.measure("/proc", message["pid"], *message["paths"])}


def _compare(message: dict[str, Any]) -> dict[str, Any]:
    """What differs between layers; None if they cannot be read from here or it is too much to tell."""
    try:
        found = changes.compare(message["path"], message["layers"], _MOST_CHANGES)
    except (OSError, changes.TooMany):
        return {"changes": None}
    return {"changes": found if sum(len(row[0]) for row in found) <= _LONGEST_CHANGES else None}


def _reap(*_: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
