"""A layer as a tar stream: unpacked into a directory in overlay format, and packed again.

Unpacking writes nothing outside the target, whatever the archive holds: names are taken below the target, symlinks in a
name's parents are followed inside the target only, `..` is refused. Devices are left out (a sandbox has its own `/dev`,
and a device node in a store would open the machine's). Of the extended attributes only file capabilities and plain
`user.` ones come in, so that an archive cannot steer overlayfs. The compression is recognised by an archive's first
bytes.

Packing gives the same bytes for the same files. The digest of that tar is the layer's diff id: it names a layer that
was built or copied here, as the archive's own digest names one that was unpacked.
"""

from __future__ import annotations

import bz2
import errno
import gzip
import hashlib
import lzma
import os
import shutil
import stat
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from pier.beneath import write_all
from pier.errors import ImageError

OPAQUE = "user.overlay.opaque"
WHITEOUT = ".wh."
OPAQUE_MARK = ".wh..wh..opq"
LAST_ID = 65535
NOBODY = 65534
XATTR = "SCHILY.xattr."
_CHUNK = 1 << 20


class _StrictHeader(tarfile.TarInfo):
    """A header whose damage is an error: tarfile itself takes a broken header in the middle for the end."""

    @classmethod
    def fromtarfile(cls, tarfile: tarfile.TarFile) -> _StrictHeader:
        try:
            return super().fromtarfile(tarfile)  # pyright: ignore[reportReturnType]
        except (_EMPTY, _INVALID, _TRUNCATED) as error:
            raise ImageError(f"the archive is broken: {error}", code="broken_archive") from None


_EMPTY: type[Exception] = tarfile.EmptyHeaderError  # pyright: ignore[reportAttributeAccessIssue]
_INVALID: type[Exception] = tarfile.InvalidHeaderError  # pyright: ignore[reportAttributeAccessIssue]
_TRUNCATED: type[Exception] = tarfile.TruncatedHeaderError  # pyright: ignore[reportAttributeAccessIssue]


def unpack(stream: BinaryIO, target: str, *, owners: bool = True) -> int:
    """Unpack `stream` into the existing directory `target`; how many bytes the files hold. Reads only to the end
    of the archive. Without `owners` everything belongs to whoever runs this."""
    try:
        return _Unpacking(target, owners).run(stream)
    except tarfile.TarError as error:
        raise ImageError(f"the archive is broken: {error}", code="broken_archive") from None


def entries(stream: BinaryIO) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """The members of an archive in order, read as a stream; damage is an `ImageError` (code `broken_archive`)."""
    try:
        with tarfile.open(fileobj=stream, mode="r|", tarinfo=_StrictHeader, bufsize=_CHUNK) as archive:
            while (member := archive.next()) is not None:
                archive.members.clear()  # pyright: ignore[reportAttributeAccessIssue]
                yield archive, member
    except (tarfile.TarError, EOFError) as error:
        raise ImageError(f"the archive is broken: {error}", code="broken_archive") from None


