"""Addresses: which ones are never dialled by accident, and the synthetic ones that stand for names inside."""

from __future__ import annotations

import ipaddress
import socket
from collections import OrderedDict

from pier.network.plumbing import SYNTHETIC, SYNTHETIC6, SYNTHETIC6_LENGTH, SYNTHETIC_LENGTH
from pier.network.rules import Address

_NEVER = [
    ipaddress.ip_network(text)
    for text in (
        "0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "192.0.0.0/24", "198.18.0.0/15", "224.0.0.0/3",
        "168.63.129.16/32", "100.100.100.200/32", "::/128", "::1/128", "fe80::/10", "fec0::/10", "ff00::/8",
        "fd00:ec2::/32", "fd20:ce::254/128", "fd70:6965:72::/48",
    )
]  # fmt: skip
"""This machine, its link, groups of machines, and where clouds tell a machine who it is."""

_PRIVATE = [
    ipaddress.ip_network(text)
    for text in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7")
]  # fmt: skip

CAPACITY = 60_000
_SYNTHETIC = ipaddress.ip_network(f"{SYNTHETIC}/{SYNTHETIC_LENGTH}")
_SYNTHETIC6 = ipaddress.ip_network(f"{SYNTHETIC6}/{SYNTHETIC6_LENGTH}")
_FIRST, _FIRST6 = int(ipaddress.IPv4Address(SYNTHETIC)), int(ipaddress.IPv6Address(SYNTHETIC6))


def objection(address: Address, *, private_too: bool) -> str:
    """Why an address must not be dialled unless it was named explicitly; empty if nothing speaks against it."""
    inner = _embedded(address)
    if inner is not None:
        return objection(inner, private_too=private_too)
    if any(address in network for network in _NEVER if network.version == address.version):
        return "special address"
    if private_too and any(address in network for network in _PRIVATE if network.version == address.version):
        return "private address"
    return "address of this machine" if _is_own(address) else ""


def is_loopback(address: Address) -> bool:
    """Whether dialling an address reaches this machine's loopback, which no rule allows."""
    inner = _embedded(address) or address
    return inner.is_loopback or inner.is_unspecified or (inner.version == 4 and inner in _NEVER[0])


def _embedded(address: Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address that an IPv6 address only wraps (mapped, compatible, NAT64, 6to4, Teredo)."""
    if not isinstance(address, ipaddress.IPv6Address):
        return None
    if address.ipv4_mapped:
        return address.ipv4_mapped
    if address.sixtofour:
        return address.sixtofour
    if address.teredo:
        return address.teredo[1]
    number = int(address)
    if (number >> 32 == 0 and number > 1) or number >> 32 == 0x0064FF9B << 64:
        return ipaddress.IPv4Address(number & 0xFFFFFFFF)
    return None


def _is_own(address: Address) -> bool:
    """Only an address of this machine can be bound to."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.bind((str(address), 0))
    except OSError:
        return False
    return True


class Synthetic:
    """Addresses that stand for names: one IPv4 and one IPv6 address for each, kept while they are in use."""

    def __init__(self) -> None:
        self._numbers: OrderedDict[str, int] = OrderedDict()
        self._names: dict[int, str] = {}
        self._next = 1

    def addresses(self, name: str) -> tuple[ipaddress.IPv4Address, ipaddress.IPv6Address]:
        """The two addresses of a name, which are made up when it is first asked for."""
        number = self._numbers.get(name)
        if number is None:
            number = self._take()
            self._numbers[name], self._names[number] = number, name
        self._numbers.move_to_end(name)
        return ipaddress.IPv4Address(_FIRST + number), ipaddress.IPv6Address(_FIRST6 + number)

    def _take(self) -> int:
        if len(self._numbers) >= CAPACITY:
            _, number = self._numbers.popitem(last=False)
            del self._names[number]
            return number
        self._next += 1
        return self._next

    @staticmethod
    def holds(address: Address) -> bool:
        """Whether an address is of the kind that stands for names, in use or not."""
        return address in (_SYNTHETIC if address.version == 4 else _SYNTHETIC6)

    def name(self, address: Address) -> str | None:
        """The name that an address stands for, if it is a synthetic one in use."""
        first = _FIRST if address.version == 4 else _FIRST6
        return self._names.get(int(address) - first)
