"""Who a command runs as, by the sandbox's own /etc/passwd and /etc/group.

Those files are the sandbox's to write, so they are read with care: regular files only, and not more than a megabyte.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

_MOST = 1 << 20


class User:
    """The ids, groups and home of whom a command runs as."""

    def __init__(self, uid: int, gid: int, groups: list[int], home: str, name: str) -> None:
        self.uid = uid
        self.gid = gid
        self.groups = groups
        self.home = home
        self.name = name


class NoSuchUser(Exception):
    """The sandbox has no such user or group."""


def find(wanted: str) -> User:
    """The user for `name`, `uid`, `name:group` or `uid:gid`. A number needs no entry; the empty string is root."""
    who, _, group = (wanted or "0").partition(":")
    row = next((row for row in _rows("/etc/passwd", 7, who) if who in (row[0], row[2])), None)
    if row is not None:
        name, uid, gid, home = row[0], int(row[2]), int(row[3]), row[5] or "/"
    elif _is_id(who):
        name, uid, gid, home = who, int(who), 0, "/root" if who == "0" else "/"
    else:
        raise NoSuchUser(f"unknown user {who!r}: not in the sandbox's /etc/passwd")
    if group:
        gid = _group(group)
        return User(uid, gid, [gid], home, name)
    extra = [int(row[2]) for row in _rows("/etc/group", 4, name) if name in row[3].split(",")]
    return User(uid, gid, sorted({gid, *extra}), home, name)


def _group(wanted: str) -> int:
    if _is_id(wanted):
        return int(wanted)
    for row in _rows("/etc/group", 4, wanted):
        if row[0] == wanted:
            return int(row[2])
    raise NoSuchUser(f"unknown group {wanted!r}: not in the sandbox's /etc/group")


def _rows(path: str, fields: int, wanted: str) -> Iterator[list[str]]:
    """The valid rows of a file that contain `wanted`."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError:
        return
    try:
        data = os.read(fd, _MOST) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
    except OSError:
        data = b""
    finally:
        os.close(fd)
    for line in data.decode(errors="surrogateescape").splitlines():
        row = line.split(":") if wanted in line else []
        if len(row) == fields and all(map(_is_id, row[2 : 4 if fields == 7 else 3])):
            yield row


def _is_id(text: str) -> bool:
    """Whether this is a number that the kernel takes for an id; Python knows more digits than it does."""
    return text.isascii() and text.isdigit() and len(text) < 11 and int(text) < 0xFFFFFFFF
