"""The kernel's interfaces that Python lacks: system calls, and processes as /proc shows them.

System calls are plain functions that raise `OSError`. From /proc come the processes of a pid namespace, their security
labels and their order for the OOM killer. A Linux security module (AppArmor, SELinux) labels what an engine starts.
pier enters a container from outside, so it puts the label of the container's first process on each command. Where no
module has labelled the container there is nothing to do. A label that cannot be put on a command is an error, and the
command is not run.

Standard library only, and nothing is imported later: this runs in processes whose root has changed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
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
    return value.encode(errors="surrogateescape")


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


_PAGE = resource.getpagesize()
_SHOWN = 200
"""Bytes of a command line that are shown."""
_EXITING = 4
"""Among the kernel's flags of a process: that it has begun to end."""


class ProcessTable:
    """The processes that a /proc shows, but for `first`, process 1 of its namespace. `proc` is an open directory, so
    that it survives a change of root; with `namespace` only processes of that pid namespace (an inode) count, and those
    of other `namespaces` that are added later."""

    def __init__(self, proc: int, *, first: int, namespace: int | None = None) -> None:
        self.proc = proc
        self.first = first
        self.namespaces = None if namespace is None else {namespace}

    def all(self) -> dict[int, int]:
        """All processes with their parents."""
        found: dict[int, int] = {}
        for name in os.listdir(self.proc):
            if not name.isdigit() or int(name) == self.first or not self._is_here(name):
                continue
            fields = self._fields(int(name))
            if fields:
                found[int(name)] = int(fields[1])
        return found

    def is_ending(self, pid: int) -> bool:
        """Whether a process ends, or has ended. The first of a namespace kills all others before it is gone."""
        fields = self._fields(pid)
        return not fields or bool(int(fields[6]) & _EXITING)

    def is_running(self, pid: int) -> bool:
        """Whether a process is more than the entry of one that has ended. Others of its threads may run."""
        fields = self._fields(pid)
        return bool(fields) and (fields[0] not in (b"Z", b"X") or int(fields[17]) > 1)

    def stopped(self) -> list[int]:
        """The processes that somebody has stopped."""
        return [pid for pid in self.all() if self._fields(pid)[:1] == [b"T"]]

    def children(self, pid: int) -> list[int]:
        """The children of a process's first thread, of which the kernel leaves none out unless one is reaped meanwhile;
        none if the process is gone, or if this kernel does not tell."""
        return [int(child) for child in self._read(f"{pid}/task/{pid}/children").split()]

    def is_barren(self, pid: int) -> bool:
        """Whether nothing runs below a process that inherits orphans, however fast they fork and exit: its first thread
        has no children, or twice the same ones, all of which had ended in between and were not reaped since."""
        before = self.children(pid)
        ended = all(self._is_entry(child) for child in before)
        return ended and (not before or (self.children(pid) == before and all(map(self._is_entry, before))))

    def mounts(self, pid: int) -> int:
        """The inode of a process's mount namespace; 0 if it has ended, or may not be looked at."""
        try:
            return os.stat(f"{pid}/ns/mnt", dir_fd=self.proc).st_ino
        except OSError:
            return 0

    def describe(self, pid: int) -> list[object] | None:
        """The number of a process in its own namespace, its user and the beginning of its command line."""
        rows = dict(row.split(b":", 1) for row in self._read(f"{pid}/status").splitlines() if b":" in row)
        if b"Uid" not in rows:
            return None
        command = self._read(f"{pid}/cmdline", _SHOWN).replace(b"\0", b" ").strip() or rows.get(b"Name", b"").strip()
        own = rows.get(b"NSpid", b"%d" % pid).split()[-1]
        return [int(own), int(rows[b"Uid"].split()[0]), command.decode(errors="replace")]

    def private_memory(self, pid: int) -> int:
        """Bytes that a process has to itself."""
        fields = self._read(f"{pid}/statm").split()
        return (int(fields[1]) - int(fields[2])) * _PAGE if fields else 0

    def _is_here(self, name: str) -> bool:
        if self.namespaces is None:
            return True
        try:
            return os.stat(f"{name}/ns/pid", dir_fd=self.proc).st_ino in self.namespaces
        except OSError:
            return False

    def _fields(self, pid: int) -> list[bytes]:
        return self._read(f"{pid}/stat").rpartition(b")")[2].split()

    def _is_entry(self, pid: int) -> bool:
        """Whether a process has ended and was not reaped yet."""
        return bool(self._fields(pid)) and not self.is_running(pid)

    def _read(self, path: str, most: int | None = None) -> bytes:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.proc)
        except OSError:
            return b""
        parts: list[bytes] = []
        try:
            while part := os.read(fd, most or 8192):
                parts.append(part)
                if most:
                    break
        except OSError:
            return b""
        finally:
            os.close(fd)
        return b"".join(parts)