class _Unpacking:
    def __init__(self, target: str, owners: bool) -> None:
        self._root = target
        self._owners = owners
        self._size = 0
        self._known = {"": target}
        self._directory_times: dict[str, float] = {}

    def run(self, stream: BinaryIO) -> int:
        for archive, member in entries(stream):
            self._take(archive, member)
        for path, time in self._directory_times.items():
            if os.path.lexists(path):
                os.utime(path, (time, time), follow_symlinks=False)
        return self._size

    def _take(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        parts = _parts(member.name)
        if not parts:
            if member.isdir():
                self._set_metadata(self._root, member)
            return
        parent, name = self._parent(parts), parts[-1]
        path = f"{parent}/{name}"
        if name == OPAQUE_MARK:
            os.setxattr(parent, OPAQUE, b"y")
        elif name.startswith(WHITEOUT * 2):
            return
        elif name.startswith(WHITEOUT):
            self._white_out(f"{parent}/{name.removeprefix(WHITEOUT)}", name)
        elif member.isdir():
            self._make_directory(path, member)
        elif member.islnk():
            self._link(path, member)
        elif member.issym():
            self._clear(path)
            os.symlink(member.linkname, path)
            self._set_metadata(path, member)
        elif member.isfifo():
            self._clear(path)
            os.mkfifo(path, 0o600)
            self._set_metadata(path, member)
        elif member.isreg():
            self._write(archive, path, member)

    def _parent(self, parts: list[str]) -> str:
        """The real directory of a name's parents; missing ones are made, symlinks are followed below the root."""
        key = "/".join(parts[:-1])
        if (known := self._known.get(key)) is not None:
            return known
        here, left, links = "", list(parts[:-1]), 0
        while left:
            part = left.pop(0)
            if part in ("", "."):
                continue
            if part == "..":
                here = here.rpartition("/")[0]
                continue
            path = f"{self._root}{here}/{part}"
            try:
                mode = os.lstat(path).st_mode
            except FileNotFoundError:
                os.mkdir(path, 0o755)
                mode = stat.S_IFDIR
            if stat.S_ISLNK(mode):
                links += 1
                if links > 40:
                    raise _unsafe("/".join(parts), "too many symbolic links")
                to = os.readlink(path)
                here = "" if to.startswith("/") else here
                left = [*to.split("/"), *left]
            elif stat.S_ISDIR(mode):
                here = f"{here}/{part}"
            elif is_whiteout(path):
                os.unlink(path)
                os.mkdir(path, 0o755)
                os.setxattr(path, OPAQUE, b"y")
                here = f"{here}/{part}"
            else:
                raise _unsafe("/".join(parts), f"{part!r} is not a directory")
        found = f"{self._root}{here}"
        self._known[key] = found
        return found

    def _clear(self, path: str) -> bool:
        """Make way for a new entry; whether what lay there was a whiteout."""
        try:
            mode = os.lstat(path).st_mode
        except FileNotFoundError:
            return False
        if stat.S_ISDIR(mode):
            shutil.rmtree(path)
        else:
            was_whiteout = is_whiteout(path)
            os.unlink(path)
            self._known = {"": self._root}
            return was_whiteout
        self._known = {"": self._root}
        return False

    def _white_out(self, path: str, name: str) -> None:
        if not path.rpartition("/")[2] or path.endswith(("/.", "/..")):
            raise _unsafe(name, "it hides no name")
        if os.path.isdir(path) and not os.path.islink(path):
            os.setxattr(path, OPAQUE, b"y")
        elif not os.path.lexists(path):
            make_whiteout(path)

    def _make_directory(self, path: str, member: tarfile.TarInfo) -> None:
        if not os.path.isdir(path) or os.path.islink(path):
            hidden = self._clear(path)
            os.mkdir(path, 0o700)
            if hidden:
                os.setxattr(path, OPAQUE, b"y")
        self._set_metadata(path, member)
        self._directory_times[path] = member.mtime

    def _link(self, path: str, member: tarfile.TarInfo) -> None:
        parts = _parts(member.linkname)
        if not parts:
            raise _unsafe(member.name, "it is a hard link to nothing")
        source = f"{self._parent(parts)}/{parts[-1]}"
        if source == path:
            return
        if not os.path.lexists(source) or (os.path.isdir(source) and not os.path.islink(source)):
            raise _unsafe(member.name, f"it is a hard link to {member.linkname!r}, which is not a file of this archive")
        self._clear(path)
        os.link(source, path, follow_symlinks=False)

    def _write(self, archive: tarfile.TarFile, path: str, member: tarfile.TarInfo) -> None:
        self._clear(path)
        source = archive.extractfile(member)
        with open(path, "xb", buffering=0) as sink:
            while source is not None and (data := source.read(_CHUNK)):
                write_all(sink.fileno(), data)
        self._size += member.size
        self._set_metadata(path, member)

    def _set_metadata(self, path: str, member: tarfile.TarInfo) -> None:
        """The owner first: changing it clears set-user-id bits and file capabilities."""
        if self._owners:
            os.chown(path, _mapped(member.uid), _mapped(member.gid), follow_symlinks=False)
        if not member.issym():
            os.chmod(path, member.mode & 0o7777)
            self._set_xattrs(path, member)
        os.utime(path, (member.mtime, member.mtime), follow_symlinks=False)

    def _set_xattrs(self, path: str, member: tarfile.TarInfo) -> None:
        for key, value in member.pax_headers.items():
            name = key.removeprefix(XATTR)
            if name == key or not is_kept_xattr(name):
                continue
            try:
                os.setxattr(path, name, value.encode("utf-8", "surrogateescape"), follow_symlinks=False)
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EINVAL):
                    raise


