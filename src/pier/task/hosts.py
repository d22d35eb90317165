"""Hosts in a network allowlist: the grammar that `allowed_hosts` and the extra hosts of a run share."""

from __future__ import annotations

import re
from ipaddress import ip_address, ip_network

_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")


def normalise_host(text: str) -> str:
    """A host name, `*.host`, IP address or CIDR range in its one spelling; a ValueError says what is wrong."""
    host = text.strip().lower().rstrip(".")
    if not host:
        raise ValueError("an allowed host may not be empty")
    if "/" in host or ":" in host:
        return _normalise_address(text, host)
    name = host[2:] if host.startswith("*.") else host
    if "*" in name:
        raise ValueError(f"{text!r}: a wildcard is only possible as the first label, as in *.example.org")
    if name != host and _is_address(name):
        raise ValueError(f"{text!r}: a wildcard needs a host name, not an address")
    if not all(_LABEL.fullmatch(label) for label in name.split(".")):
        raise ValueError(
            f"invalid host {text!r}: expected a name, an address or a CIDR range, without scheme, port or path"
        )
    return host


def _normalise_address(text: str, host: str) -> str:
    try:
        if "%" in host:
            raise ValueError
        return ip_network(host).compressed if "/" in host else ip_address(host).compressed
    except ValueError:
        raise ValueError(
            f"invalid host {text!r}: expected a name, an address or a CIDR range, without scheme, port or path"
        ) from None


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
