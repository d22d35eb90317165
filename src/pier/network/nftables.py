"""The few packet rules that a gateway's namespace and a sandbox's own need, written straight to the kernel.

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

NETFILTER = 12
_SUBSYSTEM = 10 << 8
_NEW_TABLE, _NEW_CHAIN, _NEW_RULE = 0, 3, 6
_BEGIN, _END = 0x10, 0x11
_CREATE, _APPEND, _ACK = 0x400, 0x800, 0x4
_INET = 1
_TABLE = b"pier\0"
_EQUAL, _UNEQUAL = 0, 1
_ROUTE_LOCAL = 2
_DROP, _ACCEPT = 0, 1


def divert(port: int, *, datagrams: bool) -> None:
    """Put the rules into the current network namespace, a gateway's; `port` is the gatekeeper's listener. With
    `datagrams` the gatekeeper reads UDP and echo requests as packets, so the kernel must not answer them itself."""
    batch = _batch(
        (_NEW_CHAIN, _CREATE, _chain(b"divert\0", b"nat\0", -100)),
        (_NEW_CHAIN, _CREATE, _chain(b"refuse\0", b"filter\0", 0)),
        _append(b"divert\0", *_IS_TCP, *_IS_LOCAL, *_redirect(port)),
        *(_append(b"refuse\0", *_IS_LOCAL, *kind, _verdict(_DROP)) for kind in (_DATAGRAMS if datagrams else ())),
        _append(b"refuse\0", *_IS_TCP, *_IS_FOREIGN, _reject(1, 0)),
        _append(b"refuse\0", *_unicast_only(), *_IS_FOREIGN, _reject(2, 3)),
    )
    with Netlink(NETFILTER) as netlink:
        commit(batch, netlink)


def refusing(group: int, resolver: str) -> tuple[bytes, int]:
    """Rules for a sandbox's own network namespace, to be made once and put in by `commit`: what goes to another machine
    by the loopback device is refused as it is sent, and told to whoever listens to `group`. Lookups at `resolver` seem
    to be sent, and are for the listener to answer. What is put on the device as it is, byte for byte, is told and
    dropped where it arrives."""
    is_lookup = [
        _meta(16), _compare(_EQUAL, bytes([socket.IPPROTO_UDP])), _transport(2, 2), _compare(_EQUAL, b"\0\x35"),
        _meta(15), _compare(_EQUAL, bytes([socket.AF_INET])),
        _destination(), _compare(_EQUAL, socket.inet_aton(resolver)),
    ]  # fmt: skip
    sent, came = ([_meta(key), _compare(_EQUAL, struct.pack("I", 1)), *_IS_FOREIGN] for key in (5, 4))
    tell = _expression(b"log\0", attribute(1, struct.pack(">H", group)))
    return _batch(
        (_NEW_CHAIN, _CREATE, _chain(b"sent\0", b"filter\0", 0, hook=3)),
        (_NEW_CHAIN, _CREATE, _chain(b"came\0", b"filter\0", 0)),
        _append(b"sent\0", *sent, *is_lookup, tell, _verdict(_ACCEPT)),
        _append(b"sent\0", *sent, *_IS_TCP, tell, _reject(1, 0)),
        _append(b"sent\0", *sent, tell, _reject(2, 0)),
        _append(b"came\0", *came, *is_lookup, _verdict(_DROP)),
        _append(b"came\0", *came, tell, _verdict(_DROP)),
    )


def _batch(*bodies: tuple[int, int, bytes]) -> tuple[bytes, int]:
    """The requests that make the table with all that `bodies` say, or nothing, and the number of the last of them. It
    is acknowledged for all; what goes wrong is told of each."""
    last = len(bodies) + 1
    data = message(_BEGIN, 0, 0, struct.pack(">BBH", 0, 0, 10))
    for sequence, (kind, flags, body) in enumerate([(_NEW_TABLE, _CREATE, attribute(1, _TABLE)), *bodies], 1):
        wish = _ACK if sequence == last else 0
        data += message(_SUBSYSTEM | kind, flags | wish, sequence, struct.pack(">BBH", _INET, 0, 0) + body)
    return data + message(_END, 0, last + 1, struct.pack(">BBH", 0, 0, 10)), last


def commit(batch: tuple[bytes, int], netlink: Netlink) -> None:
    """Put rules into the network namespace of a netfilter socket."""
    data, last = batch
    netlink.socket.send(data)
    netlink.wait({last}, "cannot set packet rules (nftables)")


def _append(chain: bytes, *expressions: bytes) -> tuple[int, int, bytes]:
    return _NEW_RULE, _CREATE | _APPEND, attribute(1, _TABLE) + attribute(2, chain) + nested(4, *expressions)


def _unicast_only() -> list[bytes]:
    """Multicast and neighbour discovery are the link's own business and lead nowhere."""
    return [_meta(19), _compare(_EQUAL, b"\0")]


