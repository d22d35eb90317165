"""Network policies as values: `none`, `allowlist`, `public`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pier.errors import UsageError

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
