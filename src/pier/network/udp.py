"""Carries datagrams (UDP) and echo requests (ping) of one sandbox with a public network to the world and back.

The packets that a sandbox sends are read at the gateway's end of its link. Each pair of ends is a flow: a socket of
this machine's own, connected to the other side, whose answers go back as packets that seem to come from there. Like
connections, flows are checked first, counted, noted and closed when the policy changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import struct
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Literal

from pier.network.outside import Refused, Unreachable
from pier.network.policy import Address, Decision, Kind

_ICMP, _UDP, _ICMP6 = 1, 17, 58
_ECHO, _ECHO_REPLY, _ECHO6, _ECHO_REPLY6 = 8, 0, 128, 129
IPV4, IPV6 = 0x0800, 0x86DD
ECHO_HEAD = 6
LARGEST = 64_000
"""How much may be sent back at once: what fits the link."""


@dataclass(frozen=True, slots=True)
class Datagram:
    """What a sandbox sent: a datagram between two ports, or an echo request, whose `source_port` is its identifier and
    whose `port` is 0. `head` is the beginning of the packet, to be quoted when it is refused."""

    kind: Literal["udp", "icmp"]
    source: Address
    source_port: int
    address: Address
    port: int
    payload: bytes
    head: bytes


def read(data: bytes, protocol: int) -> Datagram | None:
    """A packet, without its link's header; None for fragments and what is neither kind."""
    if protocol == IPV4 and len(data) >= 28 and not struct.unpack_from(">H", data, 6)[0] & 0x3FFF:
        at, number = 4 * (data[0] & 0x0F), data[9]
        source: Address = ipaddress.IPv4Address(data[12:16])
        address: Address = ipaddress.IPv4Address(data[16:20])
    elif protocol == IPV6 and len(data) >= 48:
        at, number = 40, data[6]
        source, address = ipaddress.IPv6Address(data[8:24]), ipaddress.IPv6Address(data[24:40])
    else:
        return None
    if address.is_multicast or len(data) < at + 8:
        return None
    first, second, size = struct.unpack_from(">HHH", data, at)
    head = data[: at + 8] if protocol == IPV4 else data[:1000]
    if number == _UDP:
        return Datagram("udp", source, first, address, second, data[at + 8 : at + max(size, 8)], head)
    if (number, data[at]) in ((_ICMP, _ECHO), (_ICMP6, _ECHO6)):
        return Datagram("icmp", source, size, address, 0, data[at + 6 :], head)
    return None


def answer(to: Datagram, payload: bytes) -> bytes:
    """The packet that brings `payload` back to who sent `to`. Of an echo it begins with the sequence number."""
    if to.kind == "udp":
        body = struct.pack(">HHHH", to.port, to.source_port, 8 + len(payload), 0) + payload
        return _packet(to, _UDP, body, checksum_at=6)
    kind = _ECHO_REPLY if to.address.version == 4 else _ECHO_REPLY6
    body = struct.pack(">BBHH", kind, 0, 0, to.source_port) + payload
    return _packet(to, _ICMP if to.address.version == 4 else _ICMP6, body, checksum_at=2)


def bare(number: int, source: str, target: str) -> bytes:
    """An IPv4 packet of a protocol, with nothing in it; the kernel adds its checksum."""
    ends = ipaddress.IPv4Address(source).packed + ipaddress.IPv4Address(target).packed
    return struct.pack(">BBHHHBBH", 0x45, 0, 20, 0, 0x4000, 64, number, 0) + ends


def echo_head(six: bool) -> bytes:
    """What comes before the sequence number of an echo request; its checksum and identifier are the kernel's to set."""
    return bytes([_ECHO6 if six else _ECHO]) + bytes(ECHO_HEAD - 1)