def is_kept_xattr(name: str) -> bool:
    """Whether an extended attribute belongs to a file's content: overlayfs' own never do."""
    return name == "security.capability" or (name.startswith("user.") and not name.startswith("user.overlay."))


def make_whiteout(path: str) -> None:
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(0, 0))


def is_whiteout(path: str) -> bool:
    status = os.lstat(path)
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def _parts(name: str) -> list[str]:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in name:
        raise _unsafe(name, "it points upward")
    return parts


def _mapped(id: int) -> int:
    return id if 0 <= id <= LAST_ID else NOBODY


def _unsafe(name: str, why: str) -> ImageError:
    return ImageError(f"the archive holds an unsafe entry {name!r}: {why}", code="unsafe_archive")


_MAGIC = {b"\x1f\x8b": "gzip", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2"}
_READ_SIZE = 1 << 20


def compression_of(head: bytes) -> str:
    """`gzip`, `xz`, `zstd`, `bzip2` or, for anything else, the empty string."""
    return next((name for magic, name in _MAGIC.items() if head.startswith(magic)), "")


@contextmanager
def decompressed(path: str) -> Iterator[BinaryIO]:
    """The file's content without its compression. Damage is an `ImageError` with code `broken_archive`."""
    with ExitStack() as stack:
        file = stack.enter_context(open(path, "rb"))
        kind = compression_of(file.read(6))
        file.seek(0)
        try:
            if kind == "zstd":
                yield stack.enter_context(_zstd(file, path))
            elif kind == "gzip":
                yield cast(BinaryIO, stack.enter_context(gzip.GzipFile(fileobj=file)))
            elif kind == "xz":
                yield cast(BinaryIO, stack.enter_context(lzma.LZMAFile(file)))
            elif kind == "bzip2":
                yield cast(BinaryIO, stack.enter_context(bz2.BZ2File(file)))
            else:
                yield file
        except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
            raise ImageError(f"the {kind} data of {path} is broken: {error}", code="broken_archive") from None


@contextmanager
def _zstd(file: BinaryIO, path: str) -> Iterator[BinaryIO]:
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    with zstd.ZstdFile(file) as stream:
        try:
            yield cast(BinaryIO, stream)
        except zstd.ZstdError as error:
            raise ImageError(f"the zstd data of {path} is broken: {error}", code="broken_archive") from None


class HashingReader:
    """A stream that knows the sha256 of what was read through it."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._hash = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self._hash.update(data)
        return data

    def digest(self) -> str:
        """The digest of the whole stream: what is left of it is read first."""
        drain(cast(BinaryIO, self))
        return f"sha256:{self._hash.hexdigest()}"


def drain(stream: BinaryIO) -> None:
    """Read a stream to its end."""
    while stream.read(_READ_SIZE):
        pass


_USUAL_ROOT = (0o755, 0, 0)
_KINDS = {
    stat.S_IFDIR: tarfile.DIRTYPE,
    stat.S_IFREG: tarfile.REGTYPE,
    stat.S_IFLNK: tarfile.SYMTYPE,
    stat.S_IFIFO: tarfile.FIFOTYPE,
}

Write = Callable[[bytes], object]


def digest_layer(path: str) -> dict[str, Any]:
    """The diff id of the layer in the directory `path`, how many bytes its files hold, and whether it is empty."""
    digest = hashlib.sha256()
    size = pack_layer(path, digest.update)
    return {"digest": f"sha256:{digest.hexdigest()}", "size": size, "empty": not os.listdir(path)}


def pack_layer(path: str, write: Write) -> int:
    """Write the tar of a layer; how many bytes its files hold. Names are sorted, times whole seconds, owners numbers;
    what overlayfs calls a whiteout or an opaque directory is written as images have it. Sockets and devices are left
    out."""
    size = 0
    links: dict[tuple[int, int], str] = {}
    for name, place, status in _walk(path):
        header = tarfile.TarInfo(name)
        header.mode, header.mtime = stat.S_IMODE(status.st_mode), int(status.st_mtime)
        header.uid, header.gid = status.st_uid, status.st_gid
        kind = stat.S_IFMT(status.st_mode)
        if kind == stat.S_IFCHR and status.st_rdev == 0:
            above, _, last = name.rpartition("/")
            _put(write, _mark(f"{above}/{WHITEOUT}{last}".lstrip("/")))
            continue
        if kind not in _KINDS:
            continue
        header.type = _KINDS[kind]
        header.pax_headers = {} if kind == stat.S_IFLNK else _attributes(place)
        if kind == stat.S_IFLNK:
            header.linkname = str(Path(place).readlink())
        first = links.setdefault((status.st_dev, status.st_ino), name) if status.st_nlink > 1 else name
        if kind == stat.S_IFREG and first != name:
            header.type, header.linkname = tarfile.LNKTYPE, first
        elif kind == stat.S_IFREG:
            header.size = status.st_size
        _put(write, header)
        if header.size:
            _put_content(write, place, header.size)
            size += header.size
        if kind == stat.S_IFDIR and _is_opaque(place):
            _put(write, _mark(f"{name}/{OPAQUE_MARK}".removeprefix("./")))
    write(bytes(2 * tarfile.BLOCKSIZE))
    return size


def _walk(path: str) -> Iterator[tuple[str, str, os.stat_result]]:
    """Name, place and status of everything below a directory, parents first, sorted; and of the directory itself if it
    is not as it would be made again: its time is only that of its making."""
    top = os.lstat(path)
    if (stat.S_IMODE(top.st_mode), top.st_uid, top.st_gid) != _USUAL_ROOT:
        yield ".", path, top
    waiting = [("", path)]
    while waiting:
        above, place = waiting.pop()
        below: list[tuple[str, str]] = []
        for entry in sorted(os.listdir(place)):
            inner = f"{place}/{entry}"
            status = os.lstat(inner)
            yield f"{above}{entry}", inner, status
            if stat.S_ISDIR(status.st_mode):
                below.append((f"{above}{entry}/", inner))
        waiting += reversed(below)


def _mark(name: str) -> tarfile.TarInfo:
    header = tarfile.TarInfo(name)
    header.mode = 0
    return header


def _attributes(place: str) -> dict[str, str]:
    """The kept attributes; a header is text, so each byte of a value is passed as the character that becomes it."""
    return {
        XATTR + name: os.getxattr(place, name).decode("utf-8", "surrogateescape")
        for name in sorted(os.listxattr(place))
        if is_kept_xattr(name)
    }


def _is_opaque(place: str) -> bool:
    return OPAQUE in os.listxattr(place) and os.getxattr(place, OPAQUE) == b"y"


def _put(write: Write, header: tarfile.TarInfo) -> None:
    write(header.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape"))


def _put_content(write: Write, place: str, size: int) -> None:
    """Exactly `size` bytes and the padding: nobody else writes to a layer that is being made."""
    left = size
    with open(place, "rb", buffering=0) as stream:
        while left and (data := stream.read(min(_CHUNK, left))):
            write(data)
            left -= len(data)
    write(bytes(left + -size % tarfile.BLOCKSIZE))
