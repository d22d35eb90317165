"""A tar stream as a tree, which stays below one directory whatever the stream says."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tarfile
from collections.abc import Iterator, Sequence
from typing import IO, Any

from pier.beneath import (
    BENEATH,
    DIRECTORY,
    ENTRIES,
    NO_MAGICLINKS,
    NO_SYMLINKS,
    TreeError,
    make_directory,
    open_in,
    write_sparse,
)
from pier.sandbox.tree.pack import BUFFER, CHUNK, SKIPPED

_NOT_HERE = (errno.ENAMETOOLONG, errno.EILSEQ, errno.EINVAL, errno.EMLINK, errno.EOPNOTSUPP)
"""What a file system says of an entry that it cannot hold, however much space it has."""
_Looks = tuple[int, float, int, int, bool]
"""Mode, time, owner and group of an entry, and whether it is a directory. A million entries of an archive would take a
hundred times as much memory."""


class Unpacked:
    """What was left out, and whether the archive was of one file instead of a directory."""

    def __init__(self, skipped: list[str], alone: bool) -> None:
        self.skipped = skipped
        self.alone = alone


def unpack(
    stream: IO[bytes],
    root: int,
    *,
    resolve: int = NO_SYMLINKS | NO_MAGICLINKS | BENEATH,
    owner: tuple[int, int] | None = None,
    keep: bool = False,
    max_bytes: int | None = None,
    single: str | None = None,
    in_place: bool = False,
) -> Unpacked:
    """Unpack a tar stream below the directory `root` and answer what was left out. An archive of one file called `.`
    is refused unless `single` names it.

    Without `keep` (the host's side) files belong to the caller, set-id bits are dropped, the caller can always read
    what came and fifos are left out. With it owners and modes are as in the stream, or the owner is `owner`. With
    `in_place` files and directories that are there are written to and keep their owners, modes and links.
    """
    unpacker = _Unpacker(root, resolve, owner, keep, max_bytes)
    unpacker.single, unpacker.in_place = single, in_place
    try:
        with tarfile.open(fileobj=stream, mode="r|", bufsize=BUFFER) as archive:
            for count, entry in enumerate(_entries(archive)):
                if count >= ENTRIES:
                    raise TreeError("too_large", f"the archive has more than {ENTRIES} entries")
                try:
                    unpacker.add(archive, entry)
                except OSError as error:
                    if error.errno not in _NOT_HERE:
                        raise
                    raise TreeError("unsafe_archive", f"{os.strerror(error.errno)}: {entry.name[:200]}") from None
        _take_padding(stream)
        unpacker.finish()
    except (tarfile.TarError, EOFError, UnicodeError) as error:
        raise TreeError("broken_archive", f"not a whole tar archive: {error}") from error
    finally:
        unpacker.close()
    return Unpacked(unpacker.skipped, unpacker.alone)


def _take_padding(stream: IO[bytes]) -> None:
    """Read what stands behind the end of an archive, within reason: who writes it must not find the pipe closed."""
    for _ in range(64):
        if not stream.read(16 * 1024):
            return


class _Unpacker:
    def __init__(self, root: int, resolve: int, owner: tuple[int, int] | None, keep: bool, left: int | None) -> None:
        self._root = root
        self._resolve = resolve
        self._owner = owner
        self._keep = keep
        self._left = left
        self._directories: list[tuple[str, _Looks]] = []
        self._parent: tuple[str, int] | None = None
        self.single: str | None = None
        self.in_place = False
        self.alone = False
        self.skipped: list[str] = []

    def add(self, archive: tarfile.TarFile, entry: tarfile.TarInfo) -> None:
        parts = split(entry.name)
        if not parts and entry.isdir():
            return
        if not parts and self.single is None:
            raise TreeError("unsafe_archive", "the archive has a file where its directory should be")
        if not parts:
            parts, self.alone = [self.single or ""], True
        parent, name = self._open_parent(parts), parts[-1]
        if entry.isdir():
            self._add_directory(parent, name, "/".join(parts), entry)
        elif entry.isreg():
            self._add_file(archive, parent, name, entry)
        elif entry.issym():
            _remove(parent, name)
            os.symlink(entry.linkname, name, dir_fd=parent)
            if (owner := self._owner_of(_looks(entry))) is not None:
                os.chown(name, *owner, dir_fd=parent, follow_symlinks=False)
            _set_time(name, entry.mtime, dir_fd=parent, follow_symlinks=False)
        elif entry.islnk():
            self._add_link(parent, name, entry)
        elif entry.isfifo() and self._keep:
            _remove(parent, name)
            os.mkfifo(name, 0o600, dir_fd=parent)
            self._dress(parent, name, _looks(entry))
        elif len(self.skipped) < SKIPPED:
            self.skipped.append("/".join(parts))

    def finish(self) -> None:
        """Dress directories last, deepest first: a read-only one must still take what is in it."""
        for path, looks in reversed(self._directories):
            parts = split(path)
            self._dress(self._open_parent(parts), parts[-1], looks)
        self.close()

    def close(self) -> None:
        if self._parent is not None:
            os.close(self._parent[1])
            self._parent = None

    def _open_parent(self, parts: Sequence[str]) -> int:
        path = "/".join(parts[:-1]) or "."
        if self._parent is None or self._parent[0] != path:
            self.close()
            try:
                fd, _ = make_directory(self._root, path, self._resolve, self._owner)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.EXDEV, errno.ENOTDIR, errno.EEXIST):
                    raise TreeError("unsafe_archive", f"{'/'.join(parts)!r} lies behind a link or a file") from None
                raise
            self._parent = (path, fd)
        return self._parent[1]

    def _add_directory(self, parent: int, name: str, path: str, entry: tarfile.TarInfo) -> None:
        try:
            os.mkdir(name, 0o700, dir_fd=parent)
        except FileExistsError:
            try:
                os.close(open_in(self._root, path, DIRECTORY, self._resolve))
                if self.in_place:
                    return
            except OSError:
                _remove(parent, name)
                os.mkdir(name, 0o700, dir_fd=parent)
        self._directories.append((path, _looks(entry)))

    def _add_file(self, archive: tarfile.TarFile, parent: int, name: str, entry: tarfile.TarInfo) -> None:
        if self._left is not None:
            self._left -= entry.size
            if self._left < 0:
                raise TreeError("too_large", f"the archive is larger than allowed (at {entry.name})")
        fd, is_new = self._open_file(parent, name)
        try:
            content = archive.extractfile(entry)
            while content and (data := content.read(CHUNK)):
                write_sparse(fd, data)
            if is_new:
                self._dress_open(fd, _looks(entry))
        finally:
            os.close(fd)

    def _open_file(self, parent: int, name: str) -> tuple[int, bool]:
        """A file to write to, and whether it is a new one."""
        if self.in_place:
            with contextlib.suppress(FileNotFoundError):
                flags = os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK | os.O_NOCTTY
                return open_in(parent, name, flags, NO_MAGICLINKS), False
        _remove(parent, name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, 0o600, dir_fd=parent), True

    def _add_link(self, parent: int, name: str, entry: tarfile.TarInfo) -> None:
        parts = split(entry.linkname)
        if not parts:
            raise TreeError("unsafe_archive", f"{entry.name!r} is a hard link to a directory")
        try:
            above = open_in(self._root, "/".join(parts[:-1]) or ".", DIRECTORY, self._resolve)
        except OSError as error:
            raise TreeError("unsafe_archive", f"{entry.name!r} is a hard link to nothing in the archive") from error
        try:
            _remove(parent, name)
            os.link(parts[-1], name, src_dir_fd=above, dst_dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            raise TreeError("unsafe_archive", f"{entry.name!r} is a hard link to nothing in the archive") from None
        finally:
            os.close(above)

    def _dress(self, parent: int, name: str, looks: _Looks) -> None:
        fd = open_in(parent, name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, NO_SYMLINKS | BENEATH)
        try:
            self._dress_open(fd, looks)
        finally:
            os.close(fd)

    def _dress_open(self, fd: int, looks: _Looks) -> None:
        """Owner first, because a change of owner clears the set-id bits."""
        if (owner := self._owner_of(looks)) is not None:
            os.fchown(fd, *owner)
        mode, mtime, _, _, is_directory = looks
        os.fchmod(fd, mode & 0o7777 if self._keep else mode & 0o777 | (0o700 if is_directory else 0o400))
        _set_time(fd, mtime)

    def _owner_of(self, looks: _Looks) -> tuple[int, int] | None:
        return self._owner or (looks[2:4] if self._keep else None)


def _looks(entry: tarfile.TarInfo) -> _Looks:
    return entry.mode, entry.mtime, entry.uid, entry.gid, entry.isdir()


def _set_time(target: int | str, mtime: float, **options: Any) -> None:
    try:
        os.utime(target, (mtime, mtime), **options)
    except (OverflowError, OSError):
        return  # a time that this file system cannot hold


def _entries(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    while (entry := archive.next()) is not None:
        yield entry
        archive.members = []  # type: ignore[attr-defined] # tarfile's list would grow with the tree


def split(name: str) -> list[str]:
    """The parts of an entry's name. Absolute names and `..` are refused."""
    parts = name.split("/")
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise TreeError("unsafe_archive", f"{name!r} would lie outside of the target")
    return [part for part in parts if part not in ("", ".")]


def _remove(parent: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        return
    except (IsADirectoryError, PermissionError):
        if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            raise
        try:
            os.rmdir(name, dir_fd=parent)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name) from error
