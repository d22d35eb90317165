"""Processes as /proc shows them: those of a pid namespace, their security labels and their order for the OOM killer.

A Linux security module (AppArmor, SELinux) labels what an engine starts. pier enters a container from outside, so it
puts the label of the container's first process on each command. Where no module has labelled the container there is
nothing to do. A label that cannot be put on a command is an error, and the command is not run.

Standard library only, and nothing is imported later: this runs in processes whose root has changed.
"""

from __future__ import annotations

import errno
import os
import resource

_PAGE = resource.getpagesize()
_SHOWN = 200
"""Bytes of a command line that are shown."""
_EXITING = 4
"""Among the kernel's flags of a process: that it has begun to end."""


class ProcessTable:
    """The processes that a /proc shows, but for `first`, process 1 of its namespace. `proc` is an open directory, so
    that it survives a change of root; with `namespace` only processes of that pid namespace (an inode) count, and those
    of other `namespaces` that are added later."""

    def __init__(self, proc: int, *, first: int, namespace: int | None = None) -> None:
        self.proc = proc
        self.first = first
        self.namespaces = None if namespace is None else {namespace}

    def all(self) -> dict[int, int]:
        """All processes with their parents."""
        found: dict[int, int] = {}
        for name in os.listdir(self.proc):
            if not name.isdigit() or int(name) == self.first or not self._is_here(name):
                continue
            fields = self._fields(int(name))
            if fields:
                found[int(name)] = int(fields[1])
        return found

    def is_ending(self, pid: int) -> bool:
        """Whether a process ends, or has ended. The first of a namespace kills all others before it is gone."""
        fields = self._fields(pid)
        return not fields or bool(int(fields[6]) & _EXITING)

    def is_running(self, pid: int) -> bool:
        """Whether a process is more than the entry of one that has ended. Others of its threads may run."""
        fields = self._fields(pid)
        return bool(fields) and (fields[0] not in (b"Z", b"X") or int(fields[17]) > 1)

    def stopped(self) -> list[int]:
        """The processes that somebody has stopped."""
        return [pid for pid in self.all() if self._fields(pid)[:1] == [b"T"]]

    def children(self, pid: int) -> list[int]:
        """The children of a process's first thread, of which the kernel leaves none out unless one is reaped meanwhile;
        none if the process is gone, or if this kernel does not tell."""
        return [int(child) for child in self._read(f"{pid}/task/{pid}/children").split()]

    def is_barren(self, pid: int) -> bool:
        """Whether nothing runs below a process that inherits orphans, however fast they fork and exit: its first thread
        has no children, or twice the same ones, all of which had ended in between and were not reaped since."""
        before = self.children(pid)
        ended = all(self._is_entry(child) for child in before)
        return ended and (not before or (self.children(pid) == before and all(map(self._is_entry, before))))

    def mounts(self, pid: int) -> int:
        """The inode of a process's mount namespace; 0 if it has ended, or may not be looked at."""
        try:
            return os.stat(f"{pid}/ns/mnt", dir_fd=self.proc).st_ino
        except OSError:
            return 0

    def describe(self, pid: int) -> list[object] | None:
        """The number of a process in its own namespace, its user and the beginning of its command line."""
        rows = dict(row.split(b":", 1) for row in self._read(f"{pid}/status").splitlines() if b":" in row)
        if b"Uid" not in rows:
            return None
        command = self._read(f"{pid}/cmdline", _SHOWN).replace(b"\0", b" ").strip() or rows.get(b"Name", b"").strip()
        own = rows.get(b"NSpid", b"%d" % pid).split()[-1]
        return [int(own), int(rows[b"Uid"].split()[0]), command.decode(errors="replace")]

    def private_memory(self, pid: int) -> int:
        """Bytes that a process has to itself."""
        fields = self._read(f"{pid}/statm").split()
        return (int(fields[1]) - int(fields[2])) * _PAGE if fields else 0

    def _is_here(self, name: str) -> bool:
        if self.namespaces is None:
            return True
        try:
            return os.stat(f"{name}/ns/pid", dir_fd=self.proc).st_ino in self.namespaces
        except OSError:
            return False

    def _fields(self, pid: int) -> list[bytes]:
        return self._read(f"{pid}/stat").rpartition(b")")[2].split()

    def _is_entry(self, pid: int) -> bool:
        """Whether a process has ended and was not reaped yet."""
        return bool(self._fields(pid)) and not self.is_running(pid)

    def _read(self, path: str, most: int | None = None) -> bytes:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.proc)
        except OSError:
            return b""
        parts: list[bytes] = []
        try:
            while part := os.read(fd, most or 8192):
                parts.append(part)
                if most:
                    break
        except OSError:
            return b""
        finally:
            os.close(fd)
        return b"".join(parts)


