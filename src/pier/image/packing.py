"""A layer of the store as the tar that an image carries, always the same bytes for the same files.

The digest of that tar is the layer's diff id: what names a layer that was built or copied here, as the archive's own
digest names one that was unpacked.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pier.image.unpack import OPAQUE, OPAQUE_MARK, WHITEOUT, XATTR, is_kept_xattr

_CHUNK = 1 << 20
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
