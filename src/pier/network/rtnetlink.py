"""Links, addresses and routes over a raw netlink socket: no `ip` binary, nothing but the standard library."""

from __future__ import annotations

import errno
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
