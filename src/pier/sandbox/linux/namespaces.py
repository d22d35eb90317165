"""Namespaces that are made inside a running sandbox: one for a verifier, and one for a program that must be process 1.

The verifier's is a mount namespace (`Enclosure`) that processes which an agent left running cannot enter, look into or
change. Its directories (`/tests`, `/logs/verifier`) are private tmpfs mounts. Its processes hold one capability that no
command of an agent ever has, so the kernel refuses survivors everything that asks for the right to trace them: ptrace,
`setns`, `process_vm_writev`, `pidfd_getfd` and most of `/proc/PID`. In the namespace of the survivors the same paths
are pinned by read-only mounts, since the kernel refuses to rename or remove a directory that is a mount point in the
caller's own namespace: otherwise a survivor could move the private mounts away and put its own directories in their
place.

A container's first process only keeps it open. A program that has to be process 1, an init system for example, is that
in an inner process namespace (`Inner`), with a /proc that shows it, and later commands join it there. Root file system,
network and limits are the container's and outlive the program: when it ends, what it started ends, and it can be
started again. A process outside the inner namespace (the keeper) waits for its end.

Standard library only, and nothing is imported later: this runs in processes whose root has changed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from pier.sandbox.linux import kernel, wire, worker

CAPABILITY = 35
"""CAP_WAKE_ALARM: it lets a process set timers that wake a suspended machine, and nothing else."""

_SECONDS = 10.0
"""How long the first worker may take to make the namespace."""
_FLAGS = kernel.MS_NOSUID | kernel.MS_NODEV
_PIN = "mode=755,size=4k,nr_inodes=2"
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Enclosure:
    """The namespace as the process that serves the sandbox sees it. `paths` are pinned in the sandbox's namespace."""

    def __init__(self, namespace: int, paths: list[str]) -> None:
        self.namespace = namespace
        self.inode = os.fstat(namespace).st_ino
        self.paths = paths
        self.idle: list[int] = []
        """Workers inside that have nothing to do."""
        self.members: set[int] = set()
        """All workers inside."""

    def close(self) -> None:
        os.close(self.namespace)


def work_enclosed(
    own: socket.socket,
    control: socket.socket,
    settings: dict[str, Any],
    *,
    folders: dict[str, int] | None = None,
    namespace: int = -1,
    like: dict[str, Any] | None = None,
) -> None:
    """A worker inside: makes the namespace with `folders` (paths and modes), or joins one that was made. Run in a fork
    that has the right to mount. `like` has the filter and the cores of other workers, if this process has not."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    settings = settings | {"extra": CAPABILITY}
    try:
        if folders is None:
            kernel.enter(namespace)
        else:
            namespace = make_enclosure(folders)
        os.chdir("/")
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if not kernel.prctl(kernel.PR_CAPBSET_READ, CAPABILITY):
            raise OSError(errno.EPERM, "the capability that sets a verifier apart is not available here")
        if like is not None:
            os.sched_setaffinity(0, like["cores"])
            settings["filter"] = like["filter"]
        worker.become_worker(settings)
    except OSError as error:
        wire.send(own, {"error": str(error)})
        return
    if folders is not None:
        wire.send(own, {"ready": True}, [namespace])
        os.close(namespace)
    worker.serve(own, control, settings)


def wait_for_enclosure(own: socket.socket, paths: list[str]) -> Enclosure:
    """What the first worker made; OSError if it could not."""
    own.settimeout(_SECONDS)
    try:
        received = wire.receive(own)
    finally:
        own.setblocking(False)
    if received is None or "error" in received[0]:
        raise OSError(0, received[0]["error"] if received else "the process that was to make the namespace has ended")
    return Enclosure(received[1][0], paths)


def make_enclosure(folders: dict[str, int]) -> int:
    """Pin the paths in this namespace, then leave it for a new one in which they are private; the new one."""
    known = {line.split()[0] for line in _lines("/proc/self/mountinfo")}
    try:
        for path in folders:
            *above, last = _steps(path)
            for step in above:
                _pin(step, known, lambda: kernel.mount(".", ".", "", kernel.MS_BIND | kernel.MS_REC))
            _pin(last, known, lambda: kernel.mount("tmpfs", ".", "tmpfs", _FLAGS | kernel.MS_RDONLY, _PIN))
    except OSError:
        unpin(folders)
        raise
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    for path, mode in folders.items():
        os.chdir(path)
        kernel.mount("tmpfs", ".", "tmpfs", _FLAGS, f"mode={mode:o}")
    return os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)


def unpin(paths: Iterable[str]) -> None:
    """Take the pins away again, as far as there are any, from within the namespace that has them."""
    for path in paths:
        for step in reversed(_steps(path)):
            with contextlib.suppress(OSError):
                kernel.unmount(step, follow=False)


def _steps(path: str) -> list[str]:
    """`/a` and `/a/b` for `/a/b`."""
    parts = path.strip("/").split("/")
    return ["/" + "/".join(parts[: count + 1]) for count in range(len(parts))]


def _pin(path: str, known: set[str], mount: Callable[[], None]) -> None:
    """Mount something at `path`, and make sure that this is where it came to: others may rename directories until
    then. All steps above are pinned already."""
    fd = _real_directory(path)
    try:
        os.fchdir(fd)
        mount()
    finally:
        os.close(fd)
    fd = os.open(path, _FOLDER)
    try:
        found = next(line.split()[1] for line in _lines(f"/proc/self/fdinfo/{fd}") if line.startswith("mnt_id:"))
    finally:
        os.close(fd)
    if found in known:
        raise OSError(errno.EAGAIN, f"cannot pin {path}: it was replaced meanwhile")


def _real_directory(path: str) -> int:
    """The directory at `path`, made if something else is there."""
    for _ in range(100):
        try:
            return os.open(path, _FOLDER)
        except FileNotFoundError:
            pass
        except NotADirectoryError:
            os.unlink(path)
        try:
            os.mkdir(path, 0o755)
        except FileExistsError:
            continue
    raise OSError(errno.EAGAIN, f"cannot make the directory {path}: it is being replaced all the time")


def _lines(path: str) -> list[str]:
    with open(path, errors="surrogateescape") as stream:
        return stream.read().splitlines()


_PROC = "/proc"
_PROC_FLAGS = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC


class Inner:
    """The inner namespaces, as whoever serves the container sees them. `proc` is the /proc of its own namespace."""

    def __init__(self, proc: int, first: int, keeper: int) -> None:
        self.keeper = keeper
        self.idle: list[int] = []
        """Workers inside that have nothing to do."""
        self.members: set[int] = set()
        """All workers inside."""
        self._inside = [_open_namespace(proc, keeper, name) for name in ("pid_for_children", "mnt")]
        self._outside = [_open_namespace(proc, first, name) for name in ("pid", "mnt")]
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


def _open_namespace(proc: int, pid: int, name: str) -> int:
    return os.open(f"{pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)


def keep_program(own: socket.socket, control: socket.socket, settings: dict[str, Any]) -> None:
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


def wait_for_program(own: socket.socket) -> dict[str, Any]:
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
    kernel.mount("proc", _PROC, "proc", _PROC_FLAGS)
    for path, kind in below:
        if kind == "proc":
            kernel.bind(path, path, read_only=True, flags=_PROC_FLAGS)
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
