"""Which hosts an allowlist lets through.

Harbor's grammar, and ports: a host name, `*.host` (names below it, not itself), an IPv4 or IPv6 address, or a network
in strict form (`10.0.0.0/8`), each with an optional `:port` (`[2001:db8::1]:443` for IPv6). Without a port every port
is allowed. Names are compared in lower case, without a trailing dot.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

from pier.errors import UsageError

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
