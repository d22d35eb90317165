"""The protocol between commands and a process that keeps a sandbox running, over its control socket.

A frame is one byte of kind, four of length, and the payload. Imports are minimal, since they delay `pier exec`.
"""

from __future__ import annotations

import os
import socket
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SOCKET = "control.sock"
REQUEST, STDIN, STDIN_END, RESIZE, STDOUT, STDERR, EXIT, ERROR = b"Q", b"i", b"c", b"w", b"o", b"e", b"x", b"!"
PROGRESS, SIGNAL = b"p", b"s"
"""A progress line, and a signal for the command."""
TAKEN = b"t"
"""Acknowledges a `STDIN` frame that the command has read."""
WINDOW = 8
"""Maximum number of unacknowledged `STDIN` frames."""
LARGEST = 8 << 20


def pack(kind: bytes, payload: bytes = b"") -> bytes:
    return kind + struct.pack("!I", len(payload)) + payload


def unpack(buffer: bytearray) -> Iterator[tuple[bytes, bytes]]:
    """Remove the complete frames from the start of `buffer` and yield them. OSError for a frame that is too large."""
    while len(buffer) >= 5:
        size = struct.unpack_from("!I", buffer, 1)[0]
        if size > LARGEST:
            raise OSError("a frame on a control socket is too large")
        if len(buffer) < 5 + size:
            return
        frame = bytes(buffer[:1]), bytes(buffer[5 : 5 + size])
        del buffer[: 5 + size]
        yield frame


def listen(directory: str) -> socket.socket:
    """Create the control socket in a directory that only this user may enter. A stale socket is replaced."""
    path = f"{directory}/{SOCKET}"
    if os.path.lexists(path):
        os.unlink(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    _at(directory, sock.bind)
    os.chmod(path, 0o600)
    return sock


def dial(directory: str) -> socket.socket:
    """Connect to the control socket in a directory; OSError if no process serves it."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        _at(directory, sock.connect)
    except OSError:
        sock.close()
        raise
    return sock


def _at(directory: str, call: Callable[[str], None]) -> None:
    """Call with a short path to the socket: socket addresses are limited to about a hundred bytes."""
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        call(f"/proc/self/fd/{fd}/{SOCKET}")
    finally:
        os.close(fd)
