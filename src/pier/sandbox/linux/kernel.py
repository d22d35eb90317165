"""The system calls that Python has no name for, as plain functions that raise `OSError`.

Standard library only, and nothing is imported later: this runs in the zygote and in processes whose root has changed.
"""

from __future__ import annotations

import ctypes
import os
import struct

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS = 0x00020000, 0x02000000, 0x04000000
CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x08000000, 0x10000000, 0x20000000, 0x40000000
CLONE_PIDFD, CLONE_FS = 0x00001000, 0x00000200

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_MOVE, MS_REC, MS_PRIVATE, MS_STRICTATIME = 4096, 8192, 16384, 1 << 18, 1 << 24
MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8

PR_SET_NAME, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 15, 4, 36, 38
PR_CAPBSET_READ, PR_CAPBSET_DROP, PR_CAP_AMBIENT, PR_SET_PDEATHSIG, PR_SET_KEEPCAPS = 23, 24, 47, 1, 8
_AMBIENT_RAISE = 2

_CLONE3, _OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 435, 428, 429, 442
_CREATE_RULESET, _RESTRICT_SELF, _SCOPED = 444, 446, 6
"""Landlock's calls, and the first version of its interface that has scopes."""
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}.get(os.uname().machine, 155)
_CAPSET = {"x86_64": 126, "aarch64": 91}.get(os.uname().machine, 126)

_AT_FDCWD, _AT_EMPTY_PATH, _AT_RECURSIVE = -100, 0x1000, 0x8000
_OPEN_TREE_CLONE = 1
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_IDMAP = 0x1, 0x00100000
_MOVE_MOUNT_F_EMPTY_PATH = 0x4

KEPT_CAPABILITIES = (0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31)
"""What Docker leaves to a container: chown, dac_override, fowner, fsetid, kill, setgid, setuid, setpcap,
net_bind_service, net_raw, sys_chroot, mknod, audit_write, setfcap."""

_libc = ctypes.PyDLL(None, use_errno=True)
"""PyDLL keeps the interpreter lock during a call, so that a child made by `clone` holds it too."""


def _check(value: int, what: str) -> int:
    if value < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return value


def _text(value: str) -> bytes:
    return os.fsencode(value)


def syscall(what: str, number: int, *arguments: int | bytes | None) -> int:
    """A system call by number. Integers are passed as longs."""
    values = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    _libc.syscall.restype = ctypes.c_long
    return _check(_libc.syscall(ctypes.c_long(number), *values), what)


def clone(flags: int) -> tuple[int, int]:
    """Like fork, into new namespaces: (pid, pidfd) in the parent, (0, -1) in the child. One thread only."""
    pidfd = ctypes.c_int(-1)
    arguments = struct.pack("8Q", flags | CLONE_PIDFD, ctypes.addressof(pidfd), 0, 0, 17, 0, 0, 0)
    pid = syscall("cannot make namespaces", _CLONE3, arguments, len(arguments))
    return pid, -1 if pid == 0 else pidfd.value


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), "cannot make a namespace")


def enter(namespace: int) -> None:
    """Join a namespace given as an open file."""
    _check(_libc.setns(namespace, 0), "cannot join a namespace")


def mount(source: str, target: str, kind: str, flags: int = 0, options: str = "") -> None:
    arguments = (_text(source), _text(target), _text(kind), ctypes.c_ulong(flags), _text(options) or None)
    _check(_libc.mount(*arguments), f"cannot mount {kind or source} at {target}")


def bind(source: str, target: str, *, recursive: bool = False, read_only: bool = False, flags: int = 0) -> None:
    mount(source, target, "", MS_BIND | (MS_REC if recursive else 0))
    if read_only or flags:
        mount("", target, "", MS_BIND | MS_REMOUNT | (MS_RDONLY if read_only else 0) | flags)


def unmount(target: str, *, follow: bool = True) -> None:
    flags = MNT_DETACH | (0 if follow else _UMOUNT_NOFOLLOW)
    _check(_libc.umount2(_text(target), flags), f"cannot unmount {target}")


