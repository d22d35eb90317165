"""Looks into layers as a sandbox would see them merged, without mounting them.

Symbolic links are followed inside the merged root only.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pier.errors import ImageError
from pier.image.unpack import OPAQUE

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
