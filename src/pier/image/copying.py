"""COPY, ADD and WORKDIR: puts files into a new layer on top of others, with the owners, modes and places that Docker
would give them. Files that `.dockerignore` excludes are not seen; its last pattern that matches decides.

A layer that holds a file also holds the directories above it, and overlayfs takes their metadata from the topmost
layer: so each directory that exists below is repeated with the metadata that it has there.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pier.beneath import write_all
from pier.errors import ImageError
from pier.image.layer_directories import View, ViewEntry, remove_tree, user_ids
from pier.image.layer_tar import compression_of, decompressed, is_kept_xattr, unpack


class Ignore:
    """Patterns in order; `!pattern` takes files back in."""

    def __init__(self, lines: Iterable[str] = ()) -> None:
        self.lines = [line for raw in lines if (line := _clean(raw))]
        self._rules = [(_regex(line.removeprefix("!")), line.startswith("!")) for line in self.lines]
        self.has_exceptions = any(taken_back for _, taken_back in self._rules)

    def excludes(self, path: str) -> bool:
        """Whether the file at `path` (relative, with slashes) is left out; a match of a parent counts."""
        parts = path.split("/")
        prefixes = ["/".join(parts[: count + 1]) for count in range(len(parts))]
        excluded = False
        for pattern, taken_back in self._rules:
            if excluded == taken_back and any(pattern.fullmatch(prefix) for prefix in prefixes):
                excluded = not taken_back
        return excluded


def read_ignore(context: Path, dockerfile: Path) -> Ignore:
    """The ignore file beside the Dockerfile if it has one of its own, else the context's."""
    for path in (dockerfile.with_name(f"{dockerfile.name}.dockerignore"), context / ".dockerignore"):
        if path.is_file():
            return Ignore(path.read_text(encoding="utf-8-sig", errors="replace").splitlines())
    return Ignore()


def _clean(line: str) -> str:
    if line.startswith("#"):
        return ""
    line = line.strip()
    mark = "!" if line.startswith("!") else ""
    line = line.removeprefix("!").strip()
    if not line:
        return ""
    path = posixpath.normpath(line).lstrip("/")
    return "" if path in (".", "") else mark + path


def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile(glob_regex(pattern, stars=True), re.DOTALL)


def glob_regex(pattern: str, *, stars: bool = False) -> str:
    """A path pattern as a regular expression: `*` and `?` stop at slashes, `**` (with `stars`) does not."""
    out, at = "", 0
    while at < len(pattern):
        char = pattern[at]
        if stars and pattern.startswith("**", at):
            at += 2
            if pattern.startswith("/", at):
                at += 1
                out += "(?:.*/)?"
            else:
                out += ".*"
            continue
        at += 1
        if char == "*":
            out += "[^/]*"
        elif char == "?":
            out += "[^/]"
        elif char == "[" and (end := pattern.find("]", at + 1)) > 0:
            inner = pattern[at:end].replace("\\", "\\\\")
            out += f"[{'^' + inner[1:] if inner.startswith(('^', '!')) else inner}]"
            at = end + 1
        elif char == "\\" and at < len(pattern):
            out += re.escape(pattern[at])
            at += 1
        else:
            out += re.escape(char)
    return out


_CHUNK = 1 << 20


def copy_into(
    target: str,
    layers: list[str],
    sources: list[dict[str, Any]],
    destination: str,
    *,
    chown: str = "",
    chmod: int | None = None,
    unpack_archives: bool = False,
    owners: bool = True,
) -> dict[str, Any]:
    """Copy sources into the new layer `target` on top of `layers`.

    A source has `layers` to look into, a `path` with wildcards in them, and may have `ignore` patterns and `reset`,
    which makes root the owner of what has no other.
    """
    below = View([*layers, target])
    layer = _Layer(target, below, user_ids(below, chown) if chown else None, chmod, owners)
    for source in sources:
        view = View(source["layers"])
        layer.begin(Ignore(source.get("ignore", ())), reset=source.get("reset", False))
        for name, entry in matches(view, source["path"], layer.ignore):
            if unpack_archives and entry.is_file and _is_archive(entry.place):
                layer.unpack(entry, destination)
            else:
                layer.put(view, entry, destination, name)
    layer.set_times()
    return {}


def make_directories(
    target: str, layers: list[str], path: str, *, user: str = "", owners: bool = True
) -> dict[str, Any]:
    """Make the directory `path` and its parents, for `user`, in the new layer `target`, if that is needed."""
    view = View([*layers, target])
    where, found = view.locate(path)
    if found is not None:
        if not found.is_dir:
            raise ImageError(f"{path} is not a directory", code="build", blame="task")
        return {}
    layer = _Layer(target, view, user_ids(view, user) if user else None, None, owners)
    layer.directory(where)
    layer.set_times()
    return {}


