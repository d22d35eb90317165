"""Builds a sandbox's root file system, from inside its own namespaces, and moves into it.

Runs as root of the sandbox's user namespace, with the working directory at the sandbox's directory (`u` upper, `w`
work) and a zygote's root, where `/m` is empty. Nothing here reaches the machine's own mounts: they are copies.
Standard library only, all of it imported before the root changes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import struct
from typing import Any

from pier.sandbox.local import kernel
from pier.sandbox.local.kernel import MS_NODEV, MS_NOEXEC, MS_NOSUID, MS_RDONLY

HOST = "/host"
"""Where a zygote's own root has the machine's."""

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


def build(plan: dict[str, Any]) -> None:
    """Mount everything that `plan` asks for and make it this process's root."""
    kernel.mount("", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    _mount_overlay(plan)
    for bound in plan["binds"]:
        _put(bound["from"], "/m/" + bound["to"].strip("/"), recursive=True, read_only=bound.get("read_only", True))
    for name in ("proc", "sys", "dev", "etc"):
        _make_real("/m/" + name)
    _mount_proc()
    _mount_sys(plan)
    _mount_dev(plan)
    for name, text in plan["etc"].items():
        _put_text(text, f"/m/etc/{name}")
    if not plan["many_ids"] and os.path.isdir("/m/etc/apt/apt.conf.d"):
        _put_text('APT::Sandbox::User "root";\n', APT_OF_ONE_ID)
    for wanted in plan["mounts"]:
        _mount_wanted(wanted)
    os.chdir("/m")
    kernel.pivot_root(".", ".")
    kernel.unmount(".")
    os.chdir("/")
    kernel.set_host_name(plan["hostname"])
    raise_loopback()


def _mount_overlay(plan: dict[str, Any]) -> None:
    lowers = ":".join(reversed(plan["lowers"]))
    kernel.mount("overlay", "/m", "overlay", 0, f"lowerdir={lowers},upperdir=u,workdir=w,userxattr,volatile")


def _mount_proc() -> None:
    kernel.mount("proc", "/m/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    try:
        with open("/m/proc/sys/user/max_user_namespaces", "w") as stream:
            stream.write("0")
    except OSError:
        pass


def _mount_sys(plan: dict[str, Any]) -> None:
    flags = MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC
    if plan["own_network"]:
        kernel.mount("sysfs", "/m/sys", "sysfs", flags)
    else:
        kernel.mount(f"{HOST}/sys", "/m/sys", "", kernel.MS_BIND | kernel.MS_REC)
        kernel.mount("", "/m/sys", "", kernel.MS_BIND | kernel.MS_REMOUNT | flags)


def _mount_dev(plan: dict[str, Any]) -> None:
    kernel.mount("tmpfs", "/m/dev", "tmpfs", MS_NOSUID, "mode=755,size=64k")
    for name in _DEVICES:
        _put(f"{HOST}/dev/{name}", f"/m/dev/{name}")
    os.mkdir("/m/dev/pts", 0o755)
    tty = ",gid=5" if plan["many_ids"] else ""
    kernel.mount("devpts", "/m/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, f"newinstance,ptmxmode=0666,mode=0620{tty}")
    os.mkdir("/m/dev/shm", 0o1777)
    size = plan["shm_size"]
    kernel.mount("tmpfs", "/m/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, f"mode=1777,size={size}")
    os.mkdir("/m/dev/mqueue", 0o1777)
    links = {"ptmx": "pts/ptmx", "fd": "/proc/self/fd", "core": "/proc/kcore"}
    links |= {name: f"/proc/self/fd/{number}" for number, name in enumerate(("stdin", "stdout", "stderr"))}
    for name, target in links.items():
        os.symlink(target, f"/m/dev/{name}")


def seal() -> None:
    """Hide and freeze the parts of /proc and /sys that tell of, or change, the machine. Paths are relative to /."""
    for name in _MASKED:
        try:
            is_directory = stat.S_ISDIR(os.stat("/" + name).st_mode)
        except OSError:
            continue
        if is_directory:
            kernel.mount("tmpfs", "/" + name, "tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, "size=0")
        else:
            kernel.bind("/dev/null", "/" + name)
    for name in _READ_ONLY:
        if os.path.isdir("/" + name):
            kernel.bind("/" + name, "/" + name, read_only=True, flags=MS_NOSUID | MS_NODEV | MS_NOEXEC)


def _mount_wanted(wanted: dict[str, Any]) -> None:
    target = _inside(wanted["target"])
    if wanted.get("from") is None:
        _make_directory(target, 0o755)
        size = f",size={wanted['size']}" if wanted.get("size") else ""
        flags = MS_NOSUID | MS_NODEV | (MS_RDONLY if wanted["read_only"] else 0)
        kernel.mount("tmpfs", target, "tmpfs", flags, f"mode=1777{size}")
        return
    _put(wanted["from"], target, recursive=True, read_only=wanted["read_only"])


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


def _put_text(text: str, target: str) -> None:
    """Put a file of pier's own at `target`: it lies in the memory of /dev, without a name there, and is no change."""
    unborn = "/m/dev/.pier"
    with open(unborn, "w") as stream:
        stream.write(text)
    if os.path.islink(target):
        os.unlink(target)
    _put(unborn, target)
    os.unlink(unborn)


def _put(source: str, target: str, *, recursive: bool = False, read_only: bool = False) -> None:
    """Bind `source` at `target`, which is made if it is missing."""
    if os.path.isdir(source):
        _make_directory(target, 0o755)
    elif not os.path.exists(target):
        _make_directory(os.path.dirname(target), 0o755)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
    kernel.mount(source, target, "", kernel.MS_BIND | (kernel.MS_REC if recursive else 0))
    if read_only:
        _remount_read_only(target)


def _remount_read_only(target: str) -> None:
    """Flags that the machine's own mount has are locked here, so they must be asked for again."""
    at = os.statvfs(target).f_flag
    kept = at & (MS_NOSUID | MS_NODEV | MS_NOEXEC)
    times = (1024 if at & os.ST_NOATIME else 0) | (2048 if at & os.ST_NODIRATIME else 0)
    times |= 1 << 21 if at & os.ST_RELATIME else 0
    kernel.mount("", target, "", kernel.MS_BIND | kernel.MS_REMOUNT | MS_RDONLY | kept | times)


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
