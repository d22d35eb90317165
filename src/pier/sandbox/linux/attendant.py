"""Serves a container from outside: it is in the container's namespaces but not among its processes.

Forked from a zygote, it joins the container's control groups and namespaces; its children, the workers, are born into
the container's pid namespace, it is not. So nothing inside sees, signals or traces it, and commands, files and sockets
work as in a local sandbox. It ends when the container does, and ends it when pier is gone. Standard library only.
"""

from __future__ import annotations

import _thread
import contextlib
import errno
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pier.network import plumbing
from pier.sandbox.linux import kernel, namespaces, wire, worker
from pier.sandbox.linux.init import SPARE, Init, set_limits
from pier.sandbox.linux.kernel import OOM_SCORE_SERVING, ProcessTable, find_labels, set_oom_score
from pier.sandbox.linux.namespaces import Inner
from pier.sandbox.linux.root import HOST

_NAMESPACES = ("ipc", "uts", "net", "cgroup", "pid", "mnt")
_PATIENCE = 60.0
"""Seconds that killing everything may take before the container itself is killed."""
_CONTROLLERS = ("memory", "pids", "cpu", "devices", "freezer")


def main(control: socket.socket, pid: int, plan: dict[str, Any]) -> None:
    """Run in a fork of a zygote; `pid` is the container's first process as the host numbers it. Does not return."""
    try:
        kernel.set_name("pier-attendant")
        proc = os.open(f"{HOST}/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        set_oom_score(proc, score=OOM_SCORE_SERVING)
        container = os.pidfd_open(pid)
        inside = os.stat(f"{pid}/ns/pid", dir_fd=proc).st_ino
        if inside == os.stat("self/ns/pid", dir_fd=proc).st_ino:
            raise OSError(22, "the container shares the host's process namespace")
        labels = find_labels(proc, pid)
        _join_groups(pid, plan["container"])
        os.umask(0o022)
        forker = Forker()
        for run in (lambda work: work(), forker.run):
            run(lambda: _enter(pid, container))
        forker.run(kernel.enter_domain)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        os.setgroups([])
        _take_limits(pid)
        set_limits(plan["rlimits"])
        processes = ProcessTable(proc, first=pid, namespace=inside)
        attendant = Attendant(control, plan, processes, container, (proc, inside), forker)
        attendant.confine["give_labels"] = [partial(label.give, proc) for label in labels]
        proof, sockets = plumbing.begin_without_network()
        wire.send(control, {"id": 0, "ready": True, "proof": proof}, [sock.fileno() for sock in sockets])
        for sock in sockets:
            sock.close()
        attendant.serve()
        signal.pidfd_send_signal(container, signal.SIGKILL)
    except Exception as error:  # noqa: BLE001 - the boundary to pier, which waits for an answer
        with contextlib.suppress(OSError):
            wire.send(control, wire.failure({"id": 0}, error))
    finally:
        os._exit(1)


class Forker:
    """A thread that workers are forked from, so that all of them are in one domain and this process is in none. It has
    to be made before this process joins a process namespace, and joins the container's namespaces by itself."""

    def __init__(self) -> None:
        self._work: Callable[[], Any] = lambda: None
        self._outcome: Any = None
        self._ask, self._done = _thread.allocate_lock(), _thread.allocate_lock()
        self._ask.acquire()
        self._done.acquire()
        _thread.start_new_thread(self._serve, ())
        self._done.acquire()

    def _serve(self) -> None:
        try:
            kernel.unshare(kernel.CLONE_FS)
            while True:
                self._done.release()
                self._ask.acquire()
                try:
                    self._outcome = self._work()
                except OSError as error:
                    self._outcome = error
        finally:
            os._exit(1)

    def run(self, work: Callable[[], Any]) -> Any:
        """Do something by the thread."""
        self._work = work
        self._ask.release()
        self._done.acquire()
        if isinstance(self._outcome, OSError):
            raise self._outcome
        return self._outcome


class Attendant(Init):
    """Init's loop for a container that has a first process of its own."""

    def __init__(
        self,
        control: socket.socket,
        plan: dict[str, Any],
        processes: ProcessTable,
        container: int,
        inside: tuple[int, int],
        forker: Forker,
    ) -> None:
        super().__init__(control, plan, processes)
        self._container = container
        self._inside = inside
        self._inner: Inner | None = None
        self._former: list[Inner] = []
        """Namespaces whose keeper is gone. What is left of them counts until it is known to have ended."""
        self.poll.register(container, select.POLLIN)
        self._forker = forker

    def hire(
        self, work: Callable[[socket.socket, socket.socket, dict[str, Any]], None], others: Sequence[int] = ()
    ) -> int:
        hire = super().hire
        return self._forker.run(lambda: hire(work, others))

    def _hear(self, fd: int) -> None:
        if fd == self._container:
            os._exit(0)
        super()._hear(fd)

    def _do(self, message: dict[str, Any], fds: list[int]) -> None:
        if message["op"] in ("hub", "join"):
            self._by_child(message, lambda: self._share_network(message, fds))
        elif message["op"] == "seal":
            self._by_child(message, lambda: self._seal(message))
        elif message["op"] == "exec" and message.get("first"):
            self._begin(message, fds)
        else:
            super()._do(message, fds)

    def _tell(self, answer: dict[str, Any]) -> None:
        """A command that was killed because the container ends did not end by itself: that is another story."""
        if answer.get("exit") == 128 + signal.SIGKILL and self.processes.is_ending(self.processes.first):
            os._exit(0)
        super()._tell(answer)

    def _share_network(self, message: dict[str, Any], fds: list[int]) -> None:
        made: list[int] = []
        if message["op"] == "hub":
            made = plumbing.make_hub(message["networks"])
        else:
            plumbing.join(fds[0], [(network, host) for network, host in message["places"]])
        wire.send(self.control, {"id": message["id"]}, made)

    def _seal(self, message: dict[str, Any]) -> None:
        """Mount a file on itself, read-only. Nothing inside may undo that: commands have no right to mount."""
        path = message["path"]
        kept = os.statvfs(path).f_flag & (os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC)
        kernel.bind(path, path, read_only=True, flags=kept)
        wire.send(self.control, {"id": message["id"]})

    def _begin(self, message: dict[str, Any], fds: list[int]) -> None:
        """Run a program as process 1 of inner namespaces, which commands join from now on until it ends."""
        try:
            if self._inner is not None:
                raise OSError(errno.EBUSY, "another program is process 1 already")
            keeper = self.hire(namespaces.keep_program, fds)
            self.jobs[message["id"]] = keeper
            try:
                self._introduce(keeper, message, fds)
            except OSError:
                self.jobs.pop(message["id"], None)
                self._lose(keeper)
                raise
        except OSError as error:
            wire.send(self.control, {"id": message["id"], "error": str(error), "code": "cannot_start"})

    def _introduce(self, keeper: int, message: dict[str, Any], fds: list[int]) -> None:
        """Have a keeper make the namespaces, and let its program run once they are known here."""
        sock = self.workers[keeper]
        wire.send(sock, message, fds)
        told = namespaces.wait_for_program(sock)
        sock.setblocking(False)
        if "ready" in told:
            self._inner = Inner(self.processes.proc, self.processes.first, keeper)
            self._namespaces().add(self._inner.namespace)
            wire.send(sock, {"go": True})
        else:
            del self.jobs[message["id"]]
            self._lose(keeper)
            wire.send(self.control, told["answer"])

    def _namespaces(self) -> set[int]:
        assert self.processes.namespaces is not None
        return self.processes.namespaces

    def _choose_worker(self, message: dict[str, Any], others: Sequence[int]) -> int:
        """Commands run where the program is that is process 1, all else where nothing that it does can reach it."""
        if message["op"] == "exec" and self._inner is not None and not message.get("private"):
            with contextlib.suppress(OSError):  # nobody is born where process 1 is about to end
                return self._choose_inside(self._inner, others)
        return super()._choose_worker(message, others)

    def _choose_inside(self, place: Inner, others: Sequence[int]) -> int:
        if place.idle:
            return place.idle.pop()

        def enter() -> int:
            with place.entered():
                return Init.hire(self, worker.main, others)

        pid = self._forker.run(enter)
        place.members.add(pid)
        return pid

    def _with_rights(self, work: Callable[[], Any]) -> Any:
        """This process has them. A verifier's namespace is made where commands run."""
        with self._inner.entered() if self._inner is not None else contextlib.nullcontext():
            return work()

    def _rest(self, pid: int) -> None:
        place = self._inner
        if place is None or pid not in {place.keeper, *place.members}:
            super()._rest(pid)
        elif pid in place.members and len(place.idle) < SPARE:
            place.idle.append(pid)
        else:
            self._lose(pid)
            if pid == place.keeper:
                self._forget_former()

    def _lose(self, pid: int) -> None:
        super()._lose(pid)
        place = self._inner
        if place is not None and pid in place.members:
            place.members.discard(pid)
            place.idle = [other for other in place.idle if other != pid]
        elif place is not None and pid == place.keeper:
            self._inner = None
            self._former.append(place)
            for other in place.idle:
                super()._lose(other)

    def _forget_former(self) -> None:
        """Nothing is left in the namespaces from before. Until then they are held open, so that the kernel gives their
        numbers to no others."""
        for place in self._former:
            self._namespaces().discard(place.namespace)
            place.close()
        self._former.clear()

    def _kill_all(self) -> int:
        """As for a local sandbox, but by a child: here the signal would reach the host's processes. Whoever keeps that
        child from it is killed from here; what outlives even that goes with the container."""
        killed = sum(1 for pid in self.processes.all() if pid not in self.workers and self.processes.is_running(pid))
        deadline = time.monotonic() + _PATIENCE
        while not (self._is_done(self._kill_others) and self._is_deserted()):
            for pid in self.processes.all():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                signal.pidfd_send_signal(self._container, signal.SIGKILL)
                os._exit(0)
        self._forget_former()
        return killed

    def _is_deserted(self) -> bool:
        """Whether nothing runs in the container a moment after it was killed."""
        for pid in list(self.workers):
            self._lose(pid)
        for _ in range(1000):
            self._collect()
            if not any(self.processes.is_running(pid) for pid in self.processes.all()):
                return True
            time.sleep(0.001)
        return False

    def _change_network(self, message: dict[str, Any]) -> None:
        change = super()._change_network
        self._by_child(message, lambda: change(message))

    def _by_child(self, message: dict[str, Any], work: Callable[[], None]) -> None:
        """By a child, which the container's own /proc knows."""

        def try_it() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - pier waits for an answer
                wire.send(self.control, wire.failure(message, error))

        if not self._is_done(try_it):
            wire.send(
                self.control, {"id": message["id"], "error": "something in the container prevents it", "errno": 0}
            )

    def _is_done(self, work: Callable[[], None]) -> bool:
        """Do something by a child; whether it came to its end. What runs in the container may stop it or kill it, or
        leave no room for it."""
        try:
            child = os.fork()
        except OSError:
            return False
        if child == 0:
            code = 1
            try:
                work()
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        return status == 0

    def _kill_others(self) -> None:
        proc, inside = self._inside
        if os.stat("self/ns/pid", dir_fd=proc).st_ino == inside:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)