class _Layer:
    """The layer that is being written."""

    def __init__(self, target: str, view: View, owner: tuple[int, int] | None, mode: int | None, owners: bool) -> None:
        self._target = target
        self._view = view
        self._owner = owner
        self._mode = mode
        self._owners = owners
        self._reset = False
        self._links: dict[tuple[int, int], str] = {}
        self.ignore = Ignore()
        self._times: dict[str, int] = {}
        self._newest = 0
        places = view.root.places
        if len(places) > 1:
            self._copy_metadata(ViewEntry("/", places[1:], os.lstat(places[1])), target)

    def begin(self, ignore: Ignore, *, reset: bool) -> None:
        self.ignore = ignore
        self._reset = reset
        self._links = {}

    def put(self, source: View, entry: ViewEntry, destination: str, name: str) -> None:
        """Copy a file to `destination` or into it, or the contents of a directory into it."""
        self._newest = max(self._newest, entry.status.st_mtime_ns)
        where, there = self._view.locate(destination)
        if entry.is_dir:
            if there is not None and not there.is_dir:
                raise _refused(f"{destination} is not a directory")
            self.directory(where)
            self._contents(source, entry, where)
            return
        if destination.endswith("/") or (there is not None and there.is_dir):
            where = f"{where.rstrip('/')}/{name}"
            where, there = self._view.locate(where)
            if there is not None and there.is_dir:
                raise _refused(f"{where} is a directory")
        self.directory(posixpath.dirname(where))
        self._place(source, entry, where)

    def unpack(self, entry: ViewEntry, destination: str) -> None:
        """Unpack an archive into `destination`, with the owners and modes that it holds, as BuildKit does: `--chown` is
        for the directory only."""
        self._newest = max(self._newest, entry.status.st_mtime_ns)
        where, there = self._view.locate(destination)
        if there is not None and not there.is_dir:
            raise _refused(f"{destination} is not a directory")
        self.directory(where)
        away = tempfile.mkdtemp(dir=os.path.dirname(self._target))
        try:
            with decompressed(entry.place) as stream:
                unpack(stream, away, owners=self._owners)
            view = View([away])
            kept = (self._reset, self._owner, self._mode)
            self._reset, self._owner, self._mode = False, None, None
            self._contents(view, view.root, where, replace=True)
            self._reset, self._owner, self._mode = kept
        finally:
            remove_tree(away)

    def directory(self, path: str, *, replace: bool = False) -> str:
        """The directory `path` in this layer, made if it is missing: like the one below, or new. With `replace`
        it may take the place of something else."""
        if path in ("/", ""):
            return self._target
        place = f"{self._target}{path}"
        self.directory(posixpath.dirname(path))
        if os.path.isdir(place) and not os.path.islink(place):
            return place
        below = self._view.find(path, follow=False)
        if below is not None and not below.is_dir and not replace:
            raise _refused(f"{path} is not a directory")
        os.mkdir(place, 0o755)
        if below is not None and below.is_dir:
            self._copy_metadata(below, place)
        else:
            self._times[place] = 0
            os.chmod(place, 0o755)
            if self._owners:
                os.chown(place, *(self._owner or (0, 0)))
        return place

    def _contents(self, source: View, directory: ViewEntry, where: str, *, replace: bool = False) -> None:
        for child in source.children(directory):
            excluded = self.ignore.excludes(child.path.lstrip("/"))
            if excluded and not (child.is_dir and self.ignore.has_exceptions):
                continue
            path = f"{where.rstrip('/')}/{posixpath.basename(child.path)}"
            there = self._view.find(path, follow=False)
            if not child.is_dir:
                if there is not None and there.is_dir and not replace:
                    raise _refused(f"{path} is a directory")
                self._place(source, child, path)
                continue
            if there is not None and not there.is_dir and not replace:
                raise _refused(f"{path} is not a directory")
            if excluded and not any(True for _ in self._included(source, child)):
                continue
            if there is not None and not there.is_dir:
                self._clear(path)
            place = self.directory(path, replace=replace)
            self._contents(source, child, path, replace=replace)
            self._set_metadata(child, place)

    def _included(self, source: View, directory: ViewEntry) -> Iterator[ViewEntry]:
        for child in source.children(directory):
            if not self.ignore.excludes(child.path.lstrip("/")):
                yield child
            elif child.is_dir:
                yield from self._included(source, child)

    def _clear(self, path: str) -> None:
        place = f"{self._target}{path}"
        if os.path.islink(place) or not os.path.isdir(place):
            if os.path.lexists(place):
                os.unlink(place)
        else:
            remove_tree(place)

    def _place(self, source: View, entry: ViewEntry, path: str) -> None:
        """Copy one entry that is no directory to exactly `path`; its parent is in this layer."""
        self._clear(path)
        place = f"{self._target}{path}"
        key = (entry.status.st_dev, entry.status.st_ino)
        if entry.is_link:
            os.symlink(os.readlink(entry.place), place)
        elif entry.is_file and key in self._links:
            os.link(self._links[key], place)
            return
        elif entry.is_file:
            self._copy_file(entry.place, place)
            if entry.status.st_nlink > 1:
                self._links[key] = place
        else:
            return
        self._set_metadata(entry, place)

    def _copy_file(self, source: str, place: str) -> None:
        with open(source, "rb", buffering=0) as reader, open(place, "xb", buffering=0) as writer:
            while data := reader.read(_CHUNK):
                write_all(writer.fileno(), data)

    def _set_metadata(self, entry: ViewEntry, place: str) -> None:
        """The metadata of a copied entry: `--chown` and `--chmod` go before its own."""
        self._copy_metadata(entry, place, self._owner or ((0, 0) if self._reset else None))
        if self._mode is not None and not entry.is_link:
            os.chmod(place, self._mode)

    def _copy_metadata(self, entry: ViewEntry, place: str, owner: tuple[int, int] | None = None) -> None:
        status = entry.status
        if self._owners:
            os.chown(place, *(owner or (status.st_uid, status.st_gid)), follow_symlinks=False)
        if not entry.is_link:
            os.chmod(place, stat.S_IMODE(status.st_mode))
            for name in filter(is_kept_xattr, os.listxattr(entry.place)):
                os.setxattr(place, name, os.getxattr(entry.place, name))
        os.utime(place, ns=(status.st_mtime_ns, status.st_mtime_ns), follow_symlinks=False)
        if entry.is_dir:
            self._times[place] = status.st_mtime_ns

    def set_times(self) -> None:
        """At the end: writing into a directory changed its time. One that is like another has the time of that; a new
        one is as old as what was put into the layer, so that the same copy is the same layer."""
        for place, known in self._times.items():
            at = known or self._newest
            if at and os.path.isdir(place) and not os.path.islink(place):
                os.utime(place, ns=(at, at))


