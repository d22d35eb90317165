"""A tree as a tar stream, read without following a link and without waiting at a fifo."""

from __future__ import annotations

import errno
import fnmatch
import itertools
import os
import stat
import tarfile
from collections.abc import Collection, Sequence
from typing import IO, Any

from pier.beneath import (
    DIRECTORY,
    IN_ROOT,
    NO_MAGICLINKS,
    READ_DIRECTORY,
    Descent,
    TreeError,
    open_in,
    visit,
    write_all,
)

CHUNK = 1 << 20
BUFFER = 1 << 15
"""tarfile copies its buffer at each header, so a larger one makes trees of small files slow."""
SKIPPED = 1000
"""How many of the entries that are left out are named."""
DEPTH = 400
LENGTH = 3000
"""How deep a tree may be, and how many bytes the path of a directory may have; directories beyond are left out and
reported: whoever gets the tree can come to all that is in it by its path."""


def pack(
    root: int,
    source: str,
    out: int | IO[bytes],
    *,
    exclude: Sequence[str] = (),
    max_bytes: int | None = None,
    most: int | None = None,
    whole: bool = False,
    leave_out: Collection[str] = (),
    keep_empty: bool = True,
) -> list[str]:
    """Write `source` as a tar stream to a descriptor or a file: a directory as `.` and what is below, anything else as
    one entry called `.`. Answers what was left out: devices, fifos, sockets, and what could not be read; the first
    `SKIPPED` of them. A tree with more entries than `most` is given up; a `whole` one if it is too deep. `exclude` are
    patterns, `leave_out` are paths below the source. An empty directory is nothing at all without `keep_empty`."""
    parent, _, name = source.rstrip("/").rpartition("/")
    if name in ("", ".", ".."):
        parent, name = source, "."
    fd = open_in(root, parent or ".", DIRECTORY, IN_ROOT | NO_MAGICLINKS)
    try:
        if not keep_empty and _is_empty(fd, name):
            return []
        return pack_entry(fd, name, out, exclude, leave_out, max_bytes=max_bytes, most=most, whole=whole)
    finally:
        os.close(fd)


def _is_empty(parent: int, name: str) -> bool:
    try:
        fd = os.open(name, READ_DIRECTORY, dir_fd=parent)
    except OSError:
        return False
    try:
        with os.scandir(fd) as entries:
            return next(entries, None) is None
    finally:
        os.close(fd)


def pack_entry(
    parent: int,
    name: str,
    out: int | IO[bytes],
    exclude: Sequence[str] = (),
    leave_out: Collection[str] = (),
    *,
    max_bytes: int | None = None,
    most: int | None = None,
    whole: bool = False,
) -> list[str]:
    """As `pack`, of what has a name in the directory `parent`."""
    stream: Any = _Whole(out) if isinstance(out, int) else out
    with tarfile.open(fileobj=stream, mode="w|", bufsize=BUFFER, format=tarfile.PAX_FORMAT) as archive:
        packer = _Packer(archive, exclude, max_bytes, most, whole)
        packer.leave_out = leave_out
        packer.add(parent, name, ".")
    return packer.skipped


_CHANGED = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL, errno.ENXIO}
"""What the kernel says of something that went away or changed its kind since it was listed: it is passed over."""


class _Packer:
    def __init__(
        self, archive: tarfile.TarFile, exclude: Sequence[str], max_bytes: int | None, most: int | None, whole: bool
    ) -> None:
        self._archive = archive
        self._exclude = [pattern.rstrip("/") for pattern in exclude]
        self._left = max_bytes
        self._most = most
        self._whole = whole
        self._inodes: dict[tuple[int, int], str] = {}
        self.leave_out: Collection[str] = ()
        self.skipped: list[str] = []

    def add(self, parent: int, name: str, path: str) -> None:
        """Add what has a name, and all that is below it."""
        if self._is_directory(parent, name, path):
            with Descent(name, parent) as walk:
                visit(walk, self._look, path, self._miss)

    def _look(self, here: int, above: str) -> list[tuple[str, str]]:
        """Add what is in a directory, and tell which directories are to be looked at."""
        found: list[tuple[str, str]] = []
        for child in self._list(here):
            path = child if above == "." else f"{above}/{child}"
            if any(fnmatch.fnmatchcase(path, rule) or fnmatch.fnmatchcase(child, rule) for rule in self._exclude):
                continue
            if path in self.leave_out:
                continue
            try:
                if self._is_directory(here, child, path):
                    found.append((child, path))
            except OSError as error:
                self._miss(path, error)
        return found[::-1]

    def _skip(self, path: str) -> None:
        if len(self.skipped) < SKIPPED:
            self.skipped.append(path)

    def _miss(self, path: str, error: OSError) -> None:
        if isinstance(error, PermissionError):
            self._skip(path)
        elif error.errno not in _CHANGED:
            raise error

    def _is_directory(self, parent: int, name: str, path: str) -> bool:
        """Add one entry; whether it is a directory to look at."""
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        entry = tarfile.TarInfo(path)
        entry.mode, entry.uid, entry.gid = stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid
        entry.mtime = int(status.st_mtime)
        if stat.S_ISDIR(status.st_mode):
            return self._add_directory(entry)
        if stat.S_ISREG(status.st_mode):
            self._add_file(parent, name, entry)
        elif stat.S_ISLNK(status.st_mode):
            entry.type, entry.linkname = tarfile.SYMTYPE, os.readlink(name, dir_fd=parent)
            self._write(entry)
        else:
            self._skip(path)
        return False

    def _write(self, entry: tarfile.TarInfo, content: Any = None) -> None:
        self._archive.addfile(entry, content)
        self._archive.members = []  # type: ignore[attr-defined] # tarfile's list would grow with the tree

    def _add_directory(self, entry: tarfile.TarInfo) -> bool:
        if entry.name.count("/") < DEPTH and len(os.fsencode(entry.name)) <= LENGTH:
            entry.type = tarfile.DIRTYPE
            self._write(entry)
            return True
        if self._whole:
            raise TreeError("too_deep", f"directories are nested too deeply: {entry.name[:200]}...")
        self._skip(entry.name)
        return False

    def _list(self, fd: int) -> list[str]:
        if self._most is None:
            return sorted(os.listdir(fd))
        with os.scandir(fd) as entries:
            names = sorted(entry.name for entry in itertools.islice(entries, self._most + 1))
        self._most -= len(names)
        if self._most < 0:
            raise TreeError("too_large", "the tree has more entries than allowed")
        return names

    def _add_file(self, parent: int, name: str, entry: tarfile.TarInfo) -> None:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, dir_fd=parent)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                self._skip(entry.name)
                return
            identity = (status.st_dev, status.st_ino)
            if status.st_nlink > 1 and identity in self._inodes:
                entry.type, entry.linkname = tarfile.LNKTYPE, self._inodes[identity]
                self._write(entry)
                return
            if self._left is not None:
                self._left -= status.st_size
                if self._left < 0:
                    raise TreeError("too_large", f"the tree is larger than allowed (at {entry.name})")
            entry.size = status.st_size
            self._write(entry, _Exactly(fd))
            if status.st_nlink > 1:
                self._inodes[identity] = entry.name
        finally:
            os.close(fd)


class _Exactly:
    """A file read as if it never shrank: what is missing comes as zeros, since the size was already told."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size and (part := os.read(self._fd, size - len(data))):
            data += part
        return bytes(data) + bytes(size - len(data))


class _Whole:
    """A descriptor as a file whose `write` writes everything."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, data: bytes) -> int:
        write_all(self._fd, data)
        return len(data)
