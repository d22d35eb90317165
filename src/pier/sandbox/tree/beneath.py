"""Paths that the kernel resolves in one step, below a directory, so that no link swapped in midway leads out of it."""

from __future__ import annotations

import ctypes
import errno
import os
import struct

NO_MAGICLINKS, NO_SYMLINKS, BENEATH, IN_ROOT = 0x02, 0x04, 0x08, 0x10
DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC

_OPENAT2 = 437
_libc = ctypes.CDLL(None, use_errno=True)


class TreeError(Exception):
    """A request that cannot be done. `code` is one of not_found, not_regular, too_large, unsafe_archive,
    broken_archive, os."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def open_in(root: int, path: str, flags: int, resolve: int, mode: int = 0) -> int:
    """Open `path` from the directory `root` under the given RESOLVE_* limits."""
    how = struct.pack("QQQ", flags | os.O_CLOEXEC, mode, resolve)
    name = os.fsencode(path) or b"."
    if b"\0" in name:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
    number = errno.EAGAIN
    for _ in range(100):
        fd = _libc.syscall(_OPENAT2, root, ctypes.c_char_p(name), ctypes.c_char_p(how), ctypes.c_size_t(24))
        if fd >= 0:
            return fd
        number = ctypes.get_errno()
        if number not in (errno.EAGAIN, errno.EINTR):
            break
    raise OSError(number, os.strerror(number), path)


def make_directory(root: int, path: str, resolve: int) -> tuple[int, bool]:
    """Open the directory `path`, making what is missing of it; says whether its last part was made."""
    try:
        return open_in(root, path, DIRECTORY, resolve), False
    except FileNotFoundError:
        parent, _, last = path.strip("/").rpartition("/")
        above, _ = make_directory(root, parent or ".", resolve)
    try:
        try:
            os.mkdir(last, 0o755, dir_fd=above)
        except FileExistsError:
            pass
    finally:
        os.close(above)
    return open_in(root, path, DIRECTORY, resolve), True


def write_all(fd: int, data: bytes) -> None:
    """Write all of `data`, however little the descriptor takes at once."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
