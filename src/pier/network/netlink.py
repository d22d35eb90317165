"""Links, addresses, routes and packet rules over raw netlink sockets: no `ip` or `nft` binary.

In the gateway namespace a packet's destination is *local* exactly if the policy lets the gatekeeper see it:

    tcp to a local address      goes to the gatekeeper's one listener, whatever the port
    udp, echo requests to one   are the gatekeeper's to answer, if the network is public
    tcp to any other            is answered with a reset
    all else to any other       is answered with an ICMP "administratively prohibited"

so nothing is ever dropped in silence, and nothing is ever forwarded.

Standard library only: this runs in processes that can import nothing any more.
"""

from __future__ import annotations

import array
import errno
import fcntl
import os
import socket
import struct
from types import TracebackType

_REQUEST, _ACK, _CREATE, _EXCL = 0x1, 0x4, 0x400, 0x200
_NEWLINK, _DELLINK, _NEWADDR, _NEWROUTE = 16, 17, 20, 24
_ERROR = 2
_NESTED = 0x8000
_UP, _NODAD = 1, 0x02

UNICAST, LOCAL = 1, 2
MAIN_TABLE, LOCAL_TABLE = 254, 255


def attribute(kind: int, data: bytes) -> bytes:
    """One attribute, padded as netlink wants it."""
    return struct.pack("HH", len(data) + 4, kind) + data + bytes(-len(data) % 4)


def nested(kind: int, *parts: bytes) -> bytes:
    return attribute(kind | _NESTED, b"".join(parts))


def message(kind: int, flags: int, sequence: int, body: bytes) -> bytes:
    return struct.pack("IHHII", len(body) + 16, kind, flags | _REQUEST, sequence, 0) + body


