"""User and group id maps for this user's sandboxes, and entering a user namespace with them.

    root     ids 0..65535 inside are 100000..165535 outside: root inside has no rights on this machine
    subids   0 inside is this user, 1..65535 are the subordinate ids that /etc/subuid and /etc/subgid grant
    single   0 inside is this user, and no other id exists: ownership is simulated

Standard library only: the zygote and other processes without site-packages load this file too.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import shutil
import sys
from dataclasses import dataclass
from typing import Literal

IdMode = Literal["root", "subids", "single"]

CLONE_NEWUSER = 0x10000000
COUNT = 65536
SHIFT = 100_000


@dataclass(frozen=True, slots=True)
class IdRange:
    """Maps `count` ids starting at `inside` to ids starting at `outside` in the parent namespace."""

    inside: int
    outside: int
    count: int


@dataclass(frozen=True, slots=True)
class IdMap:
    """The ids that this user's sandboxes have. `hint` is the command that grants more, if any."""

    mode: IdMode
    uids: tuple[IdRange, ...]
    gids: tuple[IdRange, ...]
    hint: str = ""

    @classmethod
    def detect(cls) -> IdMap:
        """Return the largest id map that this user is allowed to use."""
        uid, gid = os.geteuid(), os.getegid()
        shifted = (IdRange(0, SHIFT, COUNT),)
        if uid == 0 and _exist(shifted, "uid") and _exist(shifted, "gid"):
            return cls("root", shifted, shifted)
        uids, gids = _granted("/etc/subuid", uid), _granted("/etc/subgid", uid)
        tools = shutil.which("newuidmap") and shutil.which("newgidmap")
        if uids and gids and tools and _exist(uids, "uid") and _exist(gids, "gid"):
            return cls("subids", (IdRange(0, uid, 1), *uids), (IdRange(0, gid, 1), *gids))
        name = _user_name(uid)
        hint = f"sudo usermod --add-subuids 100000-165535 --add-subgids 100000-165535 {name}"
        if not tools:
            hint = "sudo apt-get install uidmap"
        return cls("single", (IdRange(0, uid, 1),), (IdRange(0, gid, 1),), hint)

    def outside(self, uid: int) -> int:
        """Return the uid on this machine that `uid` inside maps to; -1 if it is unmapped."""
        for part in self.uids:
            if part.inside <= uid < part.inside + part.count:
                return part.outside + uid - part.inside
        return -1

    def write(self, pid: int, proc: str = "/proc") -> None:
        """Write the id maps of `pid`, which just entered a new user namespace. The caller is outside of it."""
        if self.mode == "subids":
            _run_tool("newuidmap", pid, self.uids)
            _run_tool("newgidmap", pid, self.gids)
            return
        if self.mode == "single":
            _put(f"{proc}/{pid}/setgroups", "deny")
        _put(f"{proc}/{pid}/uid_map", _rows(self.uids))
        _put(f"{proc}/{pid}/gid_map", _rows(self.gids))


def enter(ids: IdMap) -> None:
    """Move this single-threaded process into a new user namespace with `ids`, as its root.

    A helper process stays outside to write the maps, since some can only be written from there.
    """
    pid = os.getpid()
    ready_in, ready_out = os.pipe()
    done_in, done_out = os.pipe()
    helper = os.fork()
    if helper == 0:
        code = 1
        try:
            os.close(ready_out)
            if os.read(ready_in, 1):
                ids.write(pid)
                os.write(done_out, b"1")
                code = 0
        except OSError as error:
            sys.stderr.write(f"cannot map ids: {error}\n")
            sys.stderr.flush()
        finally:
            os._exit(code)
    os.close(ready_in)
    os.close(done_out)
    try:
        unshare(CLONE_NEWUSER)
        os.write(ready_out, b"1")
        mapped = os.read(done_in, 1)
    finally:
        os.close(ready_out)
        os.close(done_in)
        os.waitpid(helper, 0)
    if not mapped:
        raise OSError(f"cannot map user and group ids ({ids.mode})")
    become_root(ids)


def become_root(ids: IdMap) -> None:
    """Become user and group 0 of this process's user namespace."""
    if ids.mode != "single":
        os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


def mapped_argv(argv: list[str]) -> list[str]:
    """Return the argv of a process that enters a user namespace with this user's ids and then executes `argv`.

    Its pid, streams and environment do not change.
    """
    return [sys.executable, "-I", "-S", __file__, *argv]


def unshare(flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot create a namespace: {os.strerror(number)}")


def _exist(ranges: tuple[IdRange, ...], kind: str) -> bool:
    """Whether ids exist in this process's user namespace, which may itself have few."""
    try:
        with open(f"/proc/self/{kind}_map", encoding="utf-8") as stream:
            rows = [tuple(map(int, row.split())) for row in stream]
    except OSError:
        return True
    return all(any(a <= part.outside and part.outside + part.count <= a + n for a, _, n in rows) for part in ranges)


def _granted(path: str, uid: int) -> tuple[IdRange, ...]:
    """Return ids 1..65535 from the ranges that a file grants to this user; empty if they are too few."""
    names = {str(uid), _user_name(uid)}
    try:
        with open(path, encoding="utf-8") as stream:
            rows = [row.strip().split(":") for row in stream]
    except OSError:
        return ()
    ranges: list[IdRange] = []
    inside = 1
    for row in rows:
        if len(row) != 3 or row[0] not in names or not (row[1].isdigit() and row[2].isdigit()):
            continue
        count = min(int(row[2]), COUNT - inside)
        if count > 0:
            ranges.append(IdRange(inside, int(row[1]), count))
            inside += count
    return tuple(ranges) if inside >= COUNT else ()


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _rows(ranges: tuple[IdRange, ...]) -> str:
    return "".join(f"{part.inside} {part.outside} {part.count}\n" for part in ranges)


def _put(path: str, text: str) -> None:
    with open(path, "wb", buffering=0) as stream:
        stream.write(text.encode())


def _run_tool(name: str, pid: int, ranges: tuple[IdRange, ...]) -> None:
    path = shutil.which(name) or name
    arguments = [str(number) for part in ranges for number in (part.inside, part.outside, part.count)]
    child = os.posix_spawn(path, [name, str(pid), *arguments], dict(os.environ))
    _, status = os.waitpid(child, 0)
    if status != 0:
        raise OSError(f"{name} refused the ids that /etc/subuid and /etc/subgid grant")


def _main() -> None:
    enter(IdMap.detect())
    os.execv(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    _main()
