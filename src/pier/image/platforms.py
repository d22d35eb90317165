"""Which of several platforms' images this machine runs."""

from __future__ import annotations

import platform
from typing import Any

from pier.errors import ImageError

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "armv6l": "arm", "i686": "386"}


def architecture() -> str:
    """This machine's architecture as images name it."""
    machine = platform.machine()
    return _ARCHITECTURES.get(machine, machine)


def choose_platform(descriptors: list[dict[str, Any]], where: str) -> dict[str, Any]:
    """The descriptor of a manifest list for this machine."""
    wanted = architecture()
    offered: list[str] = []
    for descriptor in descriptors:
        found = descriptor.get("platform") or {}
        if found.get("os") in ("linux", None) and found.get("architecture") in (wanted, None):
            return descriptor
        offered.append(f"{found.get('os')}/{found.get('architecture')}")
    raise ImageError(
        f"{where} has no image for linux/{wanted}, only for {', '.join(dict.fromkeys(offered))}",
        code="platform",
        blame="user",
    )
