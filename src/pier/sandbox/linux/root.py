"""Builds a sandbox's root file system, from inside its own namespaces, and moves into it.

Runs as root of the sandbox's user namespace, in a copy of a zygote's root, where `POINTS` are empty: what all sandboxes
have alike is put together at `/b` beforehand, the root grows at `/m`, the sandbox's directory (`u` upper, `w` work)
comes to `/d` and layers to `/x/N`. Nothing here reaches the machine's own mounts: they are copies. Standard library
only, all of it imported before the root changes.

A layer that is some directories of this machine's root, at their places, and nothing else of it.

Overlay has no such thing: a layer is a directory with all that it holds. So an overlay is mounted of two layers, the
root and above it a directory that hides its namesake in the root and is filled with directories which say, in overlay's
own words, where in the root they are from. The layer is that one directory of the overlay.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import struct
from collections.abc import Callable
from typing import Any

from pier.sandbox.linux import kernel
from pier.sandbox.linux.kernel import MS_NODEV, MS_NOEXEC, MS_NOSUID, MS_RDONLY

HOST = "/host"
"""Where a zygote's own root has the machine's."""

POINTS = ("m", "d", "x", "e", "n", "b", "b/proc", "b/sys", "b/dev")
"""Directories of a zygote's root that its clones mount at; `/e` is empty and cannot be written to, `/n` has devices."""

NO_OVERLAY = "cannot mount overlay"
"""What the error says when layers cannot be put together, mostly because of the file system that is to be on top."""

APT_OF_ONE_ID = "/m/etc/apt/apt.conf.d/99pier-one-id"
"""Tells apt not to become a user that does not exist."""

_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_MASKED = (
    "proc/acpi", "proc/asound", "proc/kcore", "proc/keys", "proc/latency_stats", "proc/timer_list",
    "proc/sched_debug", "proc/scsi", "proc/sysrq-trigger", "sys/firmware", "sys/devices/virtual/powercap",
    "sys/kernel/debug", "sys/kernel/tracing", "sys/kernel/security",
)  # fmt: skip
_READ_ONLY = ("proc/bus", "proc/fs", "proc/irq", "proc/sys")
_SKELETON = (("proc", 0o555), ("sys", 0o555), ("dev", 0o755), ("etc", 0o755), ("tmp", 0o1777))
_ETC = ("resolv.conf", "hosts", "hostname")
_LINKS = (
    ("ptmx", "pts/ptmx"), ("fd", "/proc/self/fd"), ("core", "/proc/kcore"), ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"), ("stderr", "/proc/self/fd/2"),
)  # fmt: skip
_PLAIN = MS_NOSUID | MS_NODEV | MS_NOEXEC
_EMPTY = "/e"
_SHM = 64 << 20
_RESERVED_PIDS = 300
_PAGE = os.sysconf("SC_PAGE_SIZE")
_QUEUE = 16384
"""Bytes that a queue of System V messages holds at most (`kernel.msgmnb`)."""
_QUEUES = 32000
"""How many queues there may be by default; the kernel takes few more."""


def make_skeleton(directory: str, owner: int) -> None:
    """The layer that lies below all others: what a root must have, for images that lack it."""
    for name, mode in (("", 0o755), *_SKELETON):
        path = f"{directory}/{name}"
        if name:
            os.mkdir(path)
        os.chmod(path, mode)
        os.chown(path, owner, owner)
    for name in _ETC:
        path = f"{directory}/etc/{name}"
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
        os.chown(path, owner, owner)


