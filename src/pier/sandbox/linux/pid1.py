"""Process 1 of a sandbox: builds its root, then serves pier as `Init` does; and those that a zygote makes ahead.

It never executes a program, so its memory belongs to the namespace outside and nothing inside can trace or read it. Its
first thread keeps its rights over the sandbox's namespaces and sleeps until they are needed; the second one, which
serves pier and starts commands, has given them up, and so has all that it starts. When pier's end of the control
socket closes, it ends, and the kernel ends everything inside with it.

It begins without a plan, prepares what all sandboxes have alike, and waits for one. Making namespaces is the most
expensive part of a start and does not depend on what is started, so a zygote that starts one sandbox after another
makes a spare while it has nothing else to do. A spare holds no resources of a trial and ends when its zygote does.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import select
import signal
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pier.network import plumbing
from pier.sandbox.linux import kernel, root, wire, worker
from pier.sandbox.linux.init import Init, send_each, set_limits
from pier.sandbox.linux.kernel import OOM_SCORE_SERVING, ProcessTable, set_oom_score
from pier.sandbox.linux.root import HOST

GO = b"1"
"""Says that the ids are mapped."""

_BLANK = {"no_new_privileges": False, "watched_memory": 0}


def main(control: socket.socket, config: dict[str, Any]) -> None:
    """Run in the clone that a zygote made. Packets from `control`: one that says that the ids are mapped, the plan with
    the files that it counts on, and from then on pier's requests. Does not return."""
    try:
        if control.recv(1) == GO:
            _begin(control, config)
    except Exception as error:  # noqa: BLE001 - the boundary to pier, which waits for an answer
        with contextlib.suppress(OSError, ValueError):
            wire.receive(control)
            wire.send(control, wire.failure({"id": 0}, error))
    finally:
        os._exit(1)


def _begin(control: socket.socket, config: dict[str, Any]) -> None:
    many_ids = config["many_ids"]
    _become_root(many_ids=many_ids)
    root.mount_proc()
    pid_max, pages, queues = map(root.open_setting, ("pid_max", "shmall", "msgmni"))
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    proc = os.open("/b/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    init = First(control, _BLANK | config, ProcessTable(proc, first=1))
    texts = root.prepare(config["masks"], many_ids=many_ids)
    proof, sockets = plumbing.begin_without_network()
    _thread.start_new_thread(init.run, ())
    if not config["shifted"]:
        root.guard_init("/b/proc")
    received = wire.receive(control)
    if received is None:
        return
    plan, (_, *fds) = received
    trees, groups = fds[: len(fds) - plan["groups"]], fds[len(fds) - plan["groups"] :]
    try:
        init.join(groups)
        root.build(plan, texts, trees, many_ids=many_ids)
        init.check_joined()
        wire.send(control, {"id": 0, "ready": True, "proof": proof}, [sock.fileno() for sock in sockets])
    except Exception as error:  # noqa: BLE001 - as above
        wire.send(control, wire.failure({"id": 0}, error))
        return
    for sock in sockets:
        sock.close()
    root.limit_processes(pid_max, plan["processes"])
    root.limit_ipc(pages, queues, plan["memory"])
    root.leave()
    init.attend(plan)


def _become_root(*, many_ids: bool) -> None:
    """The saved group is another than root's, so that root inside may not set limits of this process. The kernel spares
    it all signals from inside that it has no handler for."""
    kernel.set_name("pier-init")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if many_ids:
        os.setgroups([])
    os.setresgid(0, 0, 1 if many_ids else 0)
    os.setresuid(0, 0, 0)
    os.umask(0o022)
    set_limits({"RLIMIT_CORE": 0})


class First(Init):
    """Process 1: a thread with the rights over its namespaces, which waits, and one without, which serves."""

    def __init__(self, control: socket.socket, plan: dict[str, Any], processes: ProcessTable) -> None:
        super().__init__(control, plan, processes)
        self.own = worker.Worker(control, self._on_free, many_ids=plan["many_ids"])
        self._plan: dict[str, Any] = {}
        self._wanted: Callable[[], Any] | None = None
        self._outcome: Any = None
        self._filter = self.confine["filter"]
        self._groups: list[int] = []
        self._join, self._joined, self._begin, self._ask, self._done = (_thread.allocate_lock() for _ in range(5))
        for lock in (self._join, self._joined, self._begin, self._ask, self._done):
            lock.acquire()

    def run(self) -> None:
        """The thread that serves. It gives its rights up before there is anything to serve."""
        try:
            kernel.enter_domain()
            worker.confine(self.confine)
            self.confine["filter"] = b""
            self._join.acquire()
            self._join_groups()
            self._joined.release()
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

    def join(self, groups: list[int]) -> None:
        """Have the other thread move this process into control groups, given by their open `cgroup.procs`, which it
        closes. The kernel may take milliseconds for each."""
        self._groups = groups
        self._join.release()

    def check_joined(self) -> None:
        """Wait until that is done; raise what failed."""
        self._joined.acquire()
        if self._outcome is not None:
            raise self._outcome

    def _join_groups(self) -> None:
        try:
            for fd in self._groups:
                os.write(fd, b"0")
        except OSError as error:
            self._outcome = OSError(error.errno, f"cannot join a control group: {error.strerror}")
        finally:
            for fd in self._groups:
                os.close(fd)

    def attend(self, plan: dict[str, Any]) -> None:
        """Let the other thread begin, and do for it what needs rights."""
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        self._plan = plan
        self._begin.release()
        while True:
            self._ask.acquire()
            assert self._wanted is not None
            try:
                self._outcome = self._wanted()
            except Exception as error:  # noqa: BLE001 - no request ends this process
                self._outcome = error
            finally:
                self._done.release()

    def _with_rights(self, work: Callable[[], Any]) -> Any:
        self._wanted = work
        self._ask.release()
        self._done.acquire()
        outcome, self._outcome = self._outcome, None
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _change_network(self, message: dict[str, Any]) -> None:
        change = super()._change_network
        self._with_rights(lambda: change(message))

    def _hire_enclosed(self, others: Sequence[int], **where: Any) -> int:
        """The thread with the rights has neither the filter of the other one nor its choice of cores."""
        where["like"] = {"filter": self._filter, "cores": os.sched_getaffinity(0)}
        return super()._hire_enclosed(others, **where)

    def _send_each(self, pids: Iterable[int], number: int) -> None:
        wanted = list(pids)
        if wanted and not _is_childless():
            self._with_rights(lambda: send_each(wanted, number))

    def _hold_all(self) -> None:
        self._send_each([-1], signal.SIGSTOP)

    def _on_free(self, job: int, answer: dict[str, Any]) -> None:
        self.jobs.pop(job, None)
        if answer:
            wire.send(self.control, answer)


def _is_childless() -> bool:
    """Whether this process has no child, dead or alive: then there is no other process here, since it inherits all."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT | worker.ALL_CHILDREN)
    except ChildProcessError:
        return True
    return False


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
            main(theirs, self._config)
        theirs.close()
        spare = Spare(pid, pidfd, ours, self.layers)
        try:
            write_maps(pid, maps)
            _put_in_line(pid)
            ours.send(GO)
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
        set_oom_score(proc, pid, OOM_SCORE_SERVING)
    finally:
        os.close(proc)


def _is_alive(spare: Spare) -> bool:
    return not select.select([spare.pidfd], [], [], 0)[0]
