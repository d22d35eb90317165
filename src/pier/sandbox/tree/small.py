"""Requests that take but a moment, done where nobody may be kept waiting: by a sandbox's init, without a fork.

What goes in lies in a file already, and is little; what comes out fits into an empty pipe. Everything that may be more
is left to `serve` in a process of its own, which can be killed.
"""

from __future__ import annotations

import itertools
import os
import stat
from typing import Any

from pier.beneath import DIRECTORY, IN_ROOT, NO_MAGICLINKS, NO_SYMLINKS, open_in, write_all
from pier.sandbox.tree import pack_options, serve
from pier.sandbox.tree.pack import pack

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
