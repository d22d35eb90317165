"""What a Dockerfile's RUN needs from whoever can run commands: a seam, since sandboxes are built on images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from pier.image.model import Image
from pier.network.policy import PUBLIC, NetworkPolicy

OnOutput = Callable[[bytes], None]


@dataclass(frozen=True, slots=True)
class StepMount:
    """`RUN --mount`: a host directory (`source`) or a tmpfs that is there for one command and in no layer."""

    target: str
    source: Path | None = None
    read_only: bool = True
    size: int | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """A command to run on top of `image`, with all of its environment."""

    image: Image
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    user: str = ""
    workdir: str = "/"
    network: NetworkPolicy = PUBLIC
    mounts: tuple[StepMount, ...] = ()


class StepRunner(Protocol):
    """Runs the commands of a build."""

    async def run(self, step: Step, layer: Path, on_output: OnOutput) -> int:
        """Run `step` and give its exit code. If that is 0, what the command wrote is afterwards in the directory
        `layer` in overlay format, with owners as in the store; `layer` exists and is empty before."""
        ...
