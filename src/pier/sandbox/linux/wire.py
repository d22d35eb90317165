"""Messages between pier, the zygotes and the inits: one JSON object each, with open files beside it.

Sockets are SEQPACKET, so a message arrives whole or not at all. One that is too long for a packet travels in an
anonymous file. Standard library only: both ends use this.
"""

from __future__ import annotations

import array
import json
import os
import socket
from typing import Any

OUT_OF_MEMORY = -1
"""The number of the event that a process was killed because of the limit on memory."""

_PACKET = 64 * 1024
_encode = json.JSONEncoder(separators=(",", ":")).encode
_FDS = 250
_ELSEWHERE = b"@"
"""The whole packet, when the message is in the first of its files."""


def encode(message: dict[str, Any], fds: list[int]) -> tuple[bytes, list[int], int]:
    """The packet, the files to send with it, and the one among them to close afterwards (-1 if none)."""
    data = _encode(message).encode()
    if len(data) <= _PACKET:
        return data, fds, -1
    fd = os.memfd_create("message", os.MFD_CLOEXEC)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    return _ELSEWHERE, [fd, *fds], fd


def send(sock: socket.socket, message: dict[str, Any], fds: list[int] | None = None) -> None:
    """Send one message, as the socket blocks or does not."""
    data, files, extra = encode(message, fds or [])
    try:
        send_packet(sock, data, files)
    finally:
        if extra >= 0:
            os.close(extra)


def send_packet(sock: socket.socket, data: bytes, fds: list[int]) -> None:
    """Send what `encode` made."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([data], rights, socket.MSG_NOSIGNAL)


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next message and its files, which are closed on exec; None at the end of the connection. A ValueError says
    that what came is not a message; the connection goes on after it."""
    flags = socket.MSG_CMSG_CLOEXEC
    data, ancillary, _, _ = sock.recvmsg(_PACKET + 1, socket.CMSG_SPACE(_FDS * 4), flags)
    fds: list[int] = []
    for _, kind, value in ancillary:
        if kind == socket.SCM_RIGHTS:
            fds.extend(array.array("i", value[: len(value) - len(value) % 4]))
    if not data:
        for fd in fds:
            os.close(fd)
        return None
    try:
        if data == _ELSEWHERE:
            data = _read_file(fds)
        message = json.loads(data)
        if not isinstance(message, dict):
            raise ValueError("expected a JSON object")
    except (ValueError, OSError, RecursionError) as error:
        for fd in fds:
            os.close(fd)
        raise ValueError(f"malformed message: {error}") from error
    return message, fds


def _read_file(fds: list[int]) -> bytes:
    if not fds:
        raise ValueError("the file with the message is missing")
    fd = fds.pop(0)
    try:
        return os.pread(fd, os.fstat(fd).st_size, 0)
    finally:
        os.close(fd)


def failure(message: dict[str, Any], error: Exception) -> dict[str, Any]:
    """The answer to a request that failed: what the system refused, or else that the request made no sense."""
    id = message.get("id")
    id = id if isinstance(id, int) else -1
    if isinstance(error, OSError):
        return {"id": id, "error": str(error), "errno": error.errno or 0}
    return {"id": id, "error": f"invalid request: {type(error).__name__}: {error}", "code": "bad_argument"}
