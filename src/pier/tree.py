"""Access to untrusted directories that never follows a link.

An agent chooses the names, types and sizes in such a tree, so a path below it may lead anywhere on this machine. `Tree`
holds an open descriptor of the directory and resolves every path below it in one step (`openat2` with `RESOLVE_BENEATH`
and `RESOLVE_NO_SYMLINKS`; on kernels without it, component by component with `O_NOFOLLOW`). It reads regular files
only, and writes, moves and removes nothing outside of its directory. All access to paths below a trial's directory that
an agent could have created goes through `Tree`.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import IO, Any, Literal

from pier.beneath import (
    DIRECTORY,
    ENTRIES,
    READ_DIRECTORY,
    READ_FILE,
    STRICT,
    Descent,
    TreeError,
    make_directory,
    open_in,
)
from pier.files import write_parts

__all__ = ["ENTRIES", "FAULTS", "Entry", "Tree", "TreeError", "drop_links", "find_entry", "find_files", "open_regular"]

FAULTS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ENOMEM, errno.EMFILE, errno.ENFILE}
)
"""Errors of the machine rather than of the file."""

_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV)
"""Errors for a path that is missing, or lies behind a link or a file."""

Kind = Literal["file", "directory", "link", "other"]


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of a tree: its path below the top, and its target if it is a link."""

    path: str
    kind: Kind
    size: int = 0
    leads: str = ""


class Tree:
    """An open directory on this machine. `path` is trusted except for its last component, which must not be a link;
    nothing below it is trusted. `make` creates it if it is missing. Use as a context manager."""

    def __init__(self, path: Path, *, make: bool = False) -> None:
        if make:
            path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.fd = os.open(path, READ_DIRECTORY)

    def __enter__(self) -> Tree:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)

    def find(self, path: str) -> Entry | None:
        """Return the entry at a path; None if it is missing, or lies behind a link or a file."""
        try:
            with self._parent(path) as (above, name):
                return _entry(above, name, path)
        except OSError as error:
            if error.errno in _NOT_THERE:
                return None
            raise

    def open(self, path: str) -> IO[bytes]:
        """Open a regular file for reading. Raises FileNotFoundError if it is missing, and `TreeError` with code
        `not_regular` if it is of another type or lies behind a link. Never blocks, and never opens a device."""
        entry = self.find(path)
        if entry is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{self.path}/{path}")
        if entry.kind != "file":
            raise TreeError("not_regular", f"not a regular file: {self.path}/{path}")
        try:
            fd = open_in(self.fd, path, READ_FILE, STRICT)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EXDEV, errno.EAGAIN):
                raise TreeError("not_regular", f"changed while it was opened: {self.path}/{path}") from None
            raise
        return _regular(fd, self.path / path)

    def read(self, path: str, limit: int) -> bytes:
        """Return the content of a regular file of at most `limit` bytes, else raise `TreeError` (`too_large`)."""
        with self.open(path) as stream:
            data = stream.read(limit + 1)
        if len(data) > limit:
            raise TreeError("too_large", f"more than {limit} bytes: {self.path}/{path}")
        return data

    def read_text(self, path: str, limit: int) -> str | None:
        """Return the text of a regular file; None if it is missing, too large or not regular."""
        try:
            return self.read(path, limit).decode(errors="replace")
        except (OSError, TreeError):
            return None

    def read_json(self, path: str, limit: int) -> Any:
        """Return the value in a JSON file; None if it is missing, too large or invalid."""
        try:
            return json.loads(self.read(path, limit))
        except (OSError, TreeError, ValueError, RecursionError):
            return None

    def read_object(self, path: str, limit: int) -> dict[str, Any] | None:
        """Return the object in a JSON file; None if it is unreadable or not an object."""
        value = self.read_json(path, limit)
        return value if isinstance(value, dict) else None

    def entries(self, below: str = "", limit: int = ENTRIES) -> Iterator[Entry]:
        """Yield all entries of the tree, or of a directory in it, sorted by name, each directory before its content.
        Raises `TreeError` (`too_large`) for more than `limit`."""
        left = limit
        with self._walk(below) as walk:
            waiting = [_listed(walk.here, f"{below}/" if below else "")]
            left -= len(waiting[0])
            while waiting:
                if left < 0:
                    raise TreeError("too_large", f"more than {limit} entries: {self.path}")
                if not waiting[-1]:
                    waiting.pop()
                    if waiting:
                        walk.leave()
                    continue
                entry = waiting[-1].pop()
                yield entry
                if entry.kind == "directory":
                    walk.enter(entry.path.rpartition("/")[2])
                    waiting.append(_listed(walk.here, f"{entry.path}/"))
                    left -= len(waiting[-1])

    def listed(self, below: str = "") -> list[Entry]:
        """Return the entries of the top directory, or of one below it, by name; empty if it is missing or behind a
        link."""
        try:
            with self._walk(below) as walk:
                return _listed(walk.here, f"{below}/" if below else "")[::-1]
        except OSError as error:
            if error.errno in _NOT_THERE:
                return []
            raise

    def _walk(self, below: str) -> Descent:
        if not below:
            return Descent(self.fd)
        top = open_in(self.fd, below, READ_DIRECTORY, STRICT)
        try:
            return Descent(top)
        finally:
            os.close(top)

    def write(self, path: str, data: bytes | Iterator[bytes], mode: int = 0o644) -> None:
        """Replace the entry at a path by a regular file atomically. Missing parents are created."""
        with self._parent(path, make=True) as (above, name):
            write_parts(Path(name), (data,) if isinstance(data, bytes) else data, mode=mode, dir_fd=above)

    def take(self, source: Path, path: str) -> None:
        """Move `source`, which is trusted except for its last component, to an unused path. Missing parents are
        created. Raises `TreeError` (`not_directory`) if a parent is a link or a file."""
        with self._parent(path, make=True) as (above, name):
            if _entry(above, name, path) is not None:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), f"{self.path}/{path}")
            os.rename(source, name, dst_dir_fd=above)

    def unlink(self, path: str) -> None:
        """Remove an entry that is not a directory."""
        with self._parent(path) as (above, name):
            os.unlink(name, dir_fd=above)

    @contextmanager
    def reached(self, path: str) -> Iterator[Path]:
        """Yield a path to an entry, free of links except for its last component, for functions that need a path."""
        with self._parent(path) as (above, name):
            yield _path_of(above) / name

    @contextmanager
    def _parent(self, path: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
        parent, _, name = path.strip("/").rpartition("/")
        if name in ("", ".", ".."):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), f"{self.path}/{path}")
        if not parent:
            yield self.fd, name
            return
        try:
            fd = make_directory(self.fd, parent, STRICT)[0] if make else open_in(self.fd, parent, DIRECTORY, STRICT)
        except OSError as error:
            if make and error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EXDEV, errno.EEXIST):
                raise TreeError("not_directory", f"{self.path}/{path} lies behind a link or a file") from None
            raise
        try:
            yield fd, name
        finally:
            os.close(fd)


