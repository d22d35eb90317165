"""The loop of whoever serves a sandbox: takes pier's requests, runs commands or hands them to workers, and reaps."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pier.network import plumbing
from pier.sandbox.linux import namespaces, wire, worker
from pier.sandbox.linux.kernel import OOM_SCORE, ProcessTable, oom_score, set_oom_score
from pier.sandbox.linux.namespaces import Enclosure
from pier.sandbox.linux.wire import OUT_OF_MEMORY

SPARE = 2
"""So many workers are kept though they have nothing to do."""
SURVIVORS = 50
"""How many processes that were left running are described; the others are counted."""
_WATCH_MS = 100
_RESTORE_MS = 1000
_PATIENCE = 5.0
"""Seconds that killing one command's tree may take before everything inside is killed instead."""


def set_limits(limits: dict[str, int]) -> None:
    """Limit what this process and its children may use, by the names of `resource`; never above what is allowed."""
    for name, value in limits.items():
        which = getattr(resource, name)
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))


class Init:
    """One sandbox's loop. Process 1 of a local one is a `First`, a container's is an `Attendant`."""

    own: worker.Worker | None = None
    """Runs a command without a fork, where this process may itself have commands as children."""

    def __init__(self, control: socket.socket, plan: dict[str, Any], processes: ProcessTable) -> None:
        self.control = control
        self.processes = processes
        self.confine = {name: plan[name] for name in ("no_new_privileges", "many_ids")}
        self.confine["filter"] = bytes.fromhex(plan["filter"])
        self.memory = plan["watched_memory"]
        self.restored = time.monotonic()
        self.workers: dict[int, socket.socket] = {}
        self.idle: list[int] = []
        self.jobs: dict[int, int] = {}
        self.strayed = False
        self.enclosure: Enclosure | None = None
        """The namespace of a verifier, while processes of the agent run next to it."""
        self.poll = select.poll()
        self.wake_in, self.wake_out = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wake_out, warn_on_full_buffer=False)

    def serve(self) -> None:
        self.poll.register(self.wake_in, select.POLLIN)
        self.poll.register(self.control, select.POLLIN)
        while True:
            for fd, _ in self.poll.poll(self._pause()):
                if fd == self.wake_in:
                    os.read(self.wake_in, 4096)
                    self._reap()
                elif fd == self.control.fileno():
                    try:
                        received = wire.receive(self.control)
                    except ValueError:
                        continue
                    if received is None:
                        return
                    self._take(*received)
                else:
                    self._hear(fd)
            if self.memory:
                self._watch_memory()
            if time.monotonic() > self.restored + _RESTORE_MS / 1000:
                self._restore_scores()

    def _pause(self) -> int | None:
        """Milliseconds until something is to be looked at, whether or not anybody asks."""
        if self.memory:
            return _WATCH_MS
        return None if self._is_alone() else _RESTORE_MS

    def add_worker(self, others: Sequence[int] = ()) -> None:
        """Fork a worker that waits for a command, so that commands do not wait for a fork. `others` are open files of
        a request, which it must not hold."""
        self.idle.append(self.hire(worker.main, others))

    def hire(
        self, work: Callable[[socket.socket, socket.socket, dict[str, Any]], None], others: Sequence[int] = ()
    ) -> int:
        """Fork somebody who is sent requests and says when he is free again."""
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
                work(theirs, self.control, self.confine)
            finally:
                os._exit(1)
        theirs.close()
        ours.setblocking(False)
        self.workers[pid] = ours
        self.poll.register(ours, select.POLLIN)
        return pid

    def _take(self, message: dict[str, Any], fds: list[int]) -> None:
        """Serve a request. Whatever goes wrong with one is its answer: no request ends this process."""
        try:
            self._do(message, fds)
        except Exception as error:  # noqa: BLE001 - the boundary to pier, see above
            wire.send(self.control, wire.failure(message, error))
        finally:
            for fd in fds:
                os.close(fd)

    def _do(self, message: dict[str, Any], fds: list[int]) -> None:
        if message["op"] in ("exec", "copy", "probe"):
            self._dispatch(message, fds)
        elif message["op"] == "signal":
            self._pass_on(message)
        elif message["op"] == "kill":
            self._kill(message["job"])
            wire.send(self.control, {"id": message["id"]})
        elif message["op"] == "kill_all":
            killed = self._kill_enclosed() if message.get("private") else self._kill_all()
            wire.send(self.control, {"id": message["id"], "killed": killed})
        elif message["op"] == "enclose":
            self._enclose(message)
        elif message["op"] == "release":
            self._release()
            wire.send(self.control, {"id": message["id"]})
        elif message["op"] == "listen":
            self._listen(message)
        elif message["op"] == "socket":
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
                wire.send(self.control, {"id": message["id"]}, [sock.fileno()])
        elif message["op"] == "network":
            self._change_network(message)
        else:
            raise ValueError(f"unknown operation {message['op']!r}")

    def _dispatch(self, message: dict[str, Any], fds: list[int]) -> None:
        alone = self._is_alone() and not message.get("private")
        if alone and message["op"] == "exec" and self.own is not None:
            self.jobs[message["id"]] = os.getpid()
            taken, fds[:] = fds[:], []
            self.own.take(message, taken)
            self._reap()
            return
        if alone and message["op"] == "copy":
            answer = worker.copy(message["request"], fds[0], small=True)
            if answer is not None:
                fds.clear()
                wire.send(self.control, {"id": message["id"]} | answer)
                return
        while True:
            pid = self._choose_worker(message, fds)
            try:
                wire.send(self.workers[pid], message, fds)
            except OSError:
                self._lose(pid)
                continue
            self.jobs[message["id"]] = pid
            return

    def _choose_worker(self, message: dict[str, Any], others: Sequence[int]) -> int:
        """A worker without a job, for the job in `message`."""
        if message.get("private"):
            return self._choose_enclosed(others)
        if not self.idle:
            self.add_worker(others)
        return self.idle.pop()

    def _rest(self, pid: int) -> None:
        """A worker has nothing to do any more."""
        if self.enclosure is not None and pid in self.enclosure.members:
            self.enclosure.idle.append(pid)
        elif len(self.idle) < SPARE:
            self.idle.append(pid)
        else:
            self._lose(pid)

    def _is_alone(self) -> bool:
        """Whether nothing runs inside. Else whatever does could stop a program before it has begun, or change a file
        under somebody's hands, and who then waits must not be this process."""
        return self.own is not None and not self.jobs and not self.strayed

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
        except (OSError, ValueError):
            received = None
        if received is None:
            self._lose(pid)
            self._sweep()
            return
        message = received[0]
        self.jobs.pop(message["free"], None)
        self._rest(pid)
        if message["answer"]:
            self._tell(message["answer"])

    def _lose(self, pid: int) -> None:
        """End a worker; a command that it had is over, and what is left of it falls to this process."""
        sock = self.workers.pop(pid, None)
        if sock is None:
            return
        self.poll.unregister(sock)
        sock.close()
        if pid in self.idle:
            self.idle.remove(pid)
        if self.enclosure is not None and pid in self.enclosure.members:
            self.enclosure.members.discard(pid)
            self.enclosure.idle = [other for other in self.enclosure.idle if other != pid]
        self._send_each([pid], signal.SIGKILL)
        for job in [job for job, owner in self.jobs.items() if owner == pid]:
            del self.jobs[job]
            self.strayed = True
            self._tell({"id": job, "exit": 137})

    def _tell(self, answer: dict[str, Any]) -> None:
        """Tell what came of a command."""
        wire.send(self.control, answer)

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
        """Kill whatever is below a worker, or (0) below process 1 but no worker; False if all had to be killed. Who
        inherits orphans knows at every moment whether there are any, even if each of them forks and exits at once."""
        began = time.monotonic()
        heir = worker or self.processes.first
        while True:
            self._send_each(self.processes.children(heir), signal.SIGKILL)
            chosen = self._strike(worker, still=time.monotonic() > began + _PATIENCE / 5)
            self._collect()
            if not any(self.processes.is_running(pid) for pid in chosen) and self.processes.is_barren(heir):
                self._collect(_PATIENCE)
                return True
            time.sleep(0.0005)
            if time.monotonic() > began + _PATIENCE:
                self._kill_all()
                return False

    def _strike(self, worker: int, *, still: bool) -> list[int]:
        """Kill what a look finds below a worker. For it all processes are held `still`, those of others too, when there
        are so many that they would fork faster than they are found."""
        asleep = self.processes.stopped() if still else []
        if still:
            self._hold_all()
        found = self.processes.all()
        chosen = [pid for pid in found if self._worker_of(pid, found) == worker and pid != worker]
        self._send_each(chosen, signal.SIGKILL)
        if still:
            self._send_each(found.keys() - set(chosen) - set(asleep), signal.SIGCONT)
        return chosen

    def _hold_all(self) -> None:
        """Stop every other process, by one signal that none can outrun, if that reaches nobody outside."""

    def _worker_of(self, pid: int, found: dict[int, int]) -> int:
        """The worker that a process is or is below; 0 if there is none."""
        while pid in found:
            if pid in self.workers:
                return pid
            pid = found[pid]
        return 0

    def _collect(self, seconds: float = worker.AT_ONCE) -> bool:
        """Reap what ended; whether a worker did. One that somebody has stopped would never answer, so it ends too."""
        lost = alone = False
        try:
            for pid, status in worker.ended(os.WUNTRACED, seconds):
                if pid in self.workers:
                    self._lose(pid)
                    lost = True
                elif self.own is not None and not os.WIFSTOPPED(status):
                    self.own.note(pid, status)
        except ChildProcessError:
            alone = True
        if self.own is not None and self.own.busy:
            lone = bool(self.workers) and not self.own.pid and self.processes.is_barren(self.processes.first)
            self.own.settle(alone=alone or lone)
        return lost

    def _kill_all(self) -> int:
        """One signal to every other process here, which none can outrun; then all of them are collected.

        Every process here is below a worker, unless its worker was lost. A worker without a job has no child, so if
        all of them are such there is nobody to count. Workers go too: a command may have changed their limits.
        """
        quiet = not self.jobs and not self.strayed
        self.strayed = False
        killed = 0 if quiet else self._count()
        self._send_each([-1], signal.SIGKILL)
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

    def _enclose(self, message: dict[str, Any]) -> None:
        """If anything runs inside, make a namespace for a verifier, and describe what runs; else see to it that nothing
        does."""
        self._release()
        found = [pid for pid in self.processes.all() if pid not in self.workers and self.processes.is_running(pid)]
        if found:
            try:
                self._begin_enclosure(message["folders"])
            except OSError as error:
                reason = error.strerror or str(error)
                wire.send(self.control, {"id": message["id"], "error": reason, "code": "cannot_isolate"})
                return
        else:
            self._kill_all()
        rows = [row for pid in found[:SURVIVORS] if (row := self.processes.describe(pid))]
        wire.send(self.control, {"id": message["id"], "survivors": rows, "count": len(found)})

    def _begin_enclosure(self, folders: dict[str, int]) -> None:
        pid = self._hire_enclosed((), folders=folders)
        try:
            self.enclosure = namespaces.wait_for_enclosure(self.workers[pid], list(folders))
        except OSError:
            self._lose(pid)
            self._with_rights(lambda: namespaces.unpin(folders))
            raise
        self.enclosure.members.add(pid)
        self.enclosure.idle.append(pid)

    def _choose_enclosed(self, others: Sequence[int]) -> int:
        place = self.enclosure
        if place is None:
            raise OSError(0, "the verifier's namespace is gone")
        if place.idle:
            return place.idle.pop()
        pid = self._hire_enclosed(others, namespace=place.namespace)
        place.members.add(pid)
        return pid

    def _hire_enclosed(self, others: Sequence[int], **where: Any) -> int:
        return self._with_rights(
            lambda: Init.hire(self, lambda *given: namespaces.work_enclosed(*given, **where), others)
        )

    def _with_rights(self, work: Callable[[], Any]) -> Any:
        """Do something that needs the right to mount."""
        return work()

    def _send_each(self, pids: Iterable[int], number: int) -> None:
        """Send a signal, also to processes of a verifier, which commands cannot signal."""
        send_each(pids, number)

    def _kill_enclosed(self) -> int:
        """Kill what runs in a verifier's namespace; how many processes that were. Those whose worker was killed from
        inside may have no worker above them any more, so the namespace decides."""
        place = self.enclosure
        if place is None:
            return 0
        found = self._with_rights(lambda: self._enclosed(place))
        count = sum(1 for pid in found if pid not in self.workers)
        for pid in list(place.members):
            if self._clear(pid):
                self._lose(pid)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)
        until = time.monotonic() + _PATIENCE
        while left := self._with_rights(lambda: self._enclosed(place)):
            self._send_each(left, signal.SIGKILL)
            self._collect()
            if time.monotonic() > until:
                self._kill_all()
                break
        return count

    def _enclosed(self, place: Enclosure) -> list[int]:
        return [pid for pid in self.processes.all() if self.processes.mounts(pid) == place.inode]

    def _release(self) -> None:
        """End a verifier's namespace, and whatever runs there."""
        place = self.enclosure
        if place is not None:
            self._kill_enclosed()
            self._with_rights(lambda: namespaces.unpin(place.paths))
            place.close()
            self.enclosure = None

    def _count(self) -> int:
        return sum(1 for pid in self.processes.all() if pid not in self.workers and self.processes.is_running(pid))

    def _watch_memory(self) -> None:
        """Without a control group: kill the largest process when all together have more than the limit."""
        sizes = {pid: self.processes.private_memory(pid) for pid in self.processes.all() if pid not in self.workers}
        if sum(sizes.values()) > self.memory:
            wire.send(self.control, {"id": OUT_OF_MEMORY})
            self._send_each([max(sizes, key=sizes.__getitem__)], signal.SIGKILL)

    def _restore_scores(self) -> None:
        """Put whatever left the line of those that are killed for want of memory back to its head."""
        self.restored = time.monotonic()
        for pid in self.processes.all().keys() - self.workers.keys():
            with contextlib.suppress(OSError, ValueError):
                if oom_score(self.processes.proc, pid) < OOM_SCORE:
                    set_oom_score(self.processes.proc, pid)

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


def send_each(pids: Iterable[int], number: int) -> None:
    """Send a signal to each process that is still there; -1 is every other process that this one knows of."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
