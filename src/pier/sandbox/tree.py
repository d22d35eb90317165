"""Requests for files inside a sandbox, safe against whatever lies there.

`serve` runs in a forked child inside a sandbox's root and does one request (pack, unpack, read, write, ...). It never
reads or writes outside of the directory it was given, whatever the stream or the tree holds: symlinked parents, `..`,
absolute names, hard links, devices, fifos, or a tree that changes under its hands. Each path is resolved by the kernel
in one step (`openat2`) with the limits of the request, and last parts are never followed. `serve_small` does requests
that take only a moment in the sandbox's init, without a fork: what goes in is little and already in a file, and what
comes out fits into an empty pipe. Everything else is left to `serve` in a process that can be killed.

Only the standard library is used, since a process inside a sandbox's root can import nothing any more; call `warm`
beforehand. Extended attributes are not carried.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import itertools
import json
import os
import stat
import tarfile
from typing import Any

from pier.beneath import (
    BENEATH,
    DIRECTORY,
    ENTRIES,
    IN_ROOT,
    NO_MAGICLINKS,
    NO_SYMLINKS,
    TreeError,
    make_directory,
    open_in,
    remove,
    write_all,
    write_sparse,
)
from pier.sandbox.tar import CHUNK, pack, pack_entry, unpack

__all__ = ["TreeError", "pack", "pack_entry", "pack_options", "serve", "unpack", "warm"]

_INSIDE = IN_ROOT | NO_MAGICLINKS
_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "link"}


def warm() -> None:
    """Make sure that nothing is left to be imported or compiled lazily."""
    read, write = os.pipe()
    with open(write, "wb") as stream, tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(tarfile.TarInfo("é" * 120))
    with open(read, "rb") as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
        list(archive)
    fnmatch.fnmatchcase("a", "*")
    "é".encode("utf-8", "surrogateescape").decode("ascii", "replace")


def serve(request: dict[str, Any], fd: int) -> dict[str, Any]:
    """Do one request with `fd` as its data stream; the answer is JSON-able, errors included. Closes `fd`.

    {"op": "pack", "source", "exclude": [], "max_bytes": null}    writes a tar stream; answers what was "skipped". With
                                                            "keep_empty": false an empty directory is no bytes
    {"op": "unpack", "target", "owner": null | [uid, gid], "max_bytes": null}    reads one; answers "skipped". With
                                                            "clear": [] each of these is first removed, as below; with
                                                            "files": [[path, mode, time, size | null]] it reads the
                                                            content of these, one after the other
    {"op": "read", "source", "max_bytes"}    writes the file's content
    {"op": "write", "target", "mode", "owner": null | [uid, gid]}    reads the file's content
    {"op": "remove", "target"}    removes a file, link or tree
    {"op": "mkdir", "target", "mode", "owner": null | [uid, gid]}    makes a directory and its parents
    {"op": "list" | "stat", "source"}    writes a JSON array for each entry of a directory, or for one path

    A request with "user" comes from a process that has become this user, and is done as that user's shell would: links
    are followed, and files that exist are written in place.
    """
    try:
        root = os.open("/", DIRECTORY)
        try:
            return {"ok": True, "skipped": _OPERATIONS[request["op"]](root, fd, request) or []}
        finally:
            os.close(root)
            os.close(fd)
    except TreeError as error:
        return {"ok": False, "code": error.code, "message": str(error)}
    except FileNotFoundError as error:
        return {"ok": False, "code": "not_found", "message": f"no such file or directory: {_name(error, request)}"}
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        return {"ok": False, "code": "os", "errno": error.errno, "message": f"{reason}: {_name(error, request)}"}
    except Exception as error:  # noqa: BLE001 - the boundary to pier: no request ends the process that does it
        return {"ok": False, "code": "bad_argument", "message": f"invalid request: {type(error).__name__}: {error}"}


def _name(error: OSError, request: dict[str, Any]) -> str:
    return str(error.filename or request.get("source") or request.get("target"))


def _serve_pack(root: int, fd: int, request: dict[str, Any]) -> list[str]:
    return pack(root, request["source"], fd, most=ENTRIES, **pack_options(request))


def pack_options(request: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `pack` that a request has."""
    return {name: request[name] for name in ("exclude", "max_bytes", "keep_empty") if name in request}


