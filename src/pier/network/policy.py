"""Network policies: their values, the grammar of an allowlist, and the decisions taken under one.

A rule is Harbor's, with ports: a host name, `*.host` (names below it, not itself), an IPv4 or IPv6 address, or a
network in strict form (`10.0.0.0/8`), each with an optional `:port` (`[2001:db8::1]:443` for IPv6). Without a port
every port is allowed. Names are compared in lower case, without a trailing dot. A decision is a line of a trial's
`network.jsonl`.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from pier.errors import UsageError
from pier.network.plumbing import SYNTHETIC, SYNTHETIC6, SYNTHETIC6_LENGTH, SYNTHETIC_LENGTH

NetworkMode = Literal["none", "allowlist", "public"]


@dataclass(frozen=True, slots=True)
class NetworkPolicy:
    """What a sandbox may reach. `hosts` are rules such as `example.org`, `*.example.org` or `example.org:8443`."""

    mode: NetworkMode = "none"
    hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.hosts and self.mode != "allowlist":
            raise UsageError(f"hosts are given, but the network mode is {self.mode!r}", hint="use the mode allowlist")


NONE = NetworkPolicy("none")
PUBLIC = NetworkPolicy("public")


Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_INSIDE = [
    ipaddress.ip_network(text)
    for text in (
        "0.0.0.0/8", "127.0.0.0/8", "192.0.0.0/24", "198.18.0.0/15", "::/128", "::1/128", "::ffff:127.0.0.0/104",
        "fd70:6965:72::/48",
    )
]  # fmt: skip
"""Addresses that mean the sandbox itself: its loopback, and those of the link to pier."""

_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of an allowlist: a name, or a name with all below it left out (`below`), or a network."""

    name: str = ""
    below: bool = False
    network: Network | None = None
    port: int | None = None

    def allows_name(self, name: str, port: int | None) -> bool:
        """Whether a name may be reached at a port; None asks whether it may be looked up."""
        if not self.name or (port is not None and self.port not in (None, port)):
            return False
        return name.endswith("." + self.name) if self.below else name == self.name

    def allows_address(self, address: Address, port: int | None) -> bool:
        if self.network is None or (port is not None and self.port not in (None, port)):
            return False
        return address.version == self.network.version and address in self.network


def parse(text: str) -> Rule:
    """Read one rule; `UsageError` says what is wrong with it."""
    host, port = _split_port(text.strip())
    if "*" not in host and (network := _network(host, text)) is not None:
        _check_outside(network, text)
        return Rule(network=network, port=port)
    below = host.startswith("*.")
    name = normal_name(host[2:] if below else host)
    if name is None or (below and "." not in name):
        raise _bad(text, "is not a host name, *.host, an address or a network")
    return Rule(name=name, below=below, port=port)


def normal_name(text: str) -> str | None:
    """A host name as it is compared: lower case, ASCII, no trailing dot. None if it is none."""
    name = text.removesuffix(".").lower()
    if not name.isascii():
        try:
            name = name.encode("idna").decode()
        except UnicodeError:
            return None
    if not 1 <= len(name) <= 253 or not all(_LABEL.fullmatch(label) for label in name.split(".")):
        return None
    return name


def _split_port(text: str) -> tuple[str, int | None]:
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise _bad(text, "has a bracket without its twin")
        return host, _port(rest[1:], text) if rest else None
    if text.count(":") != 1:
        return text, None
    host, _, port = text.partition(":")
    return host, _port(port, text)


def _port(digits: str, text: str) -> int:
    if not digits.isdecimal() or not 1 <= int(digits) <= 65535:
        raise _bad(text, "has no port from 1 to 65535 after its colon")
    return int(digits)


def _network(host: str, text: str) -> Network | None:
    try:
        return ipaddress.ip_network(host, strict=True)
    except ValueError:
        pass
    try:
        ipaddress.ip_network(host, strict=False)
    except ValueError:
        if "/" in host or re.fullmatch(r"[0-9.]+", host):
            raise _bad(text, "is neither an address nor a network") from None
        return None
    raise _bad(text, "has host bits set; write the network's first address")


def _check_outside(network: Network, text: str) -> None:
    if any(network.network_address in inside and network.prefixlen >= inside.prefixlen for inside in _INSIDE):
        why = "is an address inside the sandbox, which needs no rule and never leads out of it"
        hint = "let a service of this machine listen on another of its addresses, and allow that: 192.168.1.10:8080"
        raise _bad(text, why, hint)


def _bad(text: str, why: str, hint: str = "") -> UsageError:
    hint = hint or "write a host such as example.org, *.example.org, example.org:8443, 192.0.2.7 or 10.0.0.0/8"
    return UsageError(f"the allowed host {text!r} {why}", code="bad_host_rule", hint=hint)


class Rules:
    """All rules of a policy. An empty set allows nothing."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._rules = [parse(text) for text in texts]

    def allows_name(self, name: str, port: int | None) -> bool:
        return any(rule.allows_name(name, port) for rule in self._rules)

    def allows_address(self, address: Address, port: int | None) -> bool:
        return any(rule.allows_address(address, port) for rule in self._rules)

    @property
    def networks(self) -> list[Network]:
        """The networks that are named explicitly."""
        return [rule.network for rule in self._rules if rule.network is not None]


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


Kind = Literal["dns", "tcp", "udp", "icmp", "ip", "probe"]


@dataclass(frozen=True, slots=True)
class Decision:
    """One attempt. `name` is what was asked for, a host name or an address; `sent` and `received` are bytes."""

    kind: Kind
    name: str
    allowed: bool
    port: int = 0
    reason: str = ""
    address: str = ""
    sent: int = 0
    received: int = 0
    service: str = ""
    """Which service of the trial tried, in a task of several; empty for the one that the agent works in."""
    count: int = 1
    """How many attempts this is about."""
    outage: bool = False
    """It was allowed, and nothing answered there; never a failure that the client can cause."""
    time: float = field(default_factory=time.time)

    def line(self) -> dict[str, Any]:
        """The decision as it is written down: without what is empty."""
        usual = {"count": 1}
        rows = ((each.name, getattr(self, each.name)) for each in fields(self))
        return {name: value for name, value in rows if value not in ("", 0, usual.get(name)) or name == "allowed"}


OnDecision = Callable[[Decision], None]
LIMIT = 100_000
"""The limit on the decisions that are logged for one sandbox."""


class DecisionLog:
    """Passes decisions on and adds them up."""

    def __init__(self, on_decision: OnDecision | None = None) -> None:
        self._on_decision = on_decision
        self._count = 0
        self.muted = False
        self.allowed = 0
        self.refused: Counter[str] = Counter()

    def note(self, decision: Decision) -> None:
        if self.muted:
            return
        self._count += 1
        if decision.allowed:
            self.allowed += 1
        elif len(self.refused) < LIMIT:
            port = f":{decision.port}" if decision.port else ""
            self.refused[f"{decision.kind} {decision.name}{port}"] += decision.count
        if self._on_decision is not None and self._count <= LIMIT:
            self._on_decision(decision)
