"""Reads the descriptors of manifests: their digests, and which of several platforms' images this machine runs."""

from __future__ import annotations

import platform
from typing import Any

from pier.errors import ImageError
from pier.image.reference import is_digest

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "armv6l": "arm", "i686": "386"}


def architecture() -> str:
    """This machine's architecture as images name it."""
    machine = platform.machine()
    return _ARCHITECTURES.get(machine, machine)


def choose_platform(descriptors: list[dict[str, Any]], where: str) -> dict[str, Any]:
    """The descriptor of a manifest list for this machine."""
    wanted = architecture()
    offered: list[str] = []
    for descriptor in descriptors if isinstance(descriptors, list) else []:
        digest_of(descriptor)
        found = descriptor.get("platform") or {}
        if found.get("os") in ("linux", None) and found.get("architecture") in (wanted, None):
            return descriptor
        offered.append(f"{found.get('os')}/{found.get('architecture')}")
    raise ImageError(
        f"{where} has no image for linux/{wanted}, only for {', '.join(dict.fromkeys(offered))}",
        code="platform",
        blame="user",
    )


def digest_of(descriptor: Any) -> str:
    """The digest in a descriptor. It becomes part of paths and addresses, so it is checked to be one."""
    digest = descriptor.get("digest") if isinstance(descriptor, dict) else None
    if not isinstance(digest, str) or not is_digest(digest):
        raise ImageError(f"a manifest has {digest!r} where a sha256 digest should be", code="manifest")
    return digest