def pivot_root(new: str, old: str) -> None:
    syscall("cannot change the root", _PIVOT_ROOT, _text(new), _text(old))


def open_tree(path: str, *, recursive: bool = False) -> int:
    """A detached copy of the mount at `path`, as a file descriptor."""
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | (_AT_RECURSIVE if recursive else 0)
    return syscall(f"cannot open {path} as a mount", _OPEN_TREE, _AT_FDCWD, _text(path), flags)


def set_mount(fd: int, *, user_namespace: int | None = None, read_only: bool = False, recursive: bool = False) -> None:
    """Change a detached mount: shift its ids by those of a user namespace, make it read-only."""
    attributes = (_MOUNT_ATTR_RDONLY if read_only else 0) | (_MOUNT_ATTR_IDMAP if user_namespace is not None else 0)
    value = struct.pack("4Q", attributes, 0, 0, user_namespace or 0)
    flags = _AT_EMPTY_PATH | (_AT_RECURSIVE if recursive else 0)
    syscall("cannot change a mount", _MOUNT_SETATTR, fd, b"", flags, value, len(value))


def attach(fd: int, target: str) -> None:
    """Put a detached mount at `target`."""
    flags = _MOVE_MOUNT_F_EMPTY_PATH
    syscall(f"cannot mount at {target}", _MOVE_MOUNT, fd, b"", _AT_FDCWD, _text(target), flags)


def prctl(option: int, *values: int | bytes) -> int:
    padded = [value if isinstance(value, bytes) else ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]]
    return _check(_libc.prctl(option, *padded), f"prctl {option}")


def set_command_line(text: str) -> None:
    """Show `text` as the command line of this process and of those it forks, in place of the interpreter's path."""
    with open("/proc/self/stat", "rb") as stream:
        fields = stream.read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    ctypes.memmove(start, text.encode()[: end - start - 1].ljust(end - start, b"\0"), end - start)


def enter_domain() -> bool:
    """Put this thread, and all that it will start, into a Landlock domain: from within it nothing outside can be
    traced or signalled, and no abstract socket of processes outside be reached, whatever their users and capabilities.
    It limits nothing else. False where the kernel (before 6.12) cannot do that."""
    try:
        if syscall("landlock", _CREATE_RULESET, None, 0, 1) < _SCOPED:
            return False
    except OSError:
        return False
    rules = struct.pack("3Q", 0, 0, 3)
    fd = syscall("cannot make a domain", _CREATE_RULESET, rules, len(rules), 0)
    try:
        syscall("cannot enter a domain", _RESTRICT_SELF, fd, 0)
    finally:
        os.close(fd)
    return True


def set_name(name: str) -> None:
    prctl(PR_SET_NAME, name.encode())


def set_host_name(name: str) -> None:
    data = name.encode()[:64]
    _check(_libc.sethostname(data, len(data)), "cannot set the host name")


def drop_capabilities(kept: tuple[int, ...] = KEPT_CAPABILITIES) -> None:
    """Leave only `kept` to this process and to everything that it will run."""
    for number in range(64):
        if number not in kept and _libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0) != 0:
            break
    _set_capabilities(sum(1 << number for number in kept))


def become(groups: list[int], gid: int, uid: int, capability: int = -1) -> None:
    """Become a user. Of all capabilities only `capability` is kept, also by what another user than root will run."""
    if uid and capability >= 0:
        prctl(PR_SET_KEEPCAPS, 1)
    os.setgroups(groups)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    if uid and capability >= 0:
        _set_capabilities(1 << capability, inheritable=1 << capability)
        prctl(PR_CAP_AMBIENT, _AMBIENT_RAISE, capability)


def _set_capabilities(mask: int, *, inheritable: int = 0) -> None:
    low, high = mask & 0xFFFFFFFF, mask >> 32
    header = struct.pack("Ii", 0x20080522, 0)
    sets = struct.pack("6I", low, low, inheritable & 0xFFFFFFFF, high, high, inheritable >> 32)
    syscall("cannot drop capabilities", _CAPSET, header, sets)
