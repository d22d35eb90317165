"""Files that are either append-only or replaced atomically.

A reader never sees half a file: `write` goes to a temporary file in the same directory, which is then renamed. A
reader of a `Journal` treats a torn last line as work still owed, never as a crash.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_numbers = itertools.count()
_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


def write(path: Path, data: bytes | str, *, mode: int = 0o644, durable: bool = True) -> None:
    """Replace `path` by `data`, all of it or not at all. `durable` waits until the data is on disk."""
    write_parts(path, (data.encode() if isinstance(data, str) else data,), mode=mode, durable=durable)


def write_parts(path: Path, parts: Iterable[bytes], *, mode: int = 0o644, durable: bool = False) -> None:
    """The same for data that comes in parts."""
    name = f"{path.parent}/.{path.name}.{os.getpid()}-{next(_numbers)}-{os.urandom(3).hex()}.tmp"
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
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
        os.rename(name, path)  # noqa: PTH104 - several times in every trial
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)  # noqa: PTH108
        raise


def write_json(path: Path, value: Any, *, mode: int = 0o644, durable: bool = True) -> None:
    """Replace `path` by `value` as indented JSON."""
    write(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n", mode=mode, durable=durable)


class Journal:
    """An append-only file of JSON lines. Each line is one `write` call, so that lines of several writers never mix."""

    def __init__(self, path: Path, *, durable: bool = False, mode: int = 0o644) -> None:
        self.path = path
        self._mode = mode
        self._durable = durable
        self._fd: int | None = None

    def append(self, value: Any) -> None:
        """Add one line; a tail torn by an earlier crash or a full disk is closed off first."""
        self.append_lines(_encode(value).encode() + b"\n")

    def append_lines(self, lines: bytes) -> None:
        """Add lines that are encoded already, each with its newline, in one `write` call."""
        if self._fd is None:
            self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, self._mode)
            if _is_torn(self._fd):
                os.write(self._fd, b"\n")
        written = os.write(self._fd, lines)
        if written != len(lines):
            self.close()
            raise OSError(f"only {written} of {len(lines)} bytes could be written to {self.path}")
        if self._durable:
            self.sync()

    def sync(self) -> None:
        """Wait until all that was added is on disk."""
        fd = self._fd  # another thread may close it
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
    """Whether a line of a journal is all there: it ends, or lacks only its newline. A part of an object is none."""
    if line.endswith(b"\n"):
        return True
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def is_plain_name(name: str) -> bool:
    """Whether `name` is the name of an entry of a directory: not empty, without a slash, not `.` or `..`."""
    return bool(name) and "/" not in name and "\0" not in name and name not in (".", "..")


def read_journal(path: Path) -> Iterator[Any]:
    """The values of a journal in order; lines that were torn are passed over. A missing file has none."""
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
    """Hold an advisory lock on `path` (created if missing). Yields whether the lock was got (always, with `wait`)."""
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
