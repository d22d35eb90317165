"""Turns off what a link would leave undone: several datagrams that a program sends as one must be cut apart by the
sandbox's kernel, since whoever reads packets at the other end cannot tell where.

Standard library only: this runs in processes that can import nothing any more.
"""

from __future__ import annotations

import array
import fcntl
import socket
import struct

_ETHTOOL = 0x8946
_COUNT, _NAMES, _CHANGE = 0x37, 0x1B, 0x3B
_FEATURES, _NAME_SIZE = 4, 32


def cut_datagrams(link: str) -> None:
    """Let the kernel cut datagrams apart before they leave by `link`, in this network namespace. One that never joins
    them needs nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        count = struct.unpack_from("=I", _ask(sock, link, struct.pack("=IIQI", _COUNT, 0, 1 << _FEATURES, 0)), 16)[0]
        head = struct.pack("=III", _NAMES, _FEATURES, count)
        names = _ask(sock, link, head + bytes(count * _NAME_SIZE))[len(head) :]
        known = [names[at : at + _NAME_SIZE].split(b"\0")[0] for at in range(0, len(names), _NAME_SIZE)]
        if b"tx-udp-segmentation" not in known:
            return
        place = known.index(b"tx-udp-segmentation")
        blocks = (count + 31) // 32
        words = [0] * (2 * blocks)
        words[2 * (place // 32)] = 1 << place % 32
        _ask(sock, link, struct.pack(f"=II{2 * blocks}I", _CHANGE, blocks, *words))


def _ask(sock: socket.socket, link: str, request: bytes) -> bytes:
    buffer = array.array("B", request)
    fcntl.ioctl(sock, _ETHTOOL, struct.pack("16sP", link.encode(), buffer.buffer_info()[0]))
    return buffer.tobytes()
