"""Runs one command at a time inside a sandbox, or copies one tree, and keeps what came of it together.

Init is the first worker itself. Others are processes, forked while there is more to do than one thing: each is a child
subreaper, so whatever a command leaves behind, double-forked or in another session, stays below its worker, killing
the worker's tree is killing all that the command started, and a worker without a child has left nothing behind. While
something of a command is left its worker answers pier; when nothing is, the worker is free, and init passes the answer
on. A worker has the capabilities and the system call filter that commands get, since it forks them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

from pier.network import plumbing
from pier.sandbox import seccomp, tree
from pier.sandbox.linux import kernel, launch, wire
from pier.sandbox.linux.kernel import set_oom_score
from pier.sandbox.tree import serve_small

ALL_CHILDREN = 0x40000000
"""__WALL: children count, whatever signal they send at their end."""
AT_ONCE = 0.05
"""Seconds of reaping before requests are looked at: some may fork and exit as fast as they are reaped."""


def main(own: socket.socket, control: socket.socket, settings: dict[str, Any]) -> None:
    """Serve init's requests until it hangs up."""
    become_worker(settings)
    serve(own, control, settings)


def become_worker(settings: dict[str, Any]) -> None:
    """Inherit the orphans of commands, and have the rights of commands."""
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    kernel.set_name("pier-worker")
    confine(settings)


def serve(
    own: socket.socket, control: socket.socket, settings: dict[str, Any], first: Callable[[], None] | None = None
) -> None:
    """Serve init's requests. `first` is done by each command's process before it becomes the command; without it, the
    command gets the container's labels."""

    def free(job: int, answer: dict[str, Any]) -> None:
        wire.send(own, {"free": job, "answer": answer})

    if first is None and settings.get("give_labels"):
        first = functools.partial(give_labels, settings)
    extra = settings.get("extra", -1)
    _serve(own, Worker(control, free, many_ids=settings["many_ids"], first=first, extra=extra))


def confine(settings: dict[str, Any]) -> None:
    """Leave to this thread, and to what it starts, what commands may have, and the capability `extra`."""
    if settings["no_new_privileges"]:
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    if settings["filter"]:
        seccomp.load(settings["filter"])
    extra = (settings["extra"],) if "extra" in settings else ()
    kernel.drop_capabilities((*kernel.KEPT_CAPABILITIES, *extra))


def give_labels(settings: dict[str, Any]) -> None:
    """Have the program that this process becomes run with the labels of the container. Without them it is not run."""
    for give in settings.get("give_labels", ()):
        give()


