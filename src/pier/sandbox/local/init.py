"""Process 1 of a sandbox: builds its root, runs commands or hands them to workers, and reaps.

It never executes a program, so its memory belongs to the namespace outside and nothing inside can trace or read it. Its
first thread keeps its rights over the sandbox's own namespaces and sleeps until they are needed; the second one, which
serves pier and starts commands, has given them up, and so has all that it starts. When pier's end of the control
socket closes, it ends, and the kernel ends everything inside with it.

It begins without a plan, readies what all sandboxes have alike, and waits: for long, as a spare, or not.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Sequence
from typing import Any

from pier.network import counting, plumbing
from pier.sandbox.local import kernel, root, wire, worker
from pier.sandbox.local.census import Census
from pier.sandbox.local.wire import OUT_OF_MEMORY

GO = b"1"
_BLANK = {"no_new_privileges": False, "watched_memory": 0}
_SPARE = 2
_WATCH_MS = 100
_PATIENCE = 5.0
"""Seconds that killing one command's tree may take before everything inside is killed instead."""


def main(control: socket.socket, config: dict[str, Any]) -> None:
    """Run in the clone that a zygote made. Packets from `control`: one that says that the ids are mapped, the plan with
    the files that it counts on, and from then on pier's requests. Does not return."""
    try:
        if control.recv(1) == GO:
            _begin(control, config)
    except OSError as error:
        with contextlib.suppress(OSError):
            wire.receive(control)
            wire.send(control, {"id": 0, "error": str(error), "errno": error.errno or 0})
    finally:
        os._exit(1)


def _begin(control: socket.socket, config: dict[str, Any]) -> None:
    many_ids = config["many_ids"]
    _become_root(many_ids=many_ids)
    root.mount_proc()
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    proc = os.open("/b/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    init = First(control, _BLANK | config, Census(proc, without=frozenset({1})))
    texts = root.prepare(config["masks"], many_ids=many_ids)
    proof = plumbing.probe("none")
    _thread.start_new_thread(init.run, ())
    received = wire.receive(control)
    if received is None:
        return
    plan, (_, *trees) = received
    try:
        root.build(plan, texts, trees, many_ids=many_ids)
        wire.send(control, {"id": 0, "ready": True, "proof": proof})
    except OSError as error:
        wire.send(control, {"id": 0, "error": str(error), "errno": error.errno or 0})
        return
    root.leave()
    init.attend(plan)


def _become_root(*, many_ids: bool) -> None:
    kernel.set_name("pier-init")
    if many_ids:
        os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    os.umask(0o022)
    set_limits({"RLIMIT_CORE": 0})


def set_limits(limits: dict[str, int]) -> None:
    """Limit what this process and its children may use, by the names of `resource`; never above what is allowed."""
    for name, value in limits.items():
        which = getattr(resource, name)
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))


