"""Runs the RUN steps of Dockerfiles in sandboxes: what a step wrote becomes the layer of its instruction."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from pier.errors import SandboxError
from pier.image import owner
from pier.image.model import host_image
from pier.image.stage import BuildStep, OnOutput
from pier.lease import Lease
from pier.sandbox import open_backend
from pier.sandbox.contract import Backend, Mount, SandboxSpec, Stream
from pier.sandbox.linux.zygotes import NO_SANDBOXES
from pier.sandbox.local.backend import NO_PLACE


class SandboxRunner:
    """A `StepRunner` on a backend that can snapshot."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    async def run(self, step: BuildStep, layer: Path, on_output: OnOutput) -> int:
        """See `pier.image.stage.StepRunner`."""
        spec = SandboxSpec(
            image=step.image,
            network=step.network,
            limits=await self.backend.share(),
            mounts=tuple(Mount(each.target, each.source, each.read_only, each.size) for each in step.mounts),
            name="build",
        )

        def pass_on(_: Stream, data: bytes) -> None:
            on_output(data)

        async with await self.backend.start(spec) as sandbox:
            result = await sandbox.exec(
                list(step.command),
                cwd=step.workdir,
                env=dict(step.env),
                user=step.user or None,
                on_output=pass_on,
            )
            if result.exit_code != 0:
                return result.exit_code
            snapshot = await sandbox.snapshot()
        try:
            if len(snapshot.layers) <= len(step.image.layers):
                raise SandboxError("the snapshot of a build step has no new layer", retryable=False)
            await owner.run(
                "adopt_layer",
                source=str(snapshot.layers[-1]),
                target=str(layer),
                below=(["/"] if step.image.is_host else []) + [str(each) for each in step.image.layers],
                stubs=[each.target for each in step.mounts],
            )
        finally:
            await self.backend.remove_snapshot(snapshot)
        return 0


async def can_run(backend: Backend) -> bool:
    """Whether sandboxes can be had here at all; what else may be wrong is for the build to tell."""
    try:
        async with await backend.start(SandboxSpec(host_image(), name="build")):
            return True
    except SandboxError as error:
        return error.code not in (NO_SANDBOXES, NO_PLACE)


@contextlib.asynccontextmanager
async def open_runner(backend: str = "local") -> AsyncIterator[SandboxRunner]:
    """A runner on a backend of its own, for one build."""
    with Lease(label="build") as lease:
        async with open_backend(backend, lease) as opened:
            yield SandboxRunner(opened)
