"""Which processes there are in a pid namespace, as a process inside or above it sees them in some /proc.

Standard library only, and nothing is imported later: this runs in processes whose root has changed.
"""

from __future__ import annotations

import os
import resource

_PAGE = resource.getpagesize()


class Census:
    """The processes that a /proc shows, but for `without`. `proc` is an open directory, so that it survives a change of
    root; with `namespace` only processes of that pid namespace (an inode) count."""

    def __init__(self, proc: int, *, without: frozenset[int], namespace: int | None = None) -> None:
        self.proc = proc
        self._without = without
        self._namespace = namespace

    def take(self) -> dict[int, int]:
        """All processes with their parents."""
        found: dict[int, int] = {}
        for name in os.listdir(self.proc):
            if not name.isdigit() or int(name) in self._without or not self._is_here(name):
                continue
            fields = self._fields(int(name))
            if fields:
                found[int(name)] = int(fields[1])
        return found

    def is_running(self, pid: int) -> bool:
        """Whether a process is more than the entry of one that has ended."""
        fields = self._fields(pid)
        return bool(fields) and fields[0] not in (b"Z", b"X")

    def private_memory(self, pid: int) -> int:
        """Bytes that a process has to itself."""
        fields = self._read(f"{pid}/statm").split()
        return (int(fields[1]) - int(fields[2])) * _PAGE if fields else 0

    def _is_here(self, name: str) -> bool:
        if self._namespace is None:
            return True
        try:
            return os.stat(f"{name}/ns/pid", dir_fd=self.proc).st_ino == self._namespace
        except OSError:
            return False

    def _fields(self, pid: int) -> list[bytes]:
        return self._read(f"{pid}/stat").rpartition(b")")[2].split()

    def _read(self, path: str) -> bytes:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.proc)
        except OSError:
            return b""
        try:
            return os.read(fd, 8192)
        except OSError:
            return b""
        finally:
            os.close(fd)
