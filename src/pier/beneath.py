"""Resolution of paths that cannot leave a directory, and directory walks that follow no link.

A path is resolved in one step (`openat2`), so that a link swapped in during the resolution cannot lead outside; on
kernels without it, component by component. Few modules are imported, since this also runs inside a sandbox's root,
where imports fail. Other code on the host uses `pier.tree`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

NO_MAGICLINKS, NO_SYMLINKS, BENEATH, IN_ROOT = 0x02, 0x04, 0x08, 0x10
DIRECTORY = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
STRICT = NO_SYMLINKS | NO_MAGICLINKS | BENEATH
"""RESOLVE_* limits for untrusted trees."""
READ_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
READ_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC

ENTRIES = 1_000_000
"""Maximum number of entries of a tree."""

_OPENAT2 = 437
_HOLE = 4096
_ZEROS = bytes(_HOLE)
_MAX_OPEN = 32
"""Directories that a walk keeps open; those further up are reopened through `..`."""
_libc = ctypes.CDLL(None, use_errno=True)


class TreeError(Exception):
    """An invalid tree or stream. `code` is one of not_regular, not_directory, too_large, too_deep, unsafe_archive,
    broken_archive."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def open_in(root: int, path: str, flags: int, resolve: int, mode: int = 0) -> int:
    """Open `path` relative to the directory `root` under the given RESOLVE_* limits."""
    how = struct.pack("QQQ", flags | os.O_CLOEXEC, mode, resolve)
    name = path.encode(errors="surrogateescape") or b"."
    if b"\0" in name:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
    number = errno.EAGAIN if sys.platform == "linux" else errno.ENOSYS
    for _ in range(100 if sys.platform == "linux" else 0):
        fd = _libc.syscall(_OPENAT2, root, ctypes.c_char_p(name), ctypes.c_char_p(how), ctypes.c_size_t(24))
        if fd >= 0:
            return fd
        number = ctypes.get_errno()
        if number not in (errno.EAGAIN, errno.EINTR):
            break
    if number in (errno.ENOSYS, errno.EPERM) and resolve & NO_SYMLINKS:
        return open_by_parts(root, path, flags, mode)
    raise OSError(number, os.strerror(number), path)


def open_by_parts(root: int, path: str, flags: int, mode: int) -> int:
    """Do the same without following links where `openat2` is missing (before Linux 5.6) or forbidden."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), path)
    here = os.open(".", DIRECTORY, dir_fd=root)
    try:
        for part in parts[:-1]:
            deeper = os.open(part, DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
            os.close(here)
            here = deeper
        return os.open(parts[-1] if parts else ".", flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=here)
    finally:
        os.close(here)


def make_directory(root: int, path: str, resolve: int, owner: Sequence[int] | None = None) -> tuple[int, bool]:
    """Open the directory `path`, creating missing parts; also return whether its last part was created. New directories
    belong to `owner` (user and group), by default to this process."""
    try:
        return open_in(root, path, DIRECTORY, resolve), False
    except FileNotFoundError:
        parent, _, last = path.strip("/").rpartition("/")
        above, _ = make_directory(root, parent or ".", resolve, owner)
    try:
        try:
            os.mkdir(last, 0o755, dir_fd=above)
        except FileExistsError:
            pass
        else:
            if owner:
                fd = os.open(last, READ_DIRECTORY, dir_fd=above)
                try:
                    os.fchown(fd, *owner)
                finally:
                    os.close(fd)
    finally:
        os.close(above)
    return open_in(root, path, DIRECTORY, resolve), True


def write_all(fd: int, data: bytes) -> None:
    """Write all of `data`, in several calls if needed."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def write_sparse(fd: int, data: bytes) -> None:
    """Write all of `data` to a new file, with holes for blocks of zeros."""
    if _ZEROS not in data:
        write_all(fd, data)
        return
    ends = [*range(_HOLE - os.lseek(fd, 0, os.SEEK_CUR) % _HOLE, len(data), _HOLE), len(data)]
    blocks = zip([0, *ends], ends, strict=False)
    for is_hole, run in itertools.groupby(blocks, lambda block: data[slice(*block)] == _ZEROS[: block[1] - block[0]]):
        (begin, end), *more = run
        end = more[-1][1] if more else end
        if is_hole:
            os.truncate(fd, os.lseek(fd, end - begin, os.SEEK_CUR))
        else:
            write_all(fd, data[begin:end])


