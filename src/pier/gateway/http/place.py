"""Where an address leads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class Place:
    """What a connection and a request need to know of an address."""

    secure: bool
    host: str
    port: int
    authority: str
    target: str


@lru_cache(512)
def place_of(address: str) -> Place:
    """`ValueError` if it is not an http or https address."""
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{address} is not an http or https address")
    secure = parts.scheme == "https"
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if any(character <= " " or character == "\x7f" for character in target):
        raise ValueError(f"{address} has a space in it")
    authority = parts.netloc.rpartition("@")[2]
    return Place(secure, parts.hostname, parts.port or (443 if secure else 80), authority, target)