class Init:
    """The loop of whoever serves a sandbox, with workers for what there is to do."""

    own: worker.Worker | None = None
    """Runs a command without a fork, where this process may itself have commands as children."""

    def __init__(self, control: socket.socket, plan: dict[str, Any], census: Census) -> None:
        self.control = control
        self.census = census
        self.confine = {name: plan[name] for name in ("no_new_privileges", "many_ids")}
        self.confine["filter"] = bytes.fromhex(plan["filter"])
        self.memory = plan["watched_memory"]
        self.workers: dict[int, socket.socket] = {}
        self.idle: list[int] = []
        self.jobs: dict[int, int] = {}
        self.strayed = False
        self.poll = select.poll()
        self.wake_in, self.wake_out = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wake_out, warn_on_full_buffer=False)

    def serve(self) -> None:
        self.poll.register(self.wake_in, select.POLLIN)
        self.poll.register(self.control, select.POLLIN)
        while True:
            for fd, _ in self.poll.poll(_WATCH_MS if self.memory else None):
                if fd == self.wake_in:
                    os.read(self.wake_in, 4096)
                    self._reap()
                elif fd == self.control.fileno():
                    received = wire.receive(self.control)
                    if received is None:
                        return
                    self._take(*received)
                else:
                    self._hear(fd)
            if self.memory:
                self._watch_memory()

    def add_worker(self, others: Sequence[int] = ()) -> None:
        """Fork a worker that waits for a command, so that commands do not wait for a fork. `others` are open files of
        a request, which it must not hold."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            try:
                signal.set_wakeup_fd(-1)
                for sock in (ours, *self.workers.values()):
                    sock.close()
                os.close(self.wake_in)
                os.close(self.wake_out)
                for fd in others:
                    os.close(fd)
                worker.main(theirs, self.control, self.confine)
            finally:
                os._exit(1)
        theirs.close()
        ours.setblocking(False)
        self.workers[pid] = ours
        self.idle.append(pid)
        self.poll.register(ours, select.POLLIN)

    def _take(self, message: dict[str, Any], fds: list[int]) -> None:
        try:
            if message["op"] in ("exec", "copy", "probe"):
                self._dispatch(message, fds)
            elif message["op"] == "signal":
                self._pass_on(message)
            elif message["op"] == "kill":
                self._kill(message["job"])
                wire.send(self.control, {"id": message["id"]})
            elif message["op"] == "kill_all":
                wire.send(self.control, {"id": message["id"], "killed": self._kill_all()})
            elif message["op"] == "listen":
                self._listen(message)
            elif message["op"] == "network":
                self._change_network(message)
            elif message["op"] == "unrouted":
                wire.send(self.control, {"id": message["id"], "count": counting.unrouted(self.census.proc)})
        except OSError as error:
            wire.send(self.control, {"id": message["id"], "error": str(error), "errno": error.errno or 0})
        finally:
            for fd in fds:
                os.close(fd)

    def _dispatch(self, message: dict[str, Any], fds: list[int]) -> None:
        if self.own is not None and message["op"] == "exec" and not self.own.busy:
            self.jobs[message["id"]] = os.getpid()
            taken, fds[:] = fds[:], []
            self.own.take(message, taken)
            self._reap()
            return
        if self.own is not None and message["op"] == "copy":
            answer = worker.copy(message["request"], fds[0], small=True)
            if answer is not None:
                fds.clear()
                wire.send(self.control, {"id": message["id"]} | answer)
                return
        while True:
            if not self.idle:
                self.add_worker(fds)
            pid = self.idle.pop()
            try:
                wire.send(self.workers[pid], message, fds)
            except OSError:
                self._lose(pid)
                continue
            self.jobs[message["id"]] = pid
            return

    def _pass_on(self, message: dict[str, Any]) -> None:
        pid = self.jobs.get(message["job"])
        if pid in self.workers:
            wire.send(self.workers[pid], message)
        elif pid is not None and self.own is not None:
            self.own.take(message, [])

    def _hear(self, fd: int) -> None:
        pid = next((pid for pid, sock in self.workers.items() if sock.fileno() == fd), None)
        if pid is None:
            return
        try:
            received = wire.receive(self.workers[pid])
        except BlockingIOError:
            return
        except OSError:
            received = None
        if received is None:
            self._lose(pid)
            self._sweep()
            return
        message = received[0]
        self.jobs.pop(message["free"], None)
        if len(self.idle) < _SPARE:
            self.idle.append(pid)
        else:
            self._lose(pid)
        if message["answer"]:
            wire.send(self.control, message["answer"])

    def _lose(self, pid: int) -> None:
        """End a worker; a command that it had is over, and what is left of it falls to this process."""
        sock = self.workers.pop(pid, None)
        if sock is None:
            return
        self.poll.unregister(sock)
        sock.close()
        if pid in self.idle:
            self.idle.remove(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        for job in [job for job, owner in self.jobs.items() if owner == pid]:
            del self.jobs[job]
            self.strayed = True
            wire.send(self.control, {"id": job, "exit": 137, "lost": True})

    def _reap(self) -> None:
        if self._collect():
            self._sweep()

    def _kill(self, job: int) -> None:
        """Kill a command and all that it started. A worker goes last, so that nothing of it falls to this process."""
        pid = self.jobs.get(job)
        if pid in self.workers:
            if self._clear(pid):
                self._lose(pid)
        elif pid is not None:
            self._clear(0)

    def _sweep(self) -> None:
        """Kill the trees of workers that are gone. While a command of this process's own runs there is no telling them
        apart from what that one left, and they go with it."""
        if self.own is None or not self.own.busy:
            self._clear(0)

    def _clear(self, worker: int) -> bool:
        """Kill whatever is below a worker, or (0) below this process but no worker; False if all had to be killed."""
        deadline = time.monotonic() + _PATIENCE
        while True:
            found = self.census.take()
            chosen = [pid for pid in found if self._worker_of(pid, found) == worker and pid != worker]
            for pid in chosen:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._collect()
            if not any(self.census.is_running(pid) for pid in chosen):
                return True
            time.sleep(0.0005)
            if time.monotonic() > deadline:
                self._kill_all()
                return False

    def _worker_of(self, pid: int, found: dict[int, int]) -> int:
        """The worker that a process is or is below; 0 if there is none."""
        while pid in found:
            if pid in self.workers:
                return pid
            pid = found[pid]
        return 0

    def _collect(self) -> bool:
        """Reap what ended; whether a worker did."""
        lost = alone = False
        try:
            while (ended := os.waitpid(-1, os.WNOHANG | worker.ALL_CHILDREN))[0]:
                if ended[0] in self.workers:
                    self._lose(ended[0])
                    lost = True
                elif self.own is not None:
                    self.own.note(*ended)
        except ChildProcessError:
            alone = True
        if self.own is not None and self.own.busy:
            self.own.settle(alone=alone or (bool(self.workers) and self._has_workers_only()))
        return lost

    def _has_workers_only(self) -> bool:
        me = os.getpid()
        return all(parent != me or pid in self.workers for pid, parent in self.census.take().items())

    def _kill_all(self) -> int:
        """One signal to every other process here, which none can outrun; then all of them are collected.

        Every process here is below a worker, unless its worker was lost. A worker without a job has no child, so if
        all of them are such there is nobody to count. Workers go too: a command may have changed their limits.
        """
        quiet = not self.jobs and not self.strayed
        self.strayed = False
        killed = 0 if quiet else self._count()
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:
                ended = os.waitpid(-1, 0)
                if self.own is not None:
                    self.own.note(*ended)
        for pid in list(self.workers):
            self._lose(pid)
        if self.own is not None:
            self.own.settle(alone=True)
        return killed

    def _count(self) -> int:
        return sum(1 for pid in self.census.take() if pid not in self.workers and self.census.is_running(pid))

    def _watch_memory(self) -> None:
        """Without a control group: kill the largest process when all together have more than the limit."""
        sizes = {pid: self.census.private_memory(pid) for pid in self.census.take() if pid not in self.workers}
        if sum(sizes.values()) > self.memory:
            wire.send(self.control, {"id": OUT_OF_MEMORY})
            with contextlib.suppress(ProcessLookupError):
                os.kill(max(sizes, key=sizes.__getitem__), signal.SIGKILL)

    def _change_network(self, message: dict[str, Any]) -> None:
        plumbing.disconnect()
        if message["mode"] == "none":
            wire.send(self.control, {"id": message["id"], "proof": plumbing.probe("none")})
            return
        fds = plumbing.connect([(prefix, length) for prefix, length in message["prefixes"]])
        try:
            wire.send(self.control, {"id": message["id"]}, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _listen(self, message: dict[str, Any]) -> None:
        family = socket.AF_INET6 if ":" in message["host"] else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((message["host"], message["port"]))
            sock.listen(1024)
            answer = {"id": message["id"], "port": sock.getsockname()[1]}
            wire.send(self.control, answer, [sock.fileno()])


class First(Init):
    """Process 1: a thread with the rights over its namespaces, which waits, and one without, which serves."""

    def __init__(self, control: socket.socket, plan: dict[str, Any], census: Census) -> None:
        super().__init__(control, plan, census)
        self.own = worker.Worker(control, self._on_free, many_ids=plan["many_ids"])
        self._plan: dict[str, Any] = {}
        self._wanted: dict[str, Any] | None = None
        self._begin, self._ask, self._done = (_thread.allocate_lock() for _ in range(3))
        for lock in (self._begin, self._ask, self._done):
            lock.acquire()

    def run(self) -> None:
        """The thread that serves. It gives its rights up before there is anything to serve."""
        try:
            worker.confine(self.confine)
            self.confine["filter"] = b""
            self._begin.acquire()
            self.memory = self._plan["watched_memory"]
            self.confine["no_new_privileges"] = self._plan["no_new_privileges"]
            if self._plan["no_new_privileges"]:
                kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
            set_limits(self._plan["rlimits"])
            if self._plan["cores"]:
                os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: self._plan["cores"]])
            self.serve()
        finally:
            os._exit(1)

    def attend(self, plan: dict[str, Any]) -> None:
        """Let the other thread begin, and do for it what needs rights."""
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        self._plan = plan
        self._begin.release()
        while True:
            self._ask.acquire()
            message = self._wanted
            assert message is not None
            try:
                super()._change_network(message)
            except OSError as error:
                wire.send(self.control, {"id": message["id"], "error": str(error), "errno": error.errno or 0})
            finally:
                self._done.release()

    def _change_network(self, message: dict[str, Any]) -> None:
        self._wanted = message
        self._ask.release()
        self._done.acquire()

    def _on_free(self, job: int, answer: dict[str, Any]) -> None:
        self.jobs.pop(job, None)
        if answer:
            wire.send(self.control, answer)
