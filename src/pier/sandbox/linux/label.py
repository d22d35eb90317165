"""The label that a Linux security module (AppArmor, SELinux) has put on a container's processes.

An engine puts it on what it starts. pier enters a container from outside, so it puts the same one on each command: the
label of the container's first process, as the kernel reports it. Where no module has labelled the container there is
nothing to do. A label that cannot be put on a command is an error, and the command is not run. Standard library only.
"""

from __future__ import annotations

import errno
import os

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
        fd = _open(proc, "thread-self", self.module, "exec", os.O_WRONLY)
        if fd is None:
            raise OSError(errno.ENOENT, "the kernel has no file to set a label by")
        try:
            os.write(fd, words.encode(errors="surrogateescape"))
        finally:
            os.close(fd)


def find_labels(proc: int, pid: int) -> list[Label]:
    """The labels of a process. `proc` is an open /proc."""
    found = [Label(module, _read(proc, str(pid), module)) for module in (_APPARMOR, _SELINUX)]
    return [label for label in found if label.text not in _NONE]


def _read(proc: int, pid: str, module: str) -> str:
    fd = _open(proc, pid, module, "current", os.O_RDONLY)
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


def _open(proc: int, pid: str, module: str, name: str, flags: int) -> int | None:
    """A module's file: in its own directory, or where kernels have it that know one module at a time."""
    for path in (f"{pid}/attr/{module}/{name}", f"{pid}/attr/{name}"):
        try:
            return os.open(path, flags | os.O_CLOEXEC, dir_fd=proc)
        except FileNotFoundError:
            continue
    return None
