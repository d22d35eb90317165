"""Directories whose content came out of a sandbox, used without ever following a link.

An agent chooses the names, kinds and sizes in such a tree, so a path below it may lead anywhere on this machine. `Tree`
holds a directory by its descriptor and resolves every path below it in one step (`openat2` with `RESOLVE_BENEATH` and
`RESOLVE_NO_SYMLINKS`; on kernels without it, part by part with `O_NOFOLLOW`). It reads regular files only, and writes,
moves and removes nothing outside of its directory. No other code opens, lists or writes a path below a directory of a
trial that an agent could have made.
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
    write_all,
)

__all__ = ["ENTRIES", "FAULTS", "Entry", "Tree", "TreeError", "drop_links", "find_entry", "find_files", "open_regular"]

FAULTS = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,
        errno.EIO,
        errno.EROFS,
        errno.ENOMEM,
        errno.EMFILE,
        errno.ENFILE,
    }
)
"""Errors of the machine that holds a file, which say nothing about the file."""

_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV)
"""Errors of the kernel for a path that is missing, or lies behind a link or a file."""

Kind = Literal["file", "directory", "link", "other"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a tree: its path below the top, and where it leads if it is a link."""

    path: str
    kind: Kind
    size: int = 0
    leads: str = ""


class Tree:
    """A directory of this machine, held open. `path` itself is trusted up to its last part, which may not be a link
    either; nothing below it is. `make` makes it if it is missing. Use as a context manager."""

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
        """What has a path; None if nothing has it, or it lies behind a link or a file."""
        try:
            with self._parent(path) as (above, name):
                return _entry(above, name, path)
        except OSError as error:
            if error.errno in _NOT_THERE:
                return None
            raise

    def open(self, path: str) -> IO[bytes]:
        """Open a regular file for reading. FileNotFoundError if it is missing, `TreeError` with code `not_regular` if
        it is something else or lies behind a link. It never waits, and opens no device."""
        found = self.find(path)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{self.path}/{path}")
        if found.kind != "file":
            raise TreeError("not_regular", f"not a regular file: {self.path}/{path}")
        try:
            fd = open_in(self.fd, path, READ_FILE, STRICT)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EXDEV, errno.EAGAIN):
                raise TreeError("not_regular", f"changed while it was opened: {self.path}/{path}") from None
            raise
        return _regular(fd, self.path / path)

    def read(self, path: str, limit: int) -> bytes:
        """The content of a regular file of at most `limit` bytes; `TreeError` with code `too_large` past that."""
        with self.open(path) as stream:
            data = stream.read(limit + 1)
        if len(data) > limit:
            raise TreeError("too_large", f"more than {limit} bytes: {self.path}/{path}")
        return data

    def read_text(self, path: str, limit: int) -> str | None:
        """The text of a regular file; None if it is missing, too large or something else."""
        try:
            return self.read(path, limit).decode(errors="replace")
        except (OSError, TreeError):
            return None

    def read_json(self, path: str, limit: int) -> Any:
        """The value in a JSON file; None if it is missing, too large or broken."""
        try:
            return json.loads(self.read(path, limit))
        except (OSError, TreeError, ValueError, RecursionError):
            return None

    def read_object(self, path: str, limit: int) -> dict[str, Any] | None:
        """The object in a JSON file; None if there is none."""
        value = self.read_json(path, limit)
        return value if isinstance(value, dict) else None

    def entries(self, below: str = "", limit: int = ENTRIES) -> Iterator[Entry]:
        """All entries of the tree, or of a directory in it, each directory before what is in it, by name. `TreeError`
        with code `too_large` past `limit`."""
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
                found = waiting[-1].pop()
                yield found
                if found.kind == "directory":
                    walk.enter(found.path.rpartition("/")[2])
                    waiting.append(_listed(walk.here, f"{found.path}/"))
                    left -= len(waiting[-1])

    def listed(self, below: str = "") -> list[Entry]:
        """What is in the tree's directory, or in one below it, by name; nothing if that is missing or behind a link."""
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
        """Replace what has a path by a regular file, all of it or not at all. Parents are made."""
        with self._parent(path, make=True) as (above, name):
            unborn = f".pier-{os.getpid()}-{os.urandom(6).hex()}.tmp"
            fd = os.open(
                unborn, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=above
            )
            try:
                try:
                    for chunk in (data,) if isinstance(data, bytes) else data:
                        write_all(fd, chunk)
                    os.fchmod(fd, mode)
                finally:
                    os.close(fd)
                os.rename(unborn, name, src_dir_fd=above, dst_dir_fd=above)
            except BaseException:
                os.unlink(unborn, dir_fd=above)
                raise

    def take(self, source: Path, path: str) -> None:
        """Move `source`, of which all but the last part is trusted, to a path that is free. Parents are made.
        `TreeError` with code `not_directory` if a link or a file is among them."""
        with self._parent(path, make=True) as (above, name):
            if _entry(above, name, path) is not None:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), f"{self.path}/{path}")
            os.rename(source, name, dst_dir_fd=above)

    def unlink(self, path: str) -> None:
        """Remove what has a path and is not a directory."""
        with self._parent(path) as (above, name):
            os.unlink(name, dir_fd=above)

    @contextmanager
    def reached(self, path: str) -> Iterator[Path]:
        """A path of this process that leads to an entry and passes no link on its way, for functions that take one.
        Its last part may be a link itself."""
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
    """A path to an open directory that holds even if the directory is moved, where the system has one."""
    if sys.platform == "darwin":
        return Path(os.fsdecode(fcntl.fcntl(directory, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0")))
    return Path(f"/proc/self/fd/{directory}")


def _listed(here: int, above: str) -> list[Entry]:
    """What is in a directory, last name first. `above` is its path with a slash."""
    with os.scandir(here) as entries:
        names = sorted((entry.name for entry in entries), reverse=True)
    return [found for name in names if (found := _entry(here, name, f"{above}{name}")) is not None]


def find_entry(path: Path) -> Entry | None:
    """What has a path of which all but the last part is trusted."""
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
        except OSError:  # it was replaced since: what is there now is looked at by the next listing
            return None
    return Entry(path, "other")


def find_files(root: Path, pattern: str, *, below: str = "") -> list[Path]:
    """The regular files below the directory `root`, or below one in it, whose paths end as `pattern` says, by name; or
    `root` itself if it is a file. No link below `root` is followed."""
    root = root.resolve()
    if root.is_file():
        return [root]
    try:
        with Tree(root) as tree:
            entries = tree.entries(below)
            found = [entry.path for entry in entries if entry.kind == "file" and PurePath(entry.path).match(pattern)]
    except OSError as error:
        if error.errno in _NOT_THERE:
            return []
        raise
    return sorted(root / path for path in found)


def open_regular(path: Path) -> IO[bytes]:
    """Open a regular file that a user or pier named; its last part may be what an agent made, so no link is followed
    there. Errors are those of `Tree.open`."""
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise TreeError("not_regular", f"not a regular file: {path}")
    return _regular(os.open(path, READ_FILE), path)


def _regular(fd: int, path: Path) -> IO[bytes]:
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise TreeError("not_regular", f"not a regular file: {path}")
    return open(fd, "rb")


def drop_links(path: Path) -> None:
    """Remove every link of a tree that came out of a sandbox, `path` included, for readers that would follow them."""
    if path.is_symlink():
        path.unlink()
    elif path.is_dir():
        with Tree(path) as tree:
            links = [entry.path for entry in tree.entries() if entry.kind == "link"]
            for link in links:
                tree.unlink(link)
