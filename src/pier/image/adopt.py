"""Work on the directories of a store, done by the owner of their files.

Each function takes and gives plain values only, so that `pier.image.owner` can run it here (as root) or in a process
inside the user namespace that owns the files (as a plain user). Adopting makes what a sandbox wrote into a layer: its
files get the owners that a store's files have (a sandbox started by root writes with shifted ids), and mount points
that only served the build are removed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import struct
from collections.abc import Callable
from typing import Any, BinaryIO, cast

from pier.idmap import SHIFT
from pier.image.disk import write_all
from pier.image.packing import digest_layer
from pier.image.unpack import OPAQUE, HashingReader, decompressed, is_kept_xattr, make_whiteout, unpack
from pier.image.view import View, ViewEntry


def unpack_archive(archive: str, target: str, *, owners: bool = True) -> dict[str, Any]:
    """Unpack a layer's (compressed) tar into `target`; its diff id and the size of its files."""
    with decompressed(archive) as stream:
        reader = HashingReader(stream)
        size = unpack(cast(BinaryIO, reader), target, owners=owners)
        return {"digest": reader.digest(), "size": size}


def copy_tree(source: str, target: str, *, owners: bool = True) -> dict[str, Any]:
    """Copy what is in the directory `source` into `target`; its diff id and the size of its files."""
    TreeCopier(owners).copy_directory(source, target)
    return digest_layer(target)


def remove_tree(path: str) -> dict[str, Any]:
    """Remove a directory, whatever the modes inside are. Missing is fine."""

    def retry(function: Callable[..., Any], name: str, _: object) -> None:
        if not os.path.lexists(name):
            return
        os.chmod(os.path.dirname(name), 0o700)
        if not os.path.islink(name) and os.path.isdir(name):
            os.chmod(name, 0o700)
            shutil.rmtree(name)
        else:
            os.unlink(name)

    shutil.rmtree(path, onerror=retry)
    return {}


def measure(path: str) -> dict[str, Any]:
    """How many bytes the files below a directory hold."""
    return {"size": sum(os.lstat(f"{above}/{name}").st_size for above, _, names in os.walk(path) for name in names)}


class TreeCopier:
    """Copies files as they are: owners, modes, times, links, kept attributes. Devices and sockets are left out.

    With `overlay` whiteouts and opaque directories are copied for what they are.
    """

    def __init__(self, owners: bool, *, overlay: bool = False) -> None:
        self._overlay = overlay
        self._owners = owners
        self._links: dict[tuple[int, int], str] = {}

    def copy_directory(self, source: str, target: str) -> None:
        """Copy the contents of a directory, and its own metadata, onto an existing directory."""
        for entry in sorted(os.listdir(source)):
            self._copy(f"{source}/{entry}", f"{target}/{entry}")
        self.set_metadata(source, target, os.lstat(source))

    def _copy(self, source: str, target: str) -> None:
        status = os.lstat(source)
        kind = stat.S_IFMT(status.st_mode)
        if self._overlay and stat.S_ISCHR(kind) and status.st_rdev == 0:
            make_whiteout(target)
            return
        if kind not in (stat.S_IFDIR, stat.S_IFREG, stat.S_IFLNK, stat.S_IFIFO):
            return
        if kind == stat.S_IFDIR:
            os.mkdir(target, 0o700)
            self.copy_directory(source, target)
        elif (first := self._links.get((status.st_dev, status.st_ino))) and kind == stat.S_IFREG:
            os.link(first, target)
        elif kind == stat.S_IFREG:
            _copy_file(source, target)
            if status.st_nlink > 1:
                self._links[status.st_dev, status.st_ino] = target
        elif kind == stat.S_IFLNK:
            os.symlink(os.readlink(source), target)
        else:
            os.mkfifo(target)
        if kind != stat.S_IFDIR:
            self.set_metadata(source, target, status)

    def set_metadata(self, source: str, target: str, status: os.stat_result) -> None:
        """Give `target` the owner, mode, attributes and times of `source`."""
        if self._owners:
            os.chown(target, status.st_uid, status.st_gid, follow_symlinks=False)
        if not stat.S_ISLNK(status.st_mode):
            os.chmod(target, stat.S_IMODE(status.st_mode))
            for name in os.listxattr(source):
                if not (is_kept_xattr(name) or (self._overlay and name == OPAQUE)):
                    continue
                os.setxattr(target, name, os.getxattr(source, name))
        os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns), follow_symlinks=False)