def _serve_unpack(root: int, fd: int, request: dict[str, Any]) -> list[str]:
    """Links that stay below the target may be followed there, as in `/bin` -> `usr/bin` when the target is `/`."""
    target = request["target"]
    for path in request.get("clear", ()):
        _remove(root, path)
    owner = tuple(request["owner"]) if request["owner"] else None
    below, _ = make_directory(root, target, _INSIDE, owner)
    limits = NO_MAGICLINKS | (BENEATH if target.strip("/") else IN_ROOT)
    options = {"owner": owner, "max_bytes": request.get("max_bytes"), "in_place": "user" in request}
    options["files"] = request.get("files")
    try:
        with open(fd, "rb", closefd=False) as stream:
            return unpack(stream, below, resolve=limits, keep=True, **options).skipped
    finally:
        os.close(below)


def _serve_read(root: int, fd: int, request: dict[str, Any]) -> None:
    flags, as_user = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY, "user" in request
    try:
        source = open_in(root, request["source"], flags, _INSIDE if as_user else _INSIDE | NO_SYMLINKS)
    except OSError as error:
        if error.errno == errno.ENXIO or (error.errno == errno.ELOOP and not as_user):
            raise TreeError("not_regular", f"not a regular file: {request['source']}") from None
        raise
    try:
        status = os.fstat(source)
        if as_user and stat.S_ISDIR(status.st_mode):
            raise _is_directory(request["source"])
        if not stat.S_ISREG(status.st_mode):
            raise TreeError("not_regular", f"not a regular file: {request['source']}")
        left = request["max_bytes"]
        while data := os.read(source, CHUNK):
            left -= len(data)
            if left < 0:
                raise TreeError("too_large", f"more than {request['max_bytes']} bytes: {request['source']}")
            write_all(fd, data)
    finally:
        os.close(source)


def _serve_write(root: int, fd: int, request: dict[str, Any]) -> None:
    """The content goes to a new file that then takes the name, so a reader sees the old one or the new one; or, as a
    user, where a shell would write it."""
    parent, _, name = request["target"].rpartition("/")
    if name in ("", ".", ".."):
        raise _is_directory(request["target"])
    above, _ = make_directory(root, parent or ".", _INSIDE, request["owner"])
    try:
        if "user" in request:
            _write_in_place(root, fd, request)
        else:
            _write_new(above, name, fd, request)
    except OSError as error:
        # Name the path that was asked for, not the temporary one.
        raise OSError(error.errno, os.strerror(error.errno or 0), request["target"]) from error
    finally:
        os.close(above)


def _write_new(above: int, name: str, fd: int, request: dict[str, Any]) -> None:
    unborn = f".pier-{os.getpid()}-{os.urandom(6).hex()}"
    target = os.open(unborn, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=above)
    try:
        while data := os.read(fd, CHUNK):
            write_sparse(target, data)
        if request["owner"]:
            os.fchown(target, *request["owner"])
        os.fchmod(target, 0o644 if request["mode"] is None else request["mode"])
        os.rename(unborn, name, src_dir_fd=above, dst_dir_fd=above)
    except BaseException:
        os.unlink(unborn, dir_fd=above)
        raise
    finally:
        os.close(target)


