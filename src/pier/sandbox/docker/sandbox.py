"""A running container as a sandbox: everything but its start and end is as in a local sandbox."""

from __future__ import annotations

from typing import Any, cast

from pier.sandbox.contract import SandboxSpec
from pier.sandbox.docker.box import ContainerBox
from pier.sandbox.local.sandbox import Home, LocalSandbox


class DockerSandbox(LocalSandbox):
    """A container that pier entered."""

    box: ContainerBox

    def __init__(self, spec: SandboxSpec, box: ContainerBox, home: Home) -> None:
        super().__init__(spec, cast(Any, box), home)
