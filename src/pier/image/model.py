"""An image as a value: ordered read-only layers and the settings that a container would start with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HOST = "host"
"""The reference of the built-in image that is this machine's own root, copy-on-write."""

SCRATCH = "scratch"
"""The reference of the empty image, which only a Dockerfile can start from."""

OnProgress = Callable[[str], None]
"""Told how long work goes, in lines for a person."""


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """The part of an OCI image configuration that matters to a sandbox."""

    env: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = ""
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    shell: tuple[str, ...] = ("/bin/sh", "-c")
    labels: dict[str, str] = field(default_factory=dict)
    exposed_ports: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()
    stop_signal: str = ""
    healthcheck: dict[str, Any] | None = None
    on_build: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Image:
    """What a sandbox's root is made from.

    `layers` are directories in overlay format (whiteouts as 0:0 character devices, opaque directories marked with
    `user.overlay.opaque`), lowest first, immutable and shared by all sandboxes. With `on_host` the machine's own root
    lies below them; the image `host` is that root with no layers of its own, made by each backend. Backends that have
    their own image store (Docker) use `reference` and ignore `layers`.
    """

    reference: str
    digest: str
    layers: tuple[Path, ...] = ()
    config: ImageConfig = field(default_factory=ImageConfig)
    on_host: bool = False

    @property
    def is_host(self) -> bool:
        """Whether the machine's own root lies below the layers."""
        return self.on_host or self.reference == HOST
