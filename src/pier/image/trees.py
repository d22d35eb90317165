"""What is done to directories of a store by whoever owns their files.

Each function takes and gives plain values only, so that `pier.image.owner` can run it here (as root) or in a process
inside the user namespace that owns the files (as a plain user).
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from typing import Any, BinaryIO, cast

from pier.image.compression import HashingReader, decompressed
from pier.image.disk import write_all
from pier.image.packing import digest_layer
from pier.image.unpack import OPAQUE, is_kept_xattr, make_whiteout, unpack


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