_APPARMOR, _SELINUX = "apparmor", "selinux"
_NONE = ("", "unconfined", "kernel")
_INACTIVE = (errno.EINVAL, errno.EOPNOTSUPP)
"""What the kernel says of the label of a module that it does not have, or that is switched off."""


class Label:
    """A label of one module."""

    def __init__(self, module: str, text: str) -> None:
        self.module = module
        self.text = text

    def give(self, proc: int) -> None:
        """Have the next program that this thread executes run with it; an OSError if the kernel refuses. `proc` is an
        open /proc that knows this process, and not the container's, which is the container's to change."""
        words = f"exec {self.text}" if self.module == _APPARMOR else self.text
        fd = _open_label(proc, "thread-self", self.module, "exec", os.O_WRONLY)
        if fd is None:
            raise OSError(errno.ENOENT, "the kernel has no file to set a label by")
        try:
            os.write(fd, words.encode(errors="surrogateescape"))
        finally:
            os.close(fd)


def find_labels(proc: int, pid: int) -> list[Label]:
    """The labels of a process. `proc` is an open /proc."""
    found = [Label(module, _read_label(proc, str(pid), module)) for module in (_APPARMOR, _SELINUX)]
    return [label for label in found if label.text not in _NONE]


def _read_label(proc: int, pid: str, module: str) -> str:
    fd = _open_label(proc, pid, module, "current", os.O_RDONLY)
    if fd is None:
        return ""
    try:
        text = os.read(fd, 4096).decode(errors="surrogateescape").rstrip("\0\n")
    except OSError as error:
        if error.errno in _INACTIVE:
            return ""
        raise
    finally:
        os.close(fd)
    is_context = " " not in text and text.count(":") >= 3
    if is_context != (module == _SELINUX):
        return ""
    return text.rpartition(" (")[0] if text.endswith(")") else text


def _open_label(proc: int, pid: str, module: str, name: str, flags: int) -> int | None:
    """A module's file: in its own directory, or where kernels have it that know one module at a time."""
    for path in (f"{pid}/attr/{module}/{name}", f"{pid}/attr/{name}"):
        try:
            return os.open(path, flags | os.O_CLOEXEC, dir_fd=proc)
        except FileNotFoundError:
            continue
    return None


OOM_SCORE = 1000
OOM_SCORE_SERVING = 500
"""The score of what serves a sandbox: before all else on the machine, and behind every command in the sandbox. Were it
the same, many small processes could have it killed in their place, and their trial would end without a verdict."""


def set_oom_score(proc: int, pid: str | int = "self", score: int = OOM_SCORE) -> None:
    """Put a process, and all that it will start, in line. `proc` is an open /proc."""
    fd = os.open(f"{pid}/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc)
    try:
        os.write(fd, b"%d" % score)
    finally:
        os.close(fd)


def oom_score(proc: int, pid: int) -> int:
    """What is written down for a process."""
    return int(_read_file(proc, f"{pid}/oom_score_adj"))


def _read_file(proc: int, path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
    try:
        return os.read(fd, 1 << 16)
    finally:
        os.close(fd)
