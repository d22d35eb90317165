"""What a packet tries to open, read from its headers."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from pier.network.decision import Kind
from pier.network.rules import Address

_KINDS: dict[int, Kind] = {1: "icmp", 6: "tcp", 17: "udp", 58: "icmp"}
_IPV4, _IPV6 = 0x0800, 0x86DD


@dataclass(frozen=True, slots=True)
class Attempt:
    """Where a packet wants to go."""

    kind: Kind
    address: Address
    port: int = 0


def read_attempt(data: bytes, protocol: int) -> Attempt | None:
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
    return Attempt(kind, address, port)
