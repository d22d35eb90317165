"""Trees of files through tar streams, safe against whatever lies on either side.

`serve` runs in a forked child inside a sandbox's root and does one request (pack, unpack, read, write, remove);
`receive.receive` runs on the host, for a stream that came out of a sandbox. Neither ever reads or writes outside of the
directory it was given, whatever the stream or the tree holds: symlinked parents, `..`, absolute names, hard links,
devices, fifos, or a tree that changes under its hands. Each path is resolved by the kernel in one step (`openat2`) with
the limits of the request, and last parts are never followed.

Only the standard library is used, since a process inside a sandbox's root can import nothing any more; call `warm`
beforehand. Extended attributes are not carried.
"""

from __future__ import annotations

import errno
import fnmatch
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
from pier.sandbox.tree.pack import CHUNK, pack, pack_entry
from pier.sandbox.tree.unpack import unpack

__all__ = ["TreeError", "pack", "pack_entry", "serve", "unpack", "warm"]


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

    {"op": "pack", "source", "exclude": [], "max_bytes": null}    writes a tar stream; answers what was "skipped"
    {"op": "unpack", "target", "owner": null | [uid, gid], "max_bytes": null}    reads one; answers "skipped". With
                                                            "clear": [] each of these is first removed, as below
    {"op": "read", "source", "max_bytes"}    writes the file's content
    {"op": "write", "target", "mode", "owner": null | [uid, gid]}    reads the file's content
    {"op": "remove", "target"}    removes a file, link or tree
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
    limits = {"max_bytes": request["max_bytes"], "most": ENTRIES}
    return pack(root, request["source"], fd, exclude=request["exclude"], **limits)


def _serve_unpack(root: int, fd: int, request: dict[str, Any]) -> list[str]:
    """Links that stay below the target may be followed there, as in `/bin` -> `usr/bin` when the target is `/`."""
    target = request["target"]
    for path in request.get("clear", ()):
        _remove(root, path)
    below, _ = make_directory(root, target, IN_ROOT | NO_MAGICLINKS)
    limits = NO_MAGICLINKS | (BENEATH if target.strip("/") else IN_ROOT)
    owner = tuple(request["owner"]) if request["owner"] else None
    try:
        with open(fd, "rb", closefd=False) as stream:
            limit = request.get("max_bytes")
            return unpack(stream, below, resolve=limits, owner=owner, keep=True, max_bytes=limit).skipped
    finally:
        os.close(below)


def _serve_read(root: int, fd: int, request: dict[str, Any]) -> None:
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
    try:
        source = open_in(root, request["source"], flags, IN_ROOT | NO_SYMLINKS | NO_MAGICLINKS)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise TreeError("not_regular", f"not a regular file: {request['source']}") from None
        raise
    try:
        status = os.fstat(source)
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
    """The content goes to a new file that then takes the name, so a reader sees the old one or the new one."""
    parent, _, name = request["target"].rpartition("/")
    if name in ("", ".", ".."):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), request["target"])
    above, _ = make_directory(root, parent or ".", IN_ROOT | NO_MAGICLINKS)
    try:
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
        os.fchmod(target, request["mode"])
        os.rename(unborn, name, src_dir_fd=above, dst_dir_fd=above)
    except BaseException:
        os.unlink(unborn, dir_fd=above)
        raise
    finally:
        os.close(target)


def _serve_remove(root: int, fd: int, request: dict[str, Any]) -> None:
    _remove(root, request["target"])


def _remove(root: int, target: str) -> None:
    """No link on the way is followed: whoever removes a path means that path."""
    parent, _, name = target.rstrip("/").rpartition("/")
    if name in ("", ".", ".."):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), target)
    try:
        above = open_in(root, parent or ".", DIRECTORY, IN_ROOT | NO_SYMLINKS | NO_MAGICLINKS)
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
}
