"""Paths that the kernel resolves below a directory without being led out of it, and walks that follow no link.

Each path is resolved in one step (`openat2`), so that no link swapped in midway leads out; on kernels without it, part
by part. Only the standard library is used, and little of it: this also serves inside of a sandbox's root, where nothing
can be imported any more. `pier.tree` is what other code on the host's side uses.
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
"""How paths of a tree that is not trusted are resolved."""
READ_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
READ_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC

ENTRIES = 1_000_000
"""How many entries a tree may have."""

_OPENAT2 = 437
_HOLE = 4096
_ZEROS = bytes(_HOLE)
_HELD = 32
"""How many directories of a walk are held open; the way up to others leads through `..`."""
_libc = ctypes.CDLL(None, use_errno=True)


class TreeError(Exception):
    """A tree or a stream is not what it must be. `code` is one of not_regular, not_directory, too_large, too_deep,
    unsafe_archive, broken_archive."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def open_in(root: int, path: str, flags: int, resolve: int, mode: int = 0) -> int:
    """Open `path` from the directory `root` under the given RESOLVE_* limits."""
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
    """As `open_in` without links, on a kernel older than 5.6 or in a container that forbids the call."""
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
    """Open the directory `path`, making what is missing of it; says whether its last part was made. What is made
    belongs to `owner` (user and group), else to this process."""
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
            _give(last, above, owner)
    finally:
        os.close(above)
    return open_in(root, path, DIRECTORY, resolve), True


def _give(name: str, above: int, owner: Sequence[int] | None) -> None:
    if owner:
        fd = os.open(name, READ_DIRECTORY, dir_fd=above)
        try:
            os.fchown(fd, *owner)
        finally:
            os.close(fd)


def write_all(fd: int, data: bytes) -> None:
    """Write all of `data`, however little the descriptor takes at once."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def write_sparse(fd: int, data: bytes) -> None:
    """Write all of `data` to a new file; blocks of zeros become holes, so that what was sparse takes no space here
    either."""
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
    """Where a walk is. Directories on the way up are the same ones that it came by, or an ESTALE says that one
    was moved meanwhile."""

    def __init__(self, top: str | int, above: int | None = None) -> None:
        self._way = [os.open(top, READ_DIRECTORY, dir_fd=above) if isinstance(top, str) else os.dup(top)]
        self._left: dict[int, tuple[int, int]] = {}

    @property
    def here(self) -> int:
        """The directory that the walk is in."""
        return self._way[-1]

    def enter(self, name: str) -> None:
        self._way.append(os.open(name, READ_DIRECTORY, dir_fd=self.here))
        far = len(self._way) - 1 - _HELD
        if far >= 0 and self._way[far] >= 0:
            self._left[far] = _identity(self._way[far])
            os.close(self._way[far])
            self._way[far] = -1

    def leave(self) -> None:
        below = self._way.pop()
        try:
            if self._way[-1] < 0:
                self._way[-1] = os.open("..", READ_DIRECTORY, dir_fd=below)
                if _identity(self._way[-1]) != self._left.pop(len(self._way) - 1):
                    raise OSError(errno.ESTALE, "a directory was moved during a walk through it")
        finally:
            os.close(below)

    def close(self) -> None:
        while self._way:
            if (fd := self._way.pop()) >= 0:
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
    """Look at a directory, and then at each below it that a look has named, with what the look gave along. `missed` is
    called with those that cannot be opened."""
    todo = [look(walk.here, first)]
    while todo:
        if not todo[-1]:
            todo.pop()
            if todo:
                walk.leave()
            continue
        name, given = todo[-1].pop()
        try:
            walk.enter(name)
        except OSError as error:
            missed(given, error)
        else:
            todo.append(look(walk.here, given))


class _Spent(Exception):
    """There is more to remove than was allowed."""


def remove(path: str, above: int | None = None) -> None:
    """Remove `path`, from the directory `above` if it is given, and all below it; already gone is fine."""
    _remove_tree(path, above, itertools.count())


def remove_some(path: str, most: int) -> bool:
    """Remove at most `most` files and directories of `path`; whether that was all of it."""
    try:
        _remove_tree(path, None, iter(range(most)))
    except _Spent:
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
        _empty(walk, budget)
    os.rmdir(path, dir_fd=above)


def _empty(walk: Descent, budget: Iterator[int]) -> None:
    """Remove all that is in a directory. Each directory is emptied before it is removed, so that no call is in vain."""
    way: list[str] = []
    todo = [_look(walk.here, budget)]
    while todo:
        if todo[-1]:
            name = todo[-1].pop()
            walk.enter(name)
            way.append(name)
            todo.append(_look(walk.here, budget))
            continue
        todo.pop()
        if todo:
            walk.leave()
            os.rmdir(way.pop(), dir_fd=walk.here)


def _look(here: int, budget: Iterator[int]) -> list[str]:
    """Remove everything but directories, and list those."""
    found: list[str] = []
    with os.scandir(here) as entries:
        for entry in list(entries):
            if next(budget, None) is None:
                raise _Spent
            if entry.is_dir(follow_symlinks=False):
                found.append(entry.name)
            else:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(entry.name, dir_fd=here)
    return found