def _join_groups(pid: int, id: str) -> None:
    """Count as the container's own, for its limits and for the devices that it may open. Without the latter nothing
    would keep commands from the machine's disks, so that one is a must. Groups have the container's `id` in their
    names: a process without it has got the number of one that ended."""
    with open(f"{HOST}/proc/{pid}/cgroup") as stream:
        rows = [line.rstrip("\n").split(":", 2) for line in stream]
    if not any(id in path for _, _, path in rows):
        raise OSError(errno.ESRCH, "the container has ended")
    joined: set[str] = set()
    for _, controllers, path in rows:
        names = controllers.split(",")
        if controllers and not any(name in _CONTROLLERS for name in names):
            continue
        places = [f"/sys/fs/cgroup/{controllers}"] if controllers else ["/sys/fs/cgroup/unified", "/sys/fs/cgroup"]
        for place in places:
            with contextlib.suppress(OSError):
                with open(f"{HOST}{place}{path}/cgroup.procs", "w") as stream:
                    stream.write("0")
                joined.update(names)
                break
    keeper = "devices" if any("devices" in row[1].split(",") for row in rows) else ""
    if keeper not in joined:
        raise OSError(1, "cannot join the container's control group, which keeps devices from it")


def _take_limits(pid: int) -> None:
    """Have the limits that the engine gives to processes of the container, and not those of whoever started pier."""
    for name in (name for name in dir(resource) if name.startswith("RLIMIT_")):
        which = getattr(resource, name)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(which, resource.prlimit(pid, which))


def _enter(pid: int, container: int) -> None:
    fds = [os.open(f"{HOST}/proc/{pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in _NAMESPACES]
    # While the process is there, nothing else has its number: all that was found under it is of that one.
    signal.pidfd_send_signal(container, 0)
    for fd in fds:
        kernel.enter(fd)
        os.close(fd)
    os.chdir("/")
