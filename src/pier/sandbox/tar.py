"""A tree as a tar stream and back, safe against whatever lies on either side.

Packing reads without following a link and without waiting at a fifo. Unpacking stays below one directory whatever the
stream says. Standard library only: both run inside sandboxes.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import io
import itertools
import os
import stat
import tarfile
from collections.abc import Collection, Iterator, Sequence
from typing import IO, Any

from pier.beneath import (
    BENEATH,
    DIRECTORY,
    ENTRIES,
    IN_ROOT,
    NO_MAGICLINKS,
    NO_SYMLINKS,
    READ_DIRECTORY,
    Descent,
    TreeError,
    make_directory,
    open_in,
    visit,
    write_all,
    write_sparse,
)

CHUNK = 1 << 20
BUFFER = 1 << 15
"""tarfile copies its buffer at each header, so a larger one makes trees of small files slow."""
SKIPPED = 1000
"""How many of the entries that are left out are named."""
DEPTH = 400
LENGTH = 3000
"""How deep a tree may be, and how many bytes the path of a directory may have; directories beyond are left out and
reported, so that every path of the tree can be opened on the receiving side."""


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
        """Add what is in a directory, and list the directories to descend into."""
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
    """A file read as if it never shrank: what is missing comes as zeros, since the size is already written."""

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
    files: Sequence[tuple[str, int, int, int | None]] | None = None,
) -> Unpacked:
    """Unpack a tar stream below the directory `root` and answer what was left out. An archive of one file called `.`
    is refused unless `single` names it.

    Without `keep` (the host's side) files belong to the caller, set-id bits are dropped, the caller can always read
    what came and fifos are left out. With it owners and modes are as in the stream, or the owner is `owner`. With
    `in_place` files and directories that are there are written to and keep their owners, modes and links. `files` says
    that the stream is no archive but the contents of these: paths, modes, times and sizes, which directories lack.
    """
    unpacker = _Unpacker(root, resolve, owner, keep, max_bytes)
    unpacker.single, unpacker.in_place = single, in_place
    try:
        with _Listed(stream, files) if files is not None else _open(stream) as archive:
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


def _open(stream: IO[bytes]) -> tarfile.TarFile:
    return tarfile.open(fileobj=stream, mode="r|", bufsize=BUFFER)


class _Listed:
    """Files that are known, with their contents one after the other, to be read like an archive."""

    def __init__(self, stream: IO[bytes], files: Sequence[tuple[str, int, int, int | None]]) -> None:
        self._stream = stream
        self._files = iter(files)
        self.members: list[tarfile.TarInfo] = []

    def __enter__(self) -> _Listed:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def next(self) -> tarfile.TarInfo | None:
        for path, mode, mtime, size in self._files:
            entry = tarfile.TarInfo(path)
            entry.mode, entry.mtime, entry.size = mode, mtime, size or 0
            entry.type = tarfile.DIRTYPE if size is None else tarfile.REGTYPE
            return entry
        return None

    def extractfile(self, entry: tarfile.TarInfo) -> IO[bytes]:
        data = self._stream.read(entry.size)
        if len(data) < entry.size:
            raise EOFError(f"{entry.name} is cut off")
        return io.BytesIO(data)


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

    def add(self, archive: tarfile.TarFile | _Listed, entry: tarfile.TarInfo) -> None:
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

    def _add_file(self, archive: tarfile.TarFile | _Listed, parent: int, name: str, entry: tarfile.TarInfo) -> None:
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


def _entries(archive: tarfile.TarFile | _Listed) -> Iterator[tarfile.TarInfo]:
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
