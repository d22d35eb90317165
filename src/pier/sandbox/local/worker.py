"""A process inside a sandbox that runs one command at a time, or copies one tree, and keeps what came of it together.

It is a child subreaper: whatever a command leaves behind, double-forked or in another session, stays below its worker,
so killing the worker's tree is killing all that the command started, and a worker without a child has left nothing
behind. When it is free again it says so to init, which passes the answer on to pier; while something of a command is
left it answers pier itself. It has the capabilities and the system call filter that commands get, since it forks them.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from typing import Any

from pier.network import plumbing
from pier.sandbox import seccomp, tree
from pier.sandbox.local import kernel, launch, users, wire

_ALL_CHILDREN = 0x40000000
"""__WALL: children count, whatever signal they send at their end."""


def main(own: socket.socket, control: socket.socket, confine: dict[str, Any]) -> None:
    """Serve init's requests until it hangs up."""
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    kernel.set_name("pier-worker")
    if confine["no_new_privileges"]:
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    if confine["filter"]:
        seccomp.load(confine["filter"])
    kernel.drop_capabilities()
    Worker(own, control, many_ids=confine["many_ids"]).serve()


class Worker:
    """One worker's loop: a request from init, its work, and the wait until nothing of it is left."""

    def __init__(self, own: socket.socket, control: socket.socket, *, many_ids: bool) -> None:
        self.many_ids = many_ids
        self.own = own
        self.control = control
        self.job = -1
        self.pid = 0
        self.busy = False
        self.answer: dict[str, Any] = {}

    def serve(self) -> None:
        signal.signal(signal.SIGCHLD, lambda *_: None)
        wake_in, wake_out = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake_out, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self.own, select.POLLIN)
        poll.register(wake_in, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == wake_in:
                    os.read(wake_in, 4096)
                    self._reap()
                    continue
                received = wire.receive(self.own)
                if received is None:
                    return
                self._take(*received)

    def _take(self, message: dict[str, Any], fds: list[int]) -> None:
        if message["op"] == "signal":
            if self.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, message["number"])
            return
        self.job, self.busy = message["id"], True
        if message["op"] == "exec":
            self._run(message, fds)
        elif message["op"] == "probe":
            self._probe(message["mode"])
        else:
            self._copy(message, fds[0])
        self._reap()

    def _run(self, message: dict[str, Any], fds: list[int]) -> None:
        master = -1
        try:
            self.pid, master = launch.launch(message, fds, many_ids=self.many_ids)
            if message["tell"]:
                wire.send(self.control, {"id": self.job, "started": True}, [master] if master >= 0 else [])
        except launch.CannotRun as error:
            if fds:
                with contextlib.suppress(OSError):
                    os.write(fds[2], f"{error}\n".encode())
            self._answer({"exit": error.exit_code, "message": str(error)})
        except launch.Refused as error:
            self._answer({"error": str(error), "code": error.code})
        except OSError as error:
            self._answer({"error": f"the command cannot be started: {error.strerror}", "code": "cannot_start"})
        finally:
            for fd in (*fds, master):
                if fd >= 0:
                    os.close(fd)
            os.chdir("/")

    def _copy(self, message: dict[str, Any], fd: int) -> None:
        request = message["request"]
        try:
            if isinstance(request.get("owner"), str):
                found = users.find(request["owner"])
                request["owner"] = [found.uid, found.gid]
        except users.NoSuchUser as error:
            os.close(fd)
            self._answer({"ok": False, "code": "no_such_user", "message": str(error)})
            return
        self._answer(tree.serve(request, fd))

    def _probe(self, mode: str) -> None:
        try:
            self._answer({"proof": plumbing.probe(mode)})
        except OSError as error:
            self._answer({"error": error.strerror or str(error), "code": "probe_failed"})

    def _answer(self, answer: dict[str, Any]) -> None:
        """Say what came of the job, once it is known whether anything of it is left: see `_reap`."""
        self.answer = {"id": self.job} | answer

    def _reap(self) -> None:
        """Collect what ended; tell pier of the command and init of the day when nothing of it is left. The last two go
        together, so that whoever has the answer finds the worker free."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | _ALL_CHILDREN)
            except ChildProcessError:
                self.pid = 0
                break
            if pid == 0:
                if self.answer:
                    wire.send(self.control, self.answer)
                    self.answer = {}
                return
            if pid == self.pid:
                self.pid = 0
                self._answer({"exit": _exit_code(status)})
        if self.busy:
            self.busy = False
            wire.send(self.own, {"free": self.job, "answer": self.answer})
            self.answer = {}


def _exit_code(status: int) -> int:
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