def matches(view: View, pattern: str, ignore: Ignore) -> list[tuple[str, ViewEntry]]:
    """What a source pattern names: base names, and entries with symbolic links followed.

    Without wildcards it must exist. Wildcards may match nothing, as in Docker.
    """
    clean = posixpath.normpath("/" + pattern.lstrip("/"))
    if not re.search(r"[*?\[]", clean):
        path, entry = view.locate(clean.replace("\\", ""))
        if entry is None or (path != "/" and _is_hidden(entry, ignore)):
            raise ImageError(f"{pattern} is not there", code="build", blame="task")
        return [(posixpath.basename(clean), entry)]
    found = [view.root]
    for part in clean.split("/")[1:]:
        regex = re.compile(glob_regex(part), re.DOTALL)
        directories = [real for entry in found if (real := view.find(entry.path)) is not None and real.is_dir]
        children = [child for directory in directories for child in view.children(directory)]
        found = [child for child in children if regex.fullmatch(posixpath.basename(child.path))]
    visible = [entry for entry in found if not _is_hidden(entry, ignore)]
    return [(posixpath.basename(entry.path), real) for entry in visible if (real := view.find(entry.path)) is not None]


def content_digest(view: View, pattern: str, ignore: Ignore) -> str:
    """What a cache key must know of a source: names, modes and contents, but no times and no owners."""
    digest = hashlib.sha256()

    def add(entry: ViewEntry, name: str) -> None:
        content = ""
        if entry.is_file:
            content = _file_digest(entry)
        elif entry.is_link:
            content = os.readlink(entry.place)
        row = f"{name}\0{entry.status.st_mode:o}\0{content}\n"
        digest.update(row.encode("utf-8", "surrogateescape"))
        if entry.is_dir:
            for child in view.children(entry):
                hidden = ignore.excludes(child.path.lstrip("/"))
                if not hidden or (child.is_dir and ignore.has_exceptions):
                    add(child, f"{name}/{posixpath.basename(child.path)}")

    for name, entry in matches(view, pattern, ignore):
        add(entry, name)
    return digest.hexdigest()


_digests: dict[tuple[int, int, int, int, int], str] = {}
"""Digests of files that were read before, by what changes when a file does."""


def _file_digest(entry: ViewEntry) -> str:
    status = entry.status
    key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    if key not in _digests:
        with open(entry.place, "rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        # A file that was changed just now could change again within one tick of the clock of its times.
        if time.time_ns() - status.st_ctime_ns < 2_000_000_000:
            return found
        _digests[key] = found
    return _digests[key]


def _is_hidden(entry: ViewEntry, ignore: Ignore) -> bool:
    """Whether an entry is left out, with all that is in it."""
    return ignore.excludes(entry.path.lstrip("/")) and not (entry.is_dir and ignore.has_exceptions)


def _is_archive(place: str) -> bool:
    """Whether ADD unpacks a file: it is a tar, compressed or not, by its content."""
    with open(place, "rb") as stream:
        head = stream.read(512)
    if not compression_of(head):
        return head[257:262] == b"ustar"
    try:
        with decompressed(place) as stream:
            return stream.read(512)[257:262] == b"ustar"
    except ImageError:
        return False


def _refused(why: str) -> ImageError:
    return ImageError(why, code="build", blame="task")