def _number(kind: int, value: int) -> bytes:
    return attribute(kind, struct.pack(">I", value))


def _chain(name: bytes, kind: bytes, priority: int, *, hook: int = 0) -> bytes:
    place = nested(4, _number(1, hook), attribute(2, struct.pack(">i", priority)))
    return attribute(1, _TABLE) + attribute(3, name) + place + _number(5, 1) + attribute(7, kind)


def _expression(name: bytes, *parts: bytes) -> bytes:
    return nested(1, attribute(1, name), nested(2, *parts))


def _meta(key: int) -> bytes:
    return _expression(b"meta\0", _number(2, key), _number(1, 1))


def _compare(operation: int, value: bytes) -> bytes:
    return _expression(b"cmp\0", _number(1, 1), _number(2, operation), nested(3, attribute(1, value)))


def _transport(offset: int, size: int) -> bytes:
    """Bytes of the header that comes after IP's."""
    return _expression(b"payload\0", _number(1, 1), _number(2, 2), _number(3, offset), _number(4, size))


def _destination() -> bytes:
    """The address that an IPv4 packet goes to."""
    return _expression(b"payload\0", _number(1, 1), _number(2, 1), _number(3, 16), _number(4, 4))


def _verdict(code: int) -> bytes:
    return _expression(b"immediate\0", _number(1, 0), nested(2, nested(2, _number(1, code))))


def _destination_kind() -> bytes:
    return _expression(b"fib\0", _number(1, 1), _number(2, 3), _number(3, 2))


def _redirect(port: int) -> list[bytes]:
    target = nested(2, attribute(1, struct.pack(">H", port)))
    return [_expression(b"immediate\0", _number(1, 1), target), _expression(b"redir\0", _number(1, 1), _number(2, 1))]


def _reject(kind: int, code: int) -> bytes:
    return _expression(b"reject\0", _number(1, kind), attribute(2, bytes([code])))


_IS_TCP = [_meta(16), _compare(_EQUAL, bytes([socket.IPPROTO_TCP]))]
_IS_LOCAL = [_destination_kind(), _compare(_EQUAL, struct.pack("I", _ROUTE_LOCAL))]
_IS_FOREIGN = [_destination_kind(), _compare(_UNEQUAL, struct.pack("I", _ROUTE_LOCAL))]
_DATAGRAMS = (
    [_meta(16), _compare(_EQUAL, bytes([socket.IPPROTO_UDP])), _transport(2, 2), _compare(_UNEQUAL, b"\0\x35")],
    [_meta(16), _compare(_EQUAL, bytes([socket.IPPROTO_ICMP])), _transport(0, 1), _compare(_EQUAL, b"\x08")],
    [_meta(16), _compare(_EQUAL, bytes([socket.IPPROTO_ICMPV6])), _transport(0, 1), _compare(_EQUAL, b"\x80")],
)
"""UDP but for lookups, and echo requests of both versions."""
