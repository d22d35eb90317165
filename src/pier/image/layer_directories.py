"""Layers as directories: looking into them as a sandbox would see them merged, and changing those of a store.

A `View` needs no mount, and follows symbolic links inside the merged root only. The functions that change a store take
and give plain values only, so that `pier.image.owner` can run them here (as root) or in a process inside the user
namespace that owns the files (as a plain user). Adopting makes what a sandbox wrote into a layer: its files get the
owners that a store's files have (a sandbox started by root writes with shifted ids), and mount points that only served
the build are removed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from pier.beneath import write_all
from pier.errors import ImageError
from pier.idmap import SHIFT
from pier.image.layer_tar import OPAQUE, HashingReader, decompressed, digest_layer, is_kept_xattr, make_whiteout, unpack

_MAX_LINKS = 40


@dataclass(frozen=True, slots=True)
class ViewEntry:
    """Something in the merged root: its path there, and the places in the layers that make it, topmost first."""

    path: str
    places: tuple[str, ...]
    status: os.stat_result

    @property
    def is_dir(self) -> bool:
        return stat.S_ISDIR(self.status.st_mode)

    @property
    def is_link(self) -> bool:
        return stat.S_ISLNK(self.status.st_mode)

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.status.st_mode)

    @property
    def place(self) -> str:
        return self.places[0]


class View:
    """Layers, lowest first, as one tree. Nothing is cached: the topmost one may still be written to."""

    def __init__(self, layers: Sequence[str]) -> None:
        self._places = tuple(reversed(layers))

    @property
    def root(self) -> ViewEntry:
        if not self._places:
            raise ImageError("an image without layers has no files", code="files")
        places = _down_to_opaque(self._places)
        return ViewEntry("/", places, os.lstat(places[0]))

    def child(self, directory: ViewEntry, name: str) -> ViewEntry | None:
        """What a directory holds under a name, symbolic links not followed."""
        places: list[str] = []
        status: os.stat_result | None = None
        for above in directory.places:
            place = f"{above.rstrip('/')}/{name}"
            try:
                found = os.lstat(place)
            except (FileNotFoundError, NotADirectoryError):
                continue
            if _is_whiteout(found):
                break
            if status is None:
                status = found
            elif not stat.S_ISDIR(found.st_mode):
                break
            places.append(place)
            if not stat.S_ISDIR(found.st_mode) or _is_opaque(place):
                break
        if status is None:
            return None
        return ViewEntry(f"{directory.path.rstrip('/')}/{name}", tuple(places), status)

    def children(self, directory: ViewEntry) -> Iterator[ViewEntry]:
        """All that a directory holds, by name."""
        names = {name for place in directory.places for name in os.listdir(place)}
        for name in sorted(names):
            if (entry := self.child(directory, name)) is not None:
                yield entry

    def find(self, path: str, *, follow: bool = True) -> ViewEntry | None:
        """What is at `path`; with `follow` also the last part may be a symbolic link."""
        return self.locate(path, follow=follow)[1]

    def locate(self, path: str, *, follow: bool = True) -> tuple[str, ViewEntry | None]:
        """The path with its symbolic links followed, as far as it exists, and what is there."""
        walked: list[ViewEntry] = [self.root]
        left = [part for part in path.split("/") if part not in ("", ".")]
        missing: list[str] = []
        links = 0
        while left:
            part = left.pop(0)
            if part in ("", "."):
                continue
            if part == "..":
                if missing:
                    missing.pop()
                elif len(walked) > 1:
                    walked.pop()
                continue
            found = None if missing or not walked[-1].is_dir else self.child(walked[-1], part)
            if found is None:
                missing.append(part)
            elif found.is_link and (left or follow):
                links += 1
                if links > _MAX_LINKS:
                    raise ImageError(f"{path} goes through too many symbolic links", code="files", blame="task")
                target = os.readlink(found.place)
                if target.startswith("/"):
                    del walked[1:]
                left = [*target.split("/"), *left]
            else:
                walked.append(found)
        here = walked[-1].path.rstrip("/")
        if missing:
            return f"{here}/{'/'.join(missing)}", None
        return here or "/", walked[-1]

    def read_text(self, path: str) -> str:
        """A small text file, empty if it is missing."""
        entry = self.find(path)
        if entry is None or not entry.is_file:
            return ""
        with open(entry.place, encoding="utf-8", errors="replace") as stream:
            return stream.read(1 << 22)


def user_ids(view: View, spec: str) -> tuple[int, int]:
    """The ids of `user[:group]` (names or numbers) by the image's own passwd and group files.

    A number alone is also the group, a name alone has the group of its passwd entry.
    """
    user, _, group = spec.partition(":")
    if user.isdigit():
        uid = gid = int(user)
    elif not user:
        uid = gid = 0
    else:
        uid, gid = _look_up(view, "/etc/passwd", user, (2, 3))
    if group:
        gid = int(group) if group.isdigit() else _look_up(view, "/etc/group", group, (2, 2))[0]
    return uid, gid


def _look_up(view: View, path: str, name: str, columns: tuple[int, int]) -> tuple[int, int]:
    for row in view.read_text(path).splitlines():
        fields = row.split(":")
        if fields[0] == name and len(fields) > max(columns):
            return int(fields[columns[0]]), int(fields[columns[1]])
    raise ImageError(f"{name!r} is not in {path} of the image", code="build", blame="task")


def _is_whiteout(status: os.stat_result) -> bool:
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def _is_opaque(place: str) -> bool:
    try:
        return os.getxattr(place, OPAQUE) == b"y"
    except OSError:
        return False


def _down_to_opaque(places: tuple[str, ...]) -> tuple[str, ...]:
    for position, place in enumerate(places):
        if _is_opaque(place):
            return places[: position + 1]
    return places


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
            write_all(writer.fileno(), data)


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