def refusal(to: Datagram, *, prohibited: bool) -> bytes:
    """The ICMP packet that refuses `to`: prohibited, or no listener at its port."""
    if to.address.version == 4:
        body = struct.pack(">BBHI", 3, 13 if prohibited else 3, 0, 0) + to.head
        return _packet(to, _ICMP, body, checksum_at=2)
    body = struct.pack(">BBHI", 1, 1 if prohibited else 4, 0, 0) + to.head
    return _packet(to, _ICMP6, body, checksum_at=2)


def _packet(to: Datagram, number: int, body: bytes, *, checksum_at: int) -> bytes:
    """`body` from where `to` was sent to whom it came from."""
    ends = to.address.packed + to.source.packed
    pseudo = b"" if number == _ICMP else ends + struct.pack(">II", len(body), number)
    checked = bytearray(body)
    struct.pack_into(">H", checked, checksum_at, _checksum(pseudo + body) or 0xFFFF)
    if to.address.version == 6:
        return struct.pack(">IHBB", 6 << 28, len(body), number, 64) + ends + bytes(checked)
    head = struct.pack(">BBHHHBBH", 0x45, 0, 20 + len(body), 0, 0x4000, 64, number, 0) + ends
    return head[:10] + struct.pack(">H", _checksum(head)) + head[12:] + bytes(checked)


def _checksum(data: bytes) -> int:
    """The Internet checksum: ones' complement of the ones' complement sum of 16-bit words, which is the number that
    all words make together, modulo 65535."""
    return 0xFFFF - (int.from_bytes(data + b"\0" * (len(data) % 2), "big") % 0xFFFF or (0xFFFF if any(data) else 0))


_IDLE_SECONDS = 120.0
_MOST_FLOWS = 256
_MOST_WAITING = 32
_LARGEST = 1 << 16

Target = Callable[[Address, int], Awaitable[Address]]
"""Where a datagram to an address and port really goes; `Refused` if it may not, `Unreachable` if it cannot."""