def _serve(own: socket.socket, worker: Worker) -> None:
    signal.signal(signal.SIGCHLD, lambda *_: None)
    wake_in, wake_out = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(wake_out, warn_on_full_buffer=False)
    poll = select.poll()
    poll.register(own, select.POLLIN)
    poll.register(wake_in, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd == wake_in:
                os.read(wake_in, 4096)
            else:
                try:
                    received = wire.receive(own)
                except ValueError:
                    continue
                if received is None:
                    return
                worker.take(*received)
            worker.reap()


class Worker:
    """A request, its work, and the wait until nothing of it is left: then `free` is called with the job's number and
    its answer, if that was not given yet."""

    def __init__(
        self,
        control: socket.socket,
        free: Callable[[int, dict[str, Any]], None],
        *,
        many_ids: bool,
        first: Callable[[], None] | None = None,
        extra: int = -1,
    ) -> None:
        self.many_ids = many_ids
        self.first = first
        self.extra = extra
        self.control = control
        self.free = free
        self.job = -1
        self.pid = 0
        self.busy = False
        self.answer: dict[str, Any] = {}

    def take(self, message: dict[str, Any], fds: list[int]) -> None:
        """Begin a job, or pass a signal on to the one that runs. A job that cannot be done is answered, too."""
        if message["op"] == "signal":
            if self.pid:
                with contextlib.suppress(OSError, KeyError, TypeError, ValueError):
                    os.killpg(self.pid, message["number"])
            return
        self.job, self.busy = message["id"], True
        try:
            if message["op"] == "exec":
                self._run(message, fds)
            elif message["op"] == "probe":
                self._probe(message["mode"])
            else:
                self._answer(copy(message["request"], fds[0], many_ids=self.many_ids, extra=self.extra) or {})
        except Exception as error:  # noqa: BLE001 - the boundary to pier: no request ends this process
            self._answer(wire.failure(message, error))

    def _run(self, message: dict[str, Any], fds: list[int]) -> None:
        master = -1
        try:
            self.pid, master = launch.launch(message, fds, many_ids=self.many_ids, first=self.first, extra=self.extra)
            _put_in_line(self.pid)
            if message["tell"]:
                wire.send(self.control, {"id": self.job, "started": True}, [master] if master >= 0 else [])
        except launch.CannotRun as error:
            if fds:
                with contextlib.suppress(OSError):
                    os.write(fds[2], f"{error}\n".encode())
            self._answer({"exit": error.exit_code, "message": str(error)})
        except launch.NotStarted as error:
            self._answer({"error": str(error), "code": error.code})
        except OSError as error:
            self._answer({"error": f"the command cannot be started: {error.strerror}", "code": "cannot_start"})
        finally:
            for fd in (*fds, master):
                if fd >= 0:
                    os.close(fd)
            os.chdir("/")

    def _probe(self, mode: str) -> None:
        try:
            self._answer({"proof": plumbing.probe(mode)})
        except OSError as error:
            self._answer({"error": error.strerror or str(error), "code": "probe_failed"})

    def _answer(self, answer: dict[str, Any]) -> None:
        """Say what came of the job, once it is known whether anything of it is left."""
        self.answer = {"id": self.job} | answer

    def reap(self) -> None:
        """Collect what ended."""
        try:
            for pid, status in ended():
                self.note(pid, status)
        except ChildProcessError:
            self.settle(alone=True)
        else:
            self.settle(alone=False)

    def note(self, pid: int, status: int) -> None:
        """A process has ended."""
        if pid == self.pid:
            self.pid = 0
            self._answer({"exit": _exit_code(status)})

    def settle(self, *, alone: bool) -> None:
        """Tell pier of the command, and of the day when nothing of it is left. The last two go together, so that
        whoever has the answer finds the worker free."""
        if alone and self.busy:
            self.busy, self.pid = False, 0
            answer, self.answer = self.answer, {}
            self.free(self.job, answer)
        elif self.answer and not alone:
            wire.send(self.control, self.answer)
            self.answer = {}


def copy(
    request: dict[str, Any], fd: int, *, small: bool = False, many_ids: bool = True, extra: int = -1
) -> dict[str, Any] | None:
    """Do a request about files, whose owner may be given by name. Closes `fd`; or gives None, if it is to be done only
    if it is small and may not be."""
    if "user" in request:
        return None if small else _copy_as(request, fd, many_ids, extra)
    if isinstance(owner := request.get("owner"), str):
        try:
            found = launch.find_user(owner)
        except launch.NoSuchUser as error:
            os.close(fd)
            return {"ok": False, "code": "no_such_user", "message": str(error)}
        request["owner"] = [found.uid, found.gid]
    return serve_small(request, fd) if small else tree.serve(request, fd)


def _copy_as(request: dict[str, Any], fd: int, many_ids: bool, extra: int) -> dict[str, Any]:
    """Do a request about files as the user that it names, in a process that has become this user."""
    try:
        try:
            user = launch.find_user(request["user"])
        except launch.NoSuchUser as error:
            return {"ok": False, "code": "no_such_user", "message": str(error)}
        if not many_ids and (user.uid or user.gid):
            text = f"cannot act as user {request['user']!r}: this sandbox has only one user id"
            return {"ok": False, "code": "single_id", "message": text}
        request["owner"] = [user.uid, user.gid] if request["op"] == "unpack" else None
        answer = os.memfd_create("pier-answer", os.MFD_CLOEXEC)
        try:
            return _wait_for_copy(_fork_copy(request, fd, user, extra, answer), answer)
        finally:
            os.close(answer)
    finally:
        os.close(fd)


def _fork_copy(request: dict[str, Any], fd: int, user: launch.User, extra: int, answer: int) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            if user.uid or user.gid:
                kernel.become(user.groups, user.gid, user.uid, extra)
            os.write(answer, json.dumps(tree.serve(request, fd)).encode())
        finally:
            os._exit(0)
    return pid


def _wait_for_copy(pid: int, answer: int) -> dict[str, Any]:
    """That user's other processes may kill or stop the one that copies."""
    _, status = os.waitpid(pid, os.WUNTRACED)
    if os.WIFSTOPPED(status):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    try:
        return json.loads(os.pread(answer, os.fstat(answer).st_size, 0))
    except ValueError:
        return {"ok": False, "message": "the process that copied was killed or stopped", "code": "sandbox"}


def ended(also: int = 0, seconds: float = AT_ONCE) -> Iterator[tuple[int, int]]:
    """Reap what has ended, and `also` what `os.waitpid` has a flag for. If there may be more when the time is over,
    this process is woken for it. A ChildProcessError says that there is no child any more."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pid, status = os.waitpid(-1, os.WNOHANG | ALL_CHILDREN | also)
        if pid == 0:
            return
        yield pid, status
    signal.raise_signal(signal.SIGCHLD)


def _put_in_line(pid: int) -> None:
    """Let the kernel end a command before whoever serves it; what this does not reach, init does within a second."""
    with contextlib.suppress(OSError):
        proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            set_oom_score(proc, pid)
        finally:
            os.close(proc)


def _exit_code(status: int) -> int:
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