_APPARMOR, _SELINUX = "apparmor", "selinux"
_NONE = ("", "unconfined", "kernel")
_INACTIVE = (errno.EINVAL, errno.EOPNOTSUPP)
"""What the kernel says of the label of a module that it does not have, or that is switched off."""


class Label:
    """A label of one module."""

    def __init__(self, module: str, text: str) -> None:
        self.module = module
        self.text = text

    def give(self, proc: int) -> None:
        """Have the next program that this thread executes run with it; an OSError if the kernel refuses. `proc` is an
        open /proc that knows this process, and not the container's, which is the container's to change."""
        words = f"exec {self.text}" if self.module == _APPARMOR else self.text
        fd = _open_label(proc, "thread-self", self.module, "exec", os.O_WRONLY)
        if fd is None:
            raise OSError(errno.ENOENT, "the kernel has no file to set a label by")
        try:
            os.write(fd, words.encode(errors="surrogateescape"))
        finally:
            os.close(fd)


def find_labels(proc: int, pid: int) -> list[Label]:
    """The labels of a process. `proc` is an open /proc."""
    found = [Label(module, _read_label(proc, str(pid), module)) for module in (_APPARMOR, _SELINUX)]
    return [label for label in found if label.text not in _NONE]


def _read_label(proc: int, pid: str, module: str) -> str:
    fd = _open_label(proc, pid, module, "current", os.O_RDONLY)
    if fd is None:
        return ""
    try:
        text = os.read(fd, 4096).decode(errors="surrogateescape").rstrip("\0\n")
    except OSError as error:
        if error.errno in _INACTIVE:
            return ""
        raise
    finally:
        os.close(fd)
    is_context = " " not in text and text.count(":") >= 3
    if is_context != (module == _SELINUX):
        return ""
    return text.rpartition(" (")[0] if text.endswith(")") else text


def _open_label(proc: int, pid: str, module: str, name: str, flags: int) -> int | None:
    """A module's file: in its own directory, or where kernels have it that know one module at a time."""
    for path in (f"{pid}/attr/{module}/{name}", f"{pid}/attr/{name}"):
        try:
            return os.open(path, flags | os.O_CLOEXEC, dir_fd=proc)
        except FileNotFoundError:
            continue
    return None


OOM_SCORE = 1000
OOM_SCORE_SERVING = 500
"""The score of what serves a sandbox: before all else on the machine, and behind every command in the sandbox. Were it
the same, many small processes could have it killed in their place, and their trial would end without a verdict."""


def set_oom_score(proc: int, pid: str | int = "self", score: int = OOM_SCORE) -> None:
    """Put a process, and all that it will start, in line. `proc` is an open /proc."""
    fd = os.open(f"{pid}/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc)
    try:
        os.write(fd, b"%d" % score)
    finally:
        os.close(fd)


def oom_score(proc: int, pid: int) -> int:
    """What is written down for a process."""
    return int(_read_file(proc, f"{pid}/oom_score_adj"))


def _read_file(proc: int, path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
    try:
        return os.read(fd, 1 << 16)
    finally:
        os.close(fd)