class Datagrams:
    """The flows of one sandbox. `find` says where they lead, `name` what an address stands for, and `note` takes what
    became of each."""

    def __init__(self, find: Target, name: Callable[[Address], str], note: Callable[[Decision], None]) -> None:
        self._find = find
        self._name = name
        self._note = note
        self._flows: dict[tuple[object, ...], _Flow] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, sock: socket.socket) -> None:
        """Read what lies ready at the gateway's packet socket."""
        for _ in range(64):
            try:
                data, source = sock.recvfrom(_LARGEST)
            except OSError:
                return
            sent = read(data, source[1])
            if sent is not None:
                self._pass(sock, source, sent)

    def _pass(self, sock: socket.socket, source: Any, sent: Datagram) -> None:
        key = (sent.kind, sent.source, sent.source_port, sent.address, sent.port)
        flow = self._flows.get(key)
        if flow is None:
            while len(self._flows) >= _MOST_FLOWS:
                self._flows.pop(next(iter(self._flows))).close()
            flow = self._flows[key] = _Flow(sock, source, sent)
            self._start(self._carry(key, flow))
        flow.send(sent)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, key: tuple[object, ...], flow: _Flow) -> None:
        sent, target, allowed, reason = flow.first, None, False, ""
        try:
            target = await self._find(sent.address, sent.port)
            allowed = True
            await flow.run(target, sent.port)
        except Refused as error:
            reason = str(error)
            flow.refuse(prohibited=True)
        except PermissionError:
            reason = "this machine lets its users send no echo requests"
            flow.refuse(prohibited=True)
        except (OSError, Unreachable) as error:
            reason = (isinstance(error, OSError) and error.strerror) or str(error)
            flow.refuse(prohibited=False)
        finally:
            if self._flows.get(key) is flow:
                del self._flows[key]
            place = str(target or sent.address)
            name = self._name(sent.address)
            self._note(Decision(sent.kind, name, allowed, sent.port, reason, place, flow.sent, flow.received))

    async def close(self) -> None:
        """End all flows."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Flow:
    """The datagrams between one port inside and one place outside."""

    def __init__(self, sock: socket.socket, source: Any, first: Datagram) -> None:
        self.first = first
        self.sent = self.received = 0
        self._sock = sock
        self._back = (source[0], source[1], 0, 0, source[4])
        self._waiting: list[bytes] = []
        self._outside: socket.socket | None = None
        self._used = 0.0
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def send(self, datagram: Datagram) -> None:
        """Pass a datagram on, or keep it until it is known where to."""
        self._used = asyncio.get_running_loop().time()
        if self._outside is not None:
            self._send(self._outside, datagram.payload)
        elif len(self._waiting) < _MOST_WAITING:
            self._waiting.append(datagram.payload)

    def _send(self, outside: socket.socket, payload: bytes) -> None:
        try:
            if self.first.kind == "icmp":
                outside.send(echo_head(outside.family == socket.AF_INET6) + payload)
            else:
                outside.send(payload)
            self.sent += len(payload)
        except BlockingIOError:
            return  # as on any network, what is too much is lost
        except OSError as error:
            self._fail(error)

    async def run(self, target: Address, port: int) -> None:
        """Carry datagrams until none came for a while, or the other side refuses them."""
        loop = asyncio.get_running_loop()
        family = socket.AF_INET if target.version == 4 else socket.AF_INET6
        protocol = 0
        if self.first.kind == "icmp":
            protocol = socket.IPPROTO_ICMP if target.version == 4 else socket.IPPROTO_ICMPV6
        with socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC, protocol) as outside:
            outside.connect((str(target), port))
            self._outside = outside
            loop.add_reader(outside, self._take, outside)
            try:
                for data in self._waiting:
                    self._send(outside, data)
                while (left := self._used + _IDLE_SECONDS - loop.time()) > 0:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(asyncio.shield(self._end), left)
                        return
            finally:
                loop.remove_reader(outside)

    def _take(self, outside: socket.socket) -> None:
        for _ in range(64):
            try:
                data = outside.recv(_LARGEST)
            except BlockingIOError:
                return
            except OSError as error:
                self._fail(error)
                return
            self._used = asyncio.get_running_loop().time()
            if self.first.kind == "icmp":
                data = data[ECHO_HEAD:]
            self.received += len(data)
            if len(data) <= LARGEST:
                self._give(answer(self.first, data))

    def _give(self, packet: bytes) -> None:
        if self._sock.fileno() >= 0:
            with contextlib.suppress(OSError):
                self._sock.sendto(packet, self._back)

    def _fail(self, error: OSError) -> None:
        if not self._end.done():
            self._end.set_exception(error)

    def refuse(self, *, prohibited: bool) -> None:
        """Tell the sandbox that its datagrams do not arrive."""
        self._give(refusal(self.first, prohibited=prohibited))

    def close(self) -> None:
        if not self._end.done():
            self._end.set_result(None)


_KINDS: dict[int, Kind] = {1: "icmp", 6: "tcp", 17: "udp", 58: "icmp"}
_IPV4, _IPV6 = 0x0800, 0x86DD


@dataclass(frozen=True, slots=True)
class ConnectAttempt:
    """Where a packet wants to go."""

    kind: Kind
    address: Address
    port: int = 0


def read_attempt(data: bytes, protocol: int) -> ConnectAttempt | None:
    """The attempt that an IP packet makes; None for multicast, broadcast and what is no IP."""
    if protocol == _IPV4 and len(data) >= 20:
        address: Address = ipaddress.IPv4Address(data[16:20])
        number, at = data[9], 4 * (data[0] & 0x0F)
    elif protocol == _IPV6 and len(data) >= 40:
        address = ipaddress.IPv6Address(data[24:40])
        number, at = data[6], 40
    else:
        return None
    if address.is_multicast:
        return None
    kind = _KINDS.get(number, "ip")
    port = int.from_bytes(data[at + 2 : at + 4], "big") if kind in ("tcp", "udp") else 0
    return ConnectAttempt(kind, address, port)
