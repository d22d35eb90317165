"""Makes what a sandbox wrote into a layer of the store.

The files get the owners that a store's files have (a sandbox started by root writes with shifted ids), and what only
served to mount something on it goes: a build's layers hold what the build's commands did.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct
from typing import Any

from pier.idmap import SHIFT
from pier.image.trees import TreeCopier
from pier.image.view import Entry, View

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


def _remove_if_untouched(place: str, there: Entry | None) -> None:
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
