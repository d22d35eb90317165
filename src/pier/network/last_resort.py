"""Tells what a sandbox without a network tries to reach.

Its namespace has the loopback device and nothing else. Each address that is not its own has a route of last resort to
that device, where packet rules refuse what arrives and hand its beginning to a socket. So an attempt leads nowhere, is
refused at once, and is known with its destination. A link that another policy adds has routes that come first.

Standard library only: this runs in processes that can import nothing any more.
"""

from __future__ import annotations

import errno
import socket
import struct

from pier.network import plumbing
from pier.network.netlink import NETFILTER, Netlink, attribute, commit, message, refusing

_GROUP = 7
_HEAD = 600
"""How many bytes of a packet are logged: enough for a lookup's whole question."""
_LAST = 0xFFFFFFFF
"""The metric of a route that is taken when there is no other."""
_LACKING = (
    errno.EPROTONOSUPPORT, errno.EOPNOTSUPP, errno.EAFNOSUPPORT, errno.ENOENT, errno.EINVAL, errno.ENOSYS,
    errno.EPERM, errno.EACCES,
)  # fmt: skip
"""How a kernel says that it has no packet log, or that not everybody may use it."""

_LISTEN = message(
    4 << 8 | 1,
    0x4,
    1,
    struct.pack(">BBH", socket.AF_UNSPEC, 0, _GROUP)
    + attribute(1, b"\1")
    + attribute(2, struct.pack(">IBx", _HEAD, 2))
    + attribute(5, struct.pack(">I", 1))
    + attribute(6, struct.pack(">H", 1)),
)
"""Binds a socket to the packet log: with packets, each at once, with a number."""
_RULES = refusing(_GROUP, plumbing.GATEWAY)


def begin() -> tuple[dict[str, str], list[socket.socket]]:
    """Run by a sandbox's init in its network namespace, before anything else runs there: `listen`, and prove that there
    is no way out. Answers the proof and the sockets."""
    sockets = listen()
    proof = plumbing.probe("none") | {"attempts": "listed" if sockets else "not listed"}
    for sock in sockets[:1]:
        while receive(sock) is not None:
            pass
    return proof, sockets


def listen() -> list[socket.socket]:
    """Run by a sandbox's init in its network namespace: a socket that tells of refused packets, and one that sends
    answers to lookups. Nothing where the kernel cannot tell: what has no route is then refused in silence."""
    try:
        netlink = Netlink(NETFILTER)
        try:
            netlink.socket.send(_LISTEN)
            netlink.wait({1}, "cannot listen to refused packets (nfnetlink_log)")
            commit(_RULES, netlink)
            _route_here()
            answers = socket.socket(socket.AF_INET, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.IPPROTO_RAW)
        except OSError:
            netlink.socket.close()
            raise
    except OSError as error:
        if error.errno in _LACKING:
            return []
        raise
    netlink.socket.setblocking(False)
    return [netlink.socket, answers]


def _route_here() -> None:
    with Netlink() as netlink:
        netlink.add_last_resort("127.0.0.1", _LAST)
        try:
            netlink.add_last_resort("::1", _LAST)
        except OSError as error:
            if error.errno not in plumbing.NO_SIX:
                raise


def receive(sock: socket.socket) -> bytes | None:
    """The next logged packets, empty if some were lost; None if there are no more."""
    try:
        return sock.recv(1 << 16, socket.MSG_DONTWAIT)
    except OSError as error:
        return b"" if error.errno == errno.ENOBUFS else None
