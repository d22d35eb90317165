"""Files that are either append-only or replaced atomically.

Readers never see half a file: `write` writes a temporary file in the same directory and renames it. Readers of a
`Journal` treat a torn last line as unfinished work, not as an error.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


def write(path: Path, data: bytes | str, *, mode: int = 0o644, durable: bool = True) -> None:
    """Replace `path` by `data` atomically. `durable` waits until the data is on disk."""
    write_parts(path, (data.encode() if isinstance(data, str) else data,), mode=mode, durable=durable)


def write_parts(
    path: Path, parts: Iterable[bytes], *, mode: int = 0o644, durable: bool = False, dir_fd: int | None = None
) -> None:
    """Replace `path` by the joined `parts` atomically. With `dir_fd`, `path` is relative to that open directory."""
    name = f"{path.parent}/.pier-{os.getpid()}-{os.urandom(6).hex()}.tmp"
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=dir_fd)
    try:
        try:
            for part in parts:
                content = memoryview(part)
                while content:
                    content = content[os.write(fd, content) :]
            os.fchmod(fd, mode)
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(name, path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=dir_fd)
        raise


def write_json(path: Path, value: Any, *, mode: int = 0o644, durable: bool = True) -> None:
    """Replace `path` by `value` as indented JSON."""
    write(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n", mode=mode, durable=durable)


class Journal:
    """An append-only file of JSON lines. Each line is one `write` call, so that lines of several writers never
    interleave."""

    def __init__(self, path: Path, *, durable: bool = False, mode: int = 0o644) -> None:
        self.path = path
        self._mode = mode
        self._durable = durable
        self._fd: int | None = None

    def append(self, value: Any) -> None:
        """Append one line. A torn last line, left by a crash or a full disk, is terminated first."""
        self.append_lines(_encode(value).encode() + b"\n")

    def append_lines(self, lines: bytes) -> None:
        """Append encoded lines, each with its newline, in one `write` call."""
        if self._fd is None:
            self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, self._mode)
            if _is_torn(self._fd):
                os.write(self._fd, b"\n")
        written = os.write(self._fd, lines)
        if written != len(lines):
            self.close()
            raise OSError(f"short write to {self.path}: {written} of {len(lines)} bytes")
        if self._durable:
            self.sync()

    def sync(self) -> None:
        """Wait until all appended lines are on disk."""
        fd = self._fd  # another thread may close the journal
        if fd is not None:
            os.fdatasync(fd)

    def close(self) -> None:
        """Close the file; a later `append` opens it again."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _is_torn(fd: int) -> bool:
    size = os.fstat(fd).st_size
    return size > 0 and os.pread(fd, 1, size - 1) != b"\n"


def is_whole(line: bytes) -> bool:
    """Whether a journal line is complete: a line with its newline, or a whole JSON object without one."""
    if line.endswith(b"\n"):
        return True
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def is_plain_name(name: str) -> bool:
    """Whether `name` can name a directory entry: not empty, without a slash, not `.` or `..`."""
    return bool(name) and "/" not in name and "\0" not in name and name not in (".", "..")


def read_journal(path: Path) -> Iterator[Any]:
    """Yield the values of a journal in order, without torn lines. A missing file yields nothing."""
    try:
        stream = path.open("rb")
    except (FileNotFoundError, NotADirectoryError):
        return
    with stream:
        for line in stream:
            if not is_whole(line):
                return
            try:
                yield json.loads(line)
            except (ValueError, RecursionError):
                continue


@contextmanager
def locked(path: Path, *, shared: bool = False, wait: bool = True) -> Iterator[bool]:
    """Hold an advisory lock on `path`, which is created if missing. Yields whether the lock was acquired: always True
    with `wait`."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        operation = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
        try:
            fcntl.flock(fd, operation)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(fd)
