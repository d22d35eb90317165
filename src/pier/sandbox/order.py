"""A Dockerfile that is to be built, as a backend with a builder of its own is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pier.image.model import OnProgress
from pier.network.policy import NetworkPolicy


@dataclass(frozen=True, slots=True)
class BuildOrder:
    """`key` names everything that the result depends on. `network` is what RUN steps may reach; None is whatever the
    builder offers."""

    key: str
    context: Path
    dockerfile: Path | None = None
    args: Mapping[str, str] = field(default_factory=dict)
    target: str | None = None
    network: NetworkPolicy | None = None
    on_progress: OnProgress | None = field(default=None, compare=False, repr=False)

    @property
    def file(self) -> Path:
        return self.dockerfile or self.context / "Dockerfile"