def _copy_file(source: str, target: str) -> None:
    with open(source, "rb", buffering=0) as reader, open(target, "xb", buffering=0) as writer:
        while data := reader.read(1 << 20):
            write_all(writer, data)


_STUBS = ("proc", "sys", "dev", "tmp", "etc")
_MOUNTED_FILES = ("etc/resolv.conf", "etc/hosts", "etc/hostname")
_COPY_UP = {"user.overlay.origin", "user.overlay.impure", "user.overlay.uuid"}
_CAPABILITY = "security.capability"


def adopt_layer(source: str, target: str, below: list[str], stubs: list[str]) -> dict[str, Any]:
    """Move the overlay directory `source` to the empty directory `target`. `below` are the layers that it was written
    on, `stubs` the paths that something was mounted on."""
    try:
        os.rename(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        TreeCopier(owners=True, overlay=True).copy_directory(source, target)
    if os.geteuid() == 0 and os.lstat(target).st_uid >= SHIFT:
        _unshift(target)
    for name in _MOUNTED_FILES:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
            os.unlink(f"{target}/{name}")
    _remove_stubs(target, below, stubs)
    return {}


def _remove_stubs(target: str, below: list[str], stubs: list[str]) -> None:
    """Remove what was made, or copied into the layer, only to mount on it."""
    view = View(below) if below else None
    for name in (*stubs, *_STUBS):
        path = name.strip("/")
        while path:
            there = view.find(path, follow=False) if view else None
            try:
                _remove_if_untouched(f"{target}/{path}", there)
            except OSError:
                break
            path = path.rpartition("/")[0]


def _remove_if_untouched(place: str, there: ViewEntry | None) -> None:
    """Remove an empty file or directory that is as the image has it, or not in the image. Raises OSError if not."""
    status = os.lstat(place)
    if there is not None:
        old = there.status
        is_same = (status.st_mode, status.st_uid, status.st_gid) == (old.st_mode, old.st_uid, old.st_gid)
        if not is_same or not stat.S_ISDIR(status.st_mode) or not set(os.listxattr(place)) <= _COPY_UP:
            raise OSError("it was changed")
    if stat.S_ISREG(status.st_mode) and status.st_size == 0:
        os.unlink(place)
    else:
        os.rmdir(place)


def _unshift(target: str) -> None:
    for directory, names, files in os.walk(target):
        _unshift_one(directory)
        for name in files:
            _unshift_one(f"{directory}/{name}")
        for name in names:
            if os.path.islink(f"{directory}/{name}"):
                _unshift_one(f"{directory}/{name}")


def _unshift_one(path: str) -> None:
    status = os.lstat(path)
    if status.st_uid < SHIFT and status.st_gid < SHIFT:
        return
    uid = status.st_uid - SHIFT if status.st_uid >= SHIFT else status.st_uid
    gid = status.st_gid - SHIFT if status.st_gid >= SHIFT else status.st_gid
    capability = None
    if stat.S_ISREG(status.st_mode):
        with contextlib.suppress(OSError):
            capability = os.getxattr(path, _CAPABILITY)
    os.chown(path, uid, gid, follow_symlinks=False)
    if stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode):
        if status.st_mode & 0o7000:
            os.chmod(path, stat.S_IMODE(status.st_mode))
        if capability is not None:
            os.setxattr(path, _CAPABILITY, _plain_capability(capability))


def _plain_capability(value: bytes) -> bytes:
    """File capabilities of a user namespace's root (version 3) as those of root (version 2)."""
    if len(value) != 24:
        return value
    magic, *rest = struct.unpack("<6I", value)
    return struct.pack("<5I", 0x02000000 | (magic & 1), *rest[:4])
