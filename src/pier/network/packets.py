"""Datagrams and echo requests as packets of IPv4 and IPv6: read what a sandbox sent, write what it gets back."""

from __future__ import annotations

import ipaddress
import struct
from dataclasses import dataclass
from typing import Literal

from pier.network.rules import Address

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
    """The packet that tells that `to` may not pass, or that nobody listens there."""
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
