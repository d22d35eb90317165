"""The few packet rules that the gateway namespace needs, written straight to the kernel.

In the gateway namespace a packet's destination is *local* exactly if the policy lets the gatekeeper see it:

    tcp to a local address      goes to the gatekeeper's one listener, whatever the port
    udp, echo requests to one   are the gatekeeper's to answer, if the network is public
    tcp to any other            is answered with a reset
    all else to any other       is answered with an ICMP "administratively prohibited"

so nothing is ever dropped in silence, and nothing is ever forwarded.
"""

from __future__ import annotations

import socket
import struct

from pier.network.rtnetlink import Netlink, attribute, message, nested

_NETFILTER = 12
_SUBSYSTEM = 10 << 8
_NEW_TABLE, _NEW_CHAIN, _NEW_RULE = 0, 3, 6
_BEGIN, _END = 0x10, 0x11
_CREATE, _APPEND, _ACK = 0x400, 0x800, 0x4
_INET = 1
_TABLE = b"pier\0"
_EQUAL, _UNEQUAL = 0, 1
_ROUTE_LOCAL = 2


def divert(port: int, *, datagrams: bool) -> None:
    """Put the rules into the current network namespace; `port` is the gatekeeper's listener. With `datagrams` the
    gatekeeper reads UDP and echo requests as packets, so the kernel must not answer them itself."""
    is_tcp = [_meta(16), _compare(_EQUAL, bytes([socket.IPPROTO_TCP]))]
    is_local = [_destination_kind(), _compare(_EQUAL, struct.pack("I", _ROUTE_LOCAL))]
    is_foreign = [_destination_kind(), _compare(_UNEQUAL, struct.pack("I", _ROUTE_LOCAL))]
    bodies = [
        (_NEW_TABLE, _CREATE, attribute(1, _TABLE)),
        (_NEW_CHAIN, _CREATE, _chain(b"divert\0", b"nat\0", -100)),
        (_NEW_CHAIN, _CREATE, _chain(b"refuse\0", b"filter\0", 0)),
        (_NEW_RULE, _CREATE | _APPEND, _rule(b"divert\0", *is_tcp, *is_local, *_redirect(port))),
        *(
            (_NEW_RULE, _CREATE | _APPEND, _rule(b"refuse\0", *is_local, *kind, _drop()))
            for kind in (_DATAGRAMS if datagrams else ())
        ),
        (_NEW_RULE, _CREATE | _APPEND, _rule(b"refuse\0", *is_tcp, *is_foreign, _reject(1, 0))),
        (_NEW_RULE, _CREATE | _APPEND, _rule(b"refuse\0", *_unicast_only(), *is_foreign, _reject(2, 3))),
    ]
    with Netlink(_NETFILTER) as netlink:
        count = len(bodies)
        data = message(_BEGIN, 0, 0, struct.pack(">BBH", 0, 0, 10))
        for sequence, (kind, flags, body) in enumerate(bodies, 1):
            data += message(_SUBSYSTEM | kind, flags | _ACK, sequence, struct.pack(">BBH", _INET, 0, 0) + body)
        data += message(_END, 0, count + 1, struct.pack(">BBH", 0, 0, 10))
        netlink.socket.send(data)
        netlink.wait(set(range(1, count + 1)), "cannot set packet rules (nftables)")


def _unicast_only() -> list[bytes]:
    """Multicast and neighbour discovery are the link's own business and lead nowhere."""
    return [_meta(19), _compare(_EQUAL, b"\0")]


def _number(kind: int, value: int) -> bytes:
    return attribute(kind, struct.pack(">I", value))


def _chain(name: bytes, kind: bytes, priority: int) -> bytes:
    hook = nested(4, _number(1, 0), attribute(2, struct.pack(">i", priority)))
    return attribute(1, _TABLE) + attribute(3, name) + hook + _number(5, 1) + attribute(7, kind)


def _rule(chain: bytes, *expressions: bytes) -> bytes:
    return attribute(1, _TABLE) + attribute(2, chain) + nested(4, *expressions)


def _expression(name: bytes, *parts: bytes) -> bytes:
    return nested(1, attribute(1, name), nested(2, *parts))


def _meta(key: int) -> bytes:
    return _expression(b"meta\0", _number(2, key), _number(1, 1))


def _compare(operation: int, value: bytes) -> bytes:
    return _expression(b"cmp\0", _number(1, 1), _number(2, operation), nested(3, attribute(1, value)))


def _transport(offset: int, size: int) -> bytes:
    """Bytes of the header that comes after IP's."""
    return _expression(b"payload\0", _number(1, 1), _number(2, 2), _number(3, offset), _number(4, size))


def _drop() -> bytes:
    return _expression(b"immediate\0", _number(1, 0), nested(2, nested(2, _number(1, 0))))


def _destination_kind() -> bytes:
    return _expression(b"fib\0", _number(1, 1), _number(2, 3), _number(3, 2))


def _redirect(port: int) -> list[bytes]:
    target = nested(2, attribute(1, struct.pack(">H", port)))
    return [_expression(b"immediate\0", _number(1, 1), target), _expression(b"redir\0", _number(1, 1), _number(2, 1))]


def _reject(kind: int, code: int) -> bytes:
    return _expression(b"reject\0", _number(1, kind), attribute(2, bytes([code])))


_DATAGRAMS = (
    [_meta(16), _compare(_EQUAL, bytes([socket.IPPROTO_UDP])), _transport(2, 2), _compare(_UNEQUAL, b"\0\x35")],
    [_meta(16), _compare(_EQUAL, bytes([socket.IPPROTO_ICMP])), _transport(0, 1), _compare(_EQUAL, b"\x08")],
    [_meta(16), _compare(_EQUAL, bytes([socket.IPPROTO_ICMPV6])), _transport(0, 1), _compare(_EQUAL, b"\x80")],
)
"""UDP but for lookups, and echo requests of both versions."""