class Descent:
    """The position of a walk through a tree. Leaving a directory returns to the one it was entered from, or raises
    ESTALE if that was moved in the meantime."""

    def __init__(self, top: str | int, above: int | None = None) -> None:
        self._open = [os.open(top, READ_DIRECTORY, dir_fd=above) if isinstance(top, str) else os.dup(top)]
        self._closed: dict[int, tuple[int, int]] = {}

    @property
    def here(self) -> int:
        """The current directory."""
        return self._open[-1]

    def enter(self, name: str) -> None:
        self._open.append(os.open(name, READ_DIRECTORY, dir_fd=self.here))
        depth = len(self._open) - 1 - _MAX_OPEN
        if depth >= 0 and self._open[depth] >= 0:
            self._closed[depth] = _identity(self._open[depth])
            os.close(self._open[depth])
            self._open[depth] = -1

    def leave(self) -> None:
        below = self._open.pop()
        try:
            if self._open[-1] < 0:
                self._open[-1] = os.open("..", READ_DIRECTORY, dir_fd=below)
                if _identity(self._open[-1]) != self._closed.pop(len(self._open) - 1):
                    raise OSError(errno.ESTALE, "a directory was moved during a walk through it")
        finally:
            os.close(below)

    def close(self) -> None:
        while self._open:
            if (fd := self._open.pop()) >= 0:
                os.close(fd)

    def __enter__(self) -> Descent:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def visit(
    walk: Descent, look: Callable[[int, Any], list[tuple[str, Any]]], first: Any, missed: Callable[[Any, OSError], None]
) -> None:
    """Call `look` with a directory and the value `first`. It returns the subdirectories to visit, each with the value
    for its own call. `missed` is called for those that cannot be opened."""
    pending = [look(walk.here, first)]
    while pending:
        if not pending[-1]:
            pending.pop()
            if pending:
                walk.leave()
            continue
        name, value = pending[-1].pop()
        try:
            walk.enter(name)
        except OSError as error:
            missed(value, error)
        else:
            pending.append(look(walk.here, value))


class _OverBudget(Exception):
    """There is more to remove than was allowed."""


def remove(path: str, above: int | None = None) -> None:
    """Remove `path`, relative to the directory `above` if given, and everything below it. A missing path is ignored."""
    _remove_tree(path, above, itertools.count())


def remove_some(path: str, most: int) -> bool:
    """Remove at most `most` entries of `path`; return whether nothing is left."""
    try:
        _remove_tree(path, None, iter(range(most)))
    except _OverBudget:
        return False
    return True


def _remove_tree(path: str, above: int | None, budget: Iterator[int]) -> None:
    try:
        walk = Descent(path, above)
    except FileNotFoundError:
        return
    except OSError:
        os.unlink(path, dir_fd=above)
        return
    with walk:
        entered: list[str] = []
        pending = [_remove_files(walk.here, budget)]
        while pending:
            if pending[-1]:
                entered.append(pending[-1].pop())
                walk.enter(entered[-1])
                pending.append(_remove_files(walk.here, budget))
                continue
            pending.pop()
            if pending:
                walk.leave()
                os.rmdir(entered.pop(), dir_fd=walk.here)
    os.rmdir(path, dir_fd=above)


def _remove_files(here: int, budget: Iterator[int]) -> list[str]:
    """Remove every entry except directories, and return the names of those."""
    directories: list[str] = []
    with os.scandir(here) as entries:
        for entry in list(entries):
            if next(budget, None) is None:
                raise _OverBudget
            if entry.is_dir(follow_symlinks=False):
                directories.append(entry.name)
            else:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(entry.name, dir_fd=here)
    return directories
