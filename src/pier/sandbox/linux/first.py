"""Process 1 of a sandbox: builds its root, then serves pier as `Init` does.

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
import signal
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pier.network import last_resort
from pier.sandbox.linux import kernel, root, wire, worker
from pier.sandbox.linux.census import Census
from pier.sandbox.linux.init import Init, send_each, set_limits

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
    init = First(control, _BLANK | config, Census(proc, first=1))
    texts = root.prepare(config["masks"], many_ids=many_ids)
    proof, sockets = last_resort.begin()
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

    def __init__(self, control: socket.socket, plan: dict[str, Any], census: Census) -> None:
        super().__init__(control, plan, census)
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