def _path_of(directory: int) -> Path:
    """Return a path to an open directory; on Linux it stays valid when the directory is moved."""
    if sys.platform == "darwin":
        return Path(os.fsdecode(fcntl.fcntl(directory, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0")))
    return Path(f"/proc/self/fd/{directory}")


def _listed(here: int, above: str) -> list[Entry]:
    """Return the entries of a directory, last name first. `above` is its path with a slash."""
    names = sorted(os.listdir(here), reverse=True)
    return [entry for name in names if (entry := _entry(here, name, f"{above}{name}")) is not None]


def find_entry(path: Path) -> Entry | None:
    """Return the entry at a path that is trusted except for its last component."""
    return _entry(None, str(path), str(path))


def _entry(above: int | None, name: str, path: str) -> Entry | None:
    try:
        status = os.stat(name, dir_fd=above, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if stat.S_ISREG(status.st_mode):
        return Entry(path, "file", status.st_size)
    if stat.S_ISDIR(status.st_mode):
        return Entry(path, "directory")
    if stat.S_ISLNK(status.st_mode):
        try:
            return Entry(path, "link", leads=os.readlink(name, dir_fd=above))
        except OSError:  # replaced since the stat
            return None
    return Entry(path, "other")


def find_files(root: Path, pattern: str, *, below: str = "") -> list[Path]:
    """Return the regular files below `root`, or below a directory in it, whose paths match `pattern` from the right,
    sorted; or `root` itself if it is a file. Links below `root` are not followed."""
    root = root.resolve()
    if root.is_file():
        return [root]
    try:
        with Tree(root) as tree:
            files = (PurePath(entry.path) for entry in tree.entries(below) if entry.kind == "file")
            return sorted(root / path for path in files if path.match(pattern))
    except OSError as error:
        if error.errno in _NOT_THERE:
            return []
        raise


def open_regular(path: Path) -> IO[bytes]:
    """Open a regular file whose last path component is untrusted, without following a link there. Raises the errors of
    `Tree.open`."""
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise TreeError("not_regular", f"not a regular file: {path}")
    return _regular(os.open(path, READ_FILE), path)


def _regular(fd: int, path: Path) -> IO[bytes]:
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise TreeError("not_regular", f"not a regular file: {path}")
    return open(fd, "rb")


def drop_links(path: Path) -> None:
    """Remove every link of an untrusted tree, `path` included, for readers that would follow them."""
    if path.is_symlink():
        path.unlink()
    elif path.is_dir():
        with Tree(path) as tree:
            for link in [entry.path for entry in tree.entries() if entry.kind == "link"]:
                tree.unlink(link)