class Netlink:
    """A netlink socket in the network namespace that the process was in when it was made."""

    def __init__(self, protocol: int = socket.NETLINK_ROUTE) -> None:
        self.socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)
        self._sequence = 0

    def __enter__(self) -> Netlink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()

    def ask(self, kind: int, flags: int, body: bytes, what: str) -> None:
        """Send one request and wait for its acknowledgement; OSError if the kernel refuses."""
        self._sequence += 1
        self.socket.send(message(kind, flags | _ACK, self._sequence, body))
        self.wait({self._sequence}, what)

    def wait(self, sequences: set[int], what: str) -> None:
        """Wait until all of these requests were acknowledged."""
        while sequences:
            data = self.socket.recv(65536)
            while len(data) >= 16:
                size, kind, _, sequence, _ = struct.unpack_from("IHHII", data)
                if kind == _ERROR:
                    number = -struct.unpack_from("i", data, 16)[0]
                    if number:
                        raise OSError(number, f"{what}: {os.strerror(number)}")
                    sequences.discard(sequence)
                data = data[(size + 3) & ~3 :]

    def make_pair(self, name: str, peer: str, peer_namespace: int, mtu: int) -> None:
        """A pair of linked interfaces, one here and one in another namespace. Neither makes addresses by itself."""
        try:
            self._make_pair(name, peer, peer_namespace, mtu, nested(26, nested(socket.AF_INET6, attribute(8, b"\x01"))))
        except OSError as error:
            if error.errno != errno.EAFNOSUPPORT:
                raise
            self._make_pair(name, peer, peer_namespace, mtu, b"")

    def _make_pair(self, name: str, peer: str, peer_namespace: int, mtu: int, quiet: bytes) -> None:
        common = attribute(4, struct.pack("I", mtu)) + quiet
        header = struct.pack("BxHiII", 0, 0, 0, 0, 0)
        other = header + attribute(3, peer.encode() + b"\0") + common + attribute(28, struct.pack("I", peer_namespace))
        info = nested(18, attribute(1, b"veth\0"), nested(2, attribute(1, other)))
        body = header + attribute(3, name.encode() + b"\0") + common + info
        self.ask(_NEWLINK, _CREATE | _EXCL, body, "cannot make a veth pair")

    def make_bridge(self, name: str) -> None:
        """A bridge, which makes no addresses by itself."""
        quiet = nested(26, nested(socket.AF_INET6, attribute(8, b"\x01")))
        header = struct.pack("BxHiII", 0, 0, 0, 0, 0) + attribute(3, name.encode() + b"\0")
        kind = nested(18, attribute(1, b"bridge\0"))
        try:
            self.ask(_NEWLINK, _CREATE | _EXCL, header + quiet + kind, "cannot make a bridge")
        except OSError as error:
            if error.errno != errno.EAFNOSUPPORT:
                raise
            self.ask(_NEWLINK, _CREATE | _EXCL, header + kind, "cannot make a bridge")

    def set_master(self, index: int, master: int) -> None:
        """Make a link a port of a bridge."""
        body = struct.pack("BxHiII", 0, 0, index, 0, 0) + attribute(10, struct.pack("I", master))
        self.ask(_NEWLINK, 0, body, "cannot join a bridge")

    def stop_forwarding(self, index: int) -> None:
        """Let nothing that comes in by a link go on by another (IPv4)."""
        off = nested(26, nested(socket.AF_INET, nested(1, attribute(1, struct.pack("I", 0)))))
        body = struct.pack("BxHiII", 0, 0, index, 0, 0) + off
        self.ask(_NEWLINK, 0, body, "cannot stop forwarding")

    def set_up(self, index: int) -> None:
        self.ask(_NEWLINK, 0, struct.pack("BxHiII", 0, 0, index, _UP, _UP), "cannot set a link up")

    def delete_link(self, name: str) -> None:
        """Remove a link and its peer; gone already is fine."""
        try:
            body = struct.pack("BxHiII", 0, 0, 0, 0, 0) + attribute(3, name.encode() + b"\0")
            self.ask(_DELLINK, 0, body, "cannot remove a link")
        except OSError as error:
            if error.errno != errno.ENODEV:
                raise

    def add_address(self, index: int, address: str, length: int) -> None:
        family, packed = pack_address(address)
        body = struct.pack("BBBBi", family, length, _NODAD if family == socket.AF_INET6 else 0, 0, index)
        body += attribute(1, packed) + attribute(2, packed)
        self.ask(_NEWADDR, _CREATE | _EXCL, body, f"cannot add the address {address}")

    def add_route(
        self, prefix: str, length: int, *, index: int, via: str = "", kind: int = UNICAST, table: int = MAIN_TABLE
    ) -> None:
        """A route to `prefix`/`length`. With `kind` LOCAL, every address in it is answered as this machine's own."""
        family, packed = pack_address(prefix)
        scope = 254 if kind == LOCAL else 0 if via or family == socket.AF_INET6 else 253
        body = struct.pack("BBBBBBBBI", family, length, 0, 0, table, 4, scope, kind, 0) + attribute(
            4, struct.pack("i", index)
        )
        if length:
            body += attribute(1, packed)
        if via:
            body += attribute(5, pack_address(via)[1])
        self.ask(_NEWROUTE, _CREATE | _EXCL, body, f"cannot add a route to {prefix}/{length}")

    def add_last_resort(self, source: str, metric: int) -> None:
        """Send what has no other route to the loopback device, with `source` for its origin."""
        family, packed = pack_address(source)
        scope = 253 if family == socket.AF_INET else 0
        body = struct.pack("BBBBBBBBI", family, 0, 0, 0, MAIN_TABLE, 4, scope, UNICAST, 0)
        body += attribute(4, struct.pack("i", 1)) + attribute(7, packed) + attribute(6, struct.pack("I", metric))
        self.ask(_NEWROUTE, _CREATE | _EXCL, body, "cannot add a route of last resort")


def pack_address(address: str) -> tuple[int, bytes]:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return family, socket.inet_pton(family, address)


def link_index(name: str) -> int:
    """The number of a link in the namespace that this process is in."""
    return socket.if_nametoindex(name)


NETFILTER = 12
_SUBSYSTEM = 10 << 8
_NEW_TABLE, _NEW_CHAIN, _NEW_RULE = 0, 3, 6
_BEGIN, _END = 0x10, 0x11
_APPEND = 0x800
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
    by the loopback device is refused as it is sent, and logged to the listeners of `group`. Lookups at `resolver` seem
    to be sent, and the listener answers them. Raw packets that a program puts on the device are logged and dropped
    where they arrive."""
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
    is acknowledged for all; errors are reported one by one."""
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