def _write_in_place(root: int, fd: int, request: dict[str, Any]) -> None:
    """A new file has the mode `new_mode` without what the umask takes; one that is there keeps its mode, unless there
    is a `mode`."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_NOCTTY
    target = open_in(root, request["target"], flags, _INSIDE, request.get("new_mode", 0o666))
    try:
        os.set_blocking(target, True)
        while data := os.read(fd, CHUNK):
            write_all(target, data)
        if request["mode"] is not None:
            os.fchmod(target, request["mode"])
    finally:
        os.close(target)


def _serve_mkdir(root: int, fd: int, request: dict[str, Any]) -> None:
    """A directory that is there stays as it is."""
    above, made = make_directory(root, request["target"], _INSIDE, request["owner"])
    try:
        if made and request["mode"] is not None:
            below = open_in(above, ".", os.O_RDONLY | os.O_DIRECTORY, _INSIDE)
            os.fchmod(below, request["mode"])
            os.close(below)
    finally:
        os.close(above)


def _serve_stat(root: int, fd: int, request: dict[str, Any]) -> None:
    source = open_in(root, request["source"], os.O_PATH, _INSIDE)
    try:
        write_all(fd, _row(request["source"], os.fstat(source)))
    finally:
        os.close(source)


def _serve_list(root: int, fd: int, request: dict[str, Any]) -> None:
    source = open_in(root, request["source"], os.O_RDONLY | os.O_DIRECTORY, _INSIDE)
    try:
        with os.scandir(source) as entries:
            for count, entry in enumerate(entries):
                if count >= ENTRIES:
                    raise TreeError("too_large", f"more than {ENTRIES} entries: {request['source']}")
                with contextlib.suppress(FileNotFoundError):
                    write_all(fd, _row(entry.name, entry.stat(follow_symlinks=False)))
    finally:
        os.close(source)


def _row(name: str, found: os.stat_result) -> bytes:
    kind = _KINDS.get(stat.S_IFMT(found.st_mode), "other")
    row = [name, kind, found.st_size, stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid, found.st_mtime]
    return json.dumps(row).encode() + b"\n"


def _is_directory(path: str) -> IsADirectoryError:
    return IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)


def _serve_remove(root: int, fd: int, request: dict[str, Any]) -> None:
    _remove(root, request["target"], _INSIDE if "user" in request else _INSIDE | NO_SYMLINKS)


def _remove(root: int, target: str, resolve: int = IN_ROOT | NO_SYMLINKS | NO_MAGICLINKS) -> None:
    """No link on the way is followed, except as a user: a caller that removes a path means that path."""
    parent, _, name = target.rstrip("/").rpartition("/")
    if name in ("", ".", ".."):
        raise _is_directory(target)
    try:
        above = open_in(root, parent or ".", DIRECTORY, resolve)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise TreeError("not_directory", f"not a directory: {parent}") from None
        raise
    try:
        remove(name, above)
    except FileNotFoundError:
        return
    finally:
        os.close(above)


_OPERATIONS = {
    "pack": _serve_pack,
    "unpack": _serve_unpack,
    "read": _serve_read,
    "write": _serve_write,
    "remove": _serve_remove,
    "mkdir": _serve_mkdir,
    "list": _serve_list,
    "stat": _serve_stat,
}


_IN = 1 << 17
_OUT = 48 << 10
_FEW = 64
_ENTRIES = 256


class _TooMuch(Exception):
    """There is more than was looked for."""


class _Kept:
    """A file in memory that takes no more than fits into a pipe."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: bytes) -> int:
        self.data += data
        if len(self.data) > _OUT:
            raise _TooMuch
        return len(data)


def serve_small(request: dict[str, Any], fd: int) -> dict[str, Any] | None:
    """As `serve`; or None if the request may take longer. Then nothing was done, and `fd` is still open."""
    root = os.open("/", DIRECTORY)
    try:
        if request["op"] == "pack":
            return _pack(root, request, fd)
        return serve(request, fd) if _LOOKS[request["op"]](root, request, fd) else None
    except Exception:  # noqa: BLE001 - `serve` answers for whatever is wrong with the request
        return None
    finally:
        os.close(root)


def _pack(root: int, request: dict[str, Any], fd: int) -> dict[str, Any]:
    kept: Any = _Kept()
    skipped = pack(root, request["source"], kept, most=_ENTRIES, **pack_options(request))
    write_all(fd, kept.data)
    os.close(fd)
    return {"ok": True, "skipped": skipped}


def _is_here(root: int, request: dict[str, Any], fd: int) -> bool:
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_size > _IN:
        return False
    return all(_is_flat(root, path) for path in request.get("clear", ()))


def _is_short(root: int, request: dict[str, Any], fd: int) -> bool:
    """Whether a file is known to be short. One that says it has no length may be of the kernel's making, and wait."""
    source = open_in(root, request["source"], os.O_PATH, IN_ROOT | NO_SYMLINKS | NO_MAGICLINKS)
    try:
        found = os.fstat(source)
    finally:
        os.close(source)
    return stat.S_ISREG(found.st_mode) and 0 < found.st_size <= _OUT


def _is_removed_soon(root: int, request: dict[str, Any], fd: int) -> bool:
    return _is_flat(root, request["target"])


def _is_flat(root: int, path: str) -> bool:
    """Whether there is nothing to remove, or a file, or a directory of a few of them."""
    flags = os.O_RDONLY | os.O_DIRECTORY
    try:
        target = open_in(root, path.rstrip("/"), flags, IN_ROOT | NO_SYMLINKS | NO_MAGICLINKS)
    except (FileNotFoundError, NotADirectoryError):
        return True
    try:
        with os.scandir(target) as entries:
            seen = list(itertools.islice(entries, _FEW))
            return len(seen) < _FEW and not any(entry.is_dir(follow_symlinks=False) for entry in seen)
    finally:
        os.close(target)


_LOOKS = {"write": _is_here, "unpack": _is_here, "read": _is_short, "remove": _is_removed_soon}