def share_devices() -> None:
    """Mount the devices that sandboxes have at `/n`, once, in a zygote. The nodes are read-only, not the devices: root
    inside may have the id that owns the machine's own node."""
    for name in _DEVICES:
        os.close(os.open(f"/n/{name}", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
        kernel.bind(f"{HOST}/dev/{name}", f"/n/{name}", read_only=True, flags=MS_NOSUID | MS_NOEXEC)


def find_masks() -> list[tuple[str, str]]:
    """What is to be hidden of this machine's /proc and /sys, each with what hides it; asked once, in a zygote."""
    found: list[tuple[str, str]] = []
    for name in _MASKED:
        with contextlib.suppress(OSError):
            kind = os.stat(f"{HOST}/{name}").st_mode
            found.append((name, _EMPTY if stat.S_ISDIR(kind) else "/n/null"))
    return found


def prepare(masks: list[tuple[str, str]], *, many_ids: bool) -> dict[str, tuple[int, int]]:
    """Put together, at `/b`, what all sandboxes have alike. Gives the files of /etc that are pier's own: for each a
    descriptor to write it by and one to attach it by. They lie in the memory of /dev."""
    kernel.mount("sysfs", "/b/sys", "sysfs", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC)
    _mount_dev(many_ids)
    _seal(masks)
    raise_loopback()
    return {name: _make_text(f"/b/dev/.{name}") for name in _ETC}


def build(plan: dict[str, Any], texts: dict[str, tuple[int, int]], trees: list[int], *, many_ids: bool) -> None:
    """Mount everything that `plan` asks for and make it this process's root. `trees` are detached mounts that it counts
    on: the sandbox's directory first, then layers, then what it wants mounted. They and `texts` are closed."""
    kernel.attach(trees[0], "/d")
    os.chdir("/d")
    for number in range(plan["layers"]):
        kernel.attach(trees[1 + number], f"/x/{number}")
    lowers = ":".join(reversed(plan["lowers"]))
    synced = ",volatile" if plan["volatile"] else ""
    kernel.mount("overlay", "/m", "overlay", 0, f"lowerdir={lowers},upperdir=u,workdir=w,userxattr{synced}")
    for bound in plan["binds"]:
        _put(trees[bound["tree"]], "/m/" + bound["to"].strip("/"))
    for name in ("proc", "sys", "dev"):
        _make_real("/m/" + name)
        kernel.mount("/b/" + name, "/m/" + name, "", kernel.MS_MOVE)
    if plan["shm_size"] != _SHM:
        kernel.mount("", "/m/dev/shm", "", kernel.MS_REMOUNT | _PLAIN, f"size={plan['shm_size']}")
    _make_real("/m/etc")
    for name, text in plan["etc"].items():
        _put_text(text, texts[name], f"/m/etc/{name}")
        os.unlink(f"/m/dev/.{name}")
    if not many_ids and os.path.isdir("/m/etc/apt/apt.conf.d"):
        _put_text('APT::Sandbox::User "root";\n', _make_text("/m/dev/.apt"), APT_OF_ONE_ID)
        os.unlink("/m/dev/.apt")
    for wanted in plan["mounts"]:
        _mount_wanted(wanted, trees)
    if plan["same_ids"]:
        guard_init("/m/proc")
    os.chdir("/m")
    kernel.pivot_root(".", ".")
    kernel.set_host_name(plan["hostname"])
    for fd in trees:
        os.close(fd)


def leave() -> None:
    """Let go of the root from before, which is the working directory after `build`: the kernel takes its time, and
    needs none of pier's. Until then nothing may run inside."""
    kernel.unmount(".")
    os.chdir("/")


def mount_proc() -> None:
    """The first of what goes to `/b`."""
    kernel.mount("proc", "/b/proc", "proc", _PLAIN)
    with contextlib.suppress(OSError):
        fd = os.open("/b/proc/sys/user/max_user_namespaces", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, b"0")
        finally:
            os.close(fd)


def open_setting(name: str) -> int:
    """A file of /proc/sys/kernel that limits something here, to be opened before /proc/sys is sealed; -1 where that is
    the whole machine's."""
    try:
        return os.open(f"/b/proc/sys/kernel/{name}", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def ipc_limits(memory: int) -> dict[str, str]:
    """Settings that keep System V memory and messages to a part of `memory` bytes: they belong to no process, so the
    kernel would kill everything in vain to get them back."""
    return {"kernel.shmall": f"{memory // 8 // _PAGE}", "kernel.msgmni": f"{min(memory // 16 // _QUEUE, _QUEUES)}"}


def limit_ipc(pages: int, queues: int, memory: int) -> None:
    """Write these settings to their files, if `memory` is not 0."""
    for fd, most in zip((pages, queues), ipc_limits(memory).values(), strict=True):
        if fd < 0:
            continue
        if memory:
            with contextlib.suppress(OSError):
                os.write(fd, most.encode())
        os.close(fd)


def limit_processes(pid_max: int, most: int) -> None:
    """Let there be `most` processes, if that is not 0. The kernel gives the first few numbers only once."""
    if pid_max < 0:
        return
    if most:
        os.write(pid_max, b"%d" % (most + _RESERVED_PIDS + 1))
    os.close(pid_max)


def _mount_dev(many_ids: bool) -> None:
    kernel.mount("tmpfs", "/b/dev", "tmpfs", MS_NOSUID, "mode=755,size=64k")
    for name in _DEVICES:
        os.close(os.open(f"/b/dev/{name}", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
        kernel.bind(f"/n/{name}", f"/b/dev/{name}")
    os.mkdir("/b/dev/pts", 0o755)
    tty = ",gid=5" if many_ids else ""
    kernel.mount("devpts", "/b/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, f"newinstance,ptmxmode=0666,mode=0620{tty}")
    os.mkdir("/b/dev/shm", 0o1777)
    kernel.mount("tmpfs", "/b/dev/shm", "tmpfs", _PLAIN, f"mode=1777,size={_SHM}")
    os.mkdir("/b/dev/mqueue", 0o1777)
    for name, target in _LINKS:
        os.symlink(target, f"/b/dev/{name}")


def _seal(masks: list[tuple[str, str]]) -> None:
    """Hide and freeze the parts of /proc and /sys that tell of, or change, the machine."""
    for name, mask in masks:
        kernel.bind(mask, f"/b/{name}")
    for name in _READ_ONLY:
        path = f"/b/{name}"
        if os.path.isdir(path):
            kernel.bind(path, path, read_only=True, flags=_PLAIN)


def _mount_wanted(wanted: dict[str, Any], trees: list[int]) -> None:
    target = _inside(wanted["target"])
    if "tree" not in wanted:
        _make_directory(target, 0o755)
        size = f",size={wanted['size']}" if wanted.get("size") else ""
        flags = MS_NOSUID | MS_NODEV | (MS_RDONLY if wanted["read_only"] else 0)
        kernel.mount("tmpfs", target, "tmpfs", flags, f"mode=1777{size}")
        return
    _put(trees[wanted["tree"]], target)


def guard_init(proc: str) -> None:
    """Keep root inside from making init the first to go when memory is short: unless its ids are others than those of
    whoever runs pier, init's files in /proc are its own."""
    for place in (f"{proc}/1", *(f"{proc}/1/task/{thread}" for thread in os.listdir(f"{proc}/1/task"))):
        for name in ("oom_adj", "oom_score_adj"):
            kernel.bind(f"{place}/{name}", f"{place}/{name}", read_only=True, flags=_PLAIN)


def _inside(path: str) -> str:
    """`path` below `/m` with every symlink on the way resolved there, so that no image can send a mount astray."""
    done: list[str] = []
    todo = [part for part in reversed(path.split("/")) if part not in ("", ".")]
    for _ in range(4096):
        if not todo:
            return "/".join(["/m", *done])
        part = todo.pop()
        if part == "..":
            done = done[:-1]
            continue
        here = "/".join(["/m", *done, part])
        try:
            link = os.readlink(here)
        except OSError:
            done.append(part)
            continue
        if link.startswith("/"):
            done = []
        todo.extend(step for step in reversed(link.split("/")) if step not in ("", "."))
    raise OSError(errno.ELOOP, f"too many links in {path}")


def _make_text(unborn: str) -> tuple[int, int]:
    fd = os.open(unborn, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644)
    return fd, kernel.open_tree(unborn)


def _put_text(text: str, file: tuple[int, int], target: str) -> None:
    """Put a file of pier's own at `target`. It is no change of the sandbox's, since it lies elsewhere."""
    fd, tree = file
    os.write(fd, text.encode())
    if os.path.islink(target):
        os.unlink(target)
    _put(tree, target)
    os.close(fd)
    os.close(tree)


def _put(tree: int, target: str) -> None:
    """Attach a detached mount at `target`, which is made if it is missing."""
    if stat.S_ISDIR(os.fstat(tree).st_mode):
        _make_directory(target, 0o755)
    elif not os.path.exists(target):
        _make_directory(os.path.dirname(target), 0o755)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
    kernel.attach(tree, target)


def _make_real(path: str) -> None:
    """See to it that a path is a directory, and no link that leads out of the root that is being made."""
    if os.path.islink(path) or not os.path.isdir(path):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        os.mkdir(path, 0o755)


def _make_directory(path: str, mode: int) -> None:
    if os.path.isdir(path):
        return
    _make_directory(os.path.dirname(path), 0o755)
    os.mkdir(path, mode)
    os.chmod(path, mode)


def raise_loopback() -> None:
    """Bring `lo` up in this network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        request = struct.pack("16sH14x", b"lo", 0x1 | 0x40)
        fcntl.ioctl(sock, 0x8914, request)


_NAME = "view"


def make_view(mount_point: Callable[[], str], trees: list[str], shift: int | None, owner: int) -> str:
    """Where the layer is that shows `trees`; with the ids of the user namespace `shift`, if given, in which `owner` is
    root. OSError where the kernel cannot make it: on a root that is an overlay itself, or with trees on other disks."""
    if len({os.stat(HOST + path).st_dev for path in ("/", *trees)}) > 1:
        raise OSError(errno.EXDEV, "the directories are on several file systems")
    root, names, merged, target = (mount_point() for _ in range(4))
    fd = kernel.open_tree(HOST + "/")
    try:
        if shift is not None:
            kernel.set_mount(fd, user_namespace=shift)
        kernel.attach(fd, root)
    finally:
        os.close(fd)
    _make_names(f"{names}/{_NAME}", trees, owner)
    kernel.mount("overlay", merged, "overlay", kernel.MS_RDONLY, f"lowerdir={names}:{root},redirect_dir=follow")
    _check_depth(f"{merged}/{_NAME}", target)
    fd = kernel.open_tree(f"{merged}/{_NAME}")
    try:
        kernel.attach(fd, target)
    finally:
        os.close(fd)
    return target


def _make_names(directory: str, trees: list[str], owner: int) -> None:
    """They lie in a zygote's own memory: layers may not lie in each other."""
    for tree in ("", *trees):
        path = directory + tree
        os.makedirs(path, 0o755)
        if tree:
            os.setxattr(path, "trusted.overlay.redirect", os.fsencode(tree))
    for path, _, _ in os.walk(directory):
        os.chmod(path, 0o755)
        os.chown(path, owner, owner)
        if path.removeprefix(directory) not in trees:
            os.setxattr(path, "trusted.overlay.opaque", b"y")


def _check_depth(layer: str, place: str) -> None:
    """The kernel lets overlays lie on overlays, but not without end."""
    kernel.mount("overlay", place, "overlay", kernel.MS_RDONLY, f"lowerdir=/e:{layer}")
    kernel.unmount(place)
