"""One sandbox from start to end: finds or builds its image, opens a backend and starts it.

`pier.sandbox(...)` is `open_sandbox`, and `pier sandbox run` uses the same. `open_runner` runs the RUN steps of
Dockerfiles in sandboxes: what a step wrote becomes the layer of its instruction.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pier.errors import ArgumentError, ImageError, SandboxError, UsageError
from pier.image.model import HOST, Image, OnProgress, host_image, parse
from pier.lease import Lease, sweep
from pier.network.policy import PUBLIC, NetworkMode, NetworkPolicy
from pier.sandbox import open_backend
from pier.sandbox.contract import Backend, Limits, Mount, Sandbox, SandboxSpec, Stream
from pier.sandbox.host import refuse_hidden

if TYPE_CHECKING:
    from pier.image.build import BuildStep, OnOutput
    from pier.image.store import ImageStore


@asynccontextmanager
async def open_sandbox(
    image: str | Path | Image = HOST,
    *,
    backend: str = "local",
    options: Mapping[str, str] | None = None,
    workdir: str | None = None,
    user: str | None = None,
    env: Mapping[str, str] | None = None,
    network: NetworkMode | NetworkPolicy = "none",
    allow: Sequence[str] = (),
    limits: Limits | None = None,
    mounts: Sequence[Mount] = (),
    name: str = "",
    hostname: str = "pier",
    no_new_privileges: bool = False,
    on_progress: OnProgress | None = None,
) -> AsyncIterator[Sandbox]:
    """Start a sandbox, and remove it at the end of the block.

    `image` is a reference such as `host` or `python:3.12`, or the `Path` of a directory with a Dockerfile. `backend` is
    `local`, `docker` or `module:Class`, and `options` are what it takes by name. A `workdir` that is missing is made.
    Commands and calls about files act as `user` (a name or `uid[:gid]`), else as the image's. `allow` lists the hosts
    that it may reach, and only those. `limits` go before the default ones; 0 lifts one. `on_progress` receives a line
    now and then while an image is pulled or built.
    """
    policy = _policy(network, allow)
    if not isinstance(limits, Limits | None):
        raise ArgumentError(f"invalid value {limits!r} for limits: expected pier.Limits")
    if wrong := [mount for mount in mounts if not isinstance(mount, Mount)]:
        raise ArgumentError(f"invalid value {wrong[0]!r} in mounts: expected pier.Mount")
    refuse_hidden(mounts)
    with Lease(label="sandbox") as lease:
        async with open_backend(backend, lease, options) as opened:
            await sweep(dict.fromkeys(opened.kinds, opened.destroy))
            found = await find_image(image, opened, on_progress) if not isinstance(image, Image) else image
            who = user or found.config.user or "0:0"
            spec = SandboxSpec(
                image=found,
                network=policy,
                limits=(limits or Limits()).over(await opened.share()),
                mounts=tuple(mounts),
                env=dict(env or {}),
                user=user,
                workdir=workdir,
                files_as=who,
                name=name,
                hostname=hostname,
                no_new_privileges=no_new_privileges,
                on_progress=on_progress,
            )
            async with await _start(opened, spec) as sandbox:
                yield sandbox


def _policy(network: NetworkMode | NetworkPolicy, allow: Sequence[str]) -> NetworkPolicy:
    if not isinstance(network, NetworkPolicy) and network not in ("none", "public", "allowlist"):
        raise ArgumentError(f"invalid value {network!r} for network: expected none, public or a NetworkPolicy")
    if not allow:
        return network if isinstance(network, NetworkPolicy) else NetworkPolicy(network)
    if network not in ("none", "allowlist"):
        raise UsageError(f"invalid network {network!r} with a list of allowed hosts: leave the network out")
    return NetworkPolicy("allowlist", tuple(allow))


async def _start(backend: Backend, spec: SandboxSpec) -> Sandbox:
    """Start it, and make sure that its user exists."""
    try:
        sandbox = await backend.start(spec)
        try:
            await sandbox.stat("/")
        except BaseException:
            await asyncio.shield(sandbox.stop())
            raise
    except SandboxError as error:
        if error.code not in ("no_such_user", "single_id"):
            raise
        hint = _user_hint(error.code, spec)
        raise SandboxError(error.message, code=error.code, blame="user", retryable=False, hint=hint) from error
    return sandbox


def _user_hint(code: str, spec: SandboxSpec) -> str:
    if code == "single_id":
        return "`pier doctor` shows how to get more user ids; or leave the user out"
    number = "or give a number such as 1000, which needs no entry"
    if spec.image.is_host:
        return f"`useradd {spec.user}` on this machine, whose users the image `host` has; {number}"
    return f"`pier sandbox run --image {spec.image.reference} -u 0 cat /etc/passwd` lists the users; {number}"


async def find_image(image: str | Path, backend: Backend, on_progress: OnProgress | None = None) -> Image:
    """The image that a user names: built from a directory, or looked up as `resolve_image` does."""
    if image == HOST:
        return host_image()
    from pier.image.store import ImageStore

    if not isinstance(image, Path):
        return await resolve_image(image, backend, ImageStore(), on_progress)
    from pier.image.build import build_image

    async with open_runner() as runner:
        return await build_image(ImageStore(), image, runner=runner, network=PUBLIC, on_progress=on_progress)


async def resolve_image(
    reference: str,
    backend: Backend,
    store: ImageStore,
    on_progress: OnProgress | None = None,
    *,
    for_task: bool = False,
) -> Image:
    """An image by its name: one that the backend or pier's store has, else pulled by the backend, else by pier. If
    neither can, the error has both reasons. With `for_task` a task named it, not the user: an engine follows a registry
    to any host, so it then pulls only from registries that the user has logged in to."""
    found = await backend.find_image(reference) or store.find(reference)
    if found is not None:
        return found
    from pier.image.registry import find_credentials  # loads the HTTP client

    refused: ImageError | None = None
    if not for_task or await find_credentials(parse(reference).registry) is not None:
        try:
            if (found := await backend.pull_image(reference, on_progress)) is not None:
                return found
        except ImageError as error:
            if error.code == "disk_full":
                raise
            refused = error
    try:
        return await store.resolve(reference, on_progress=on_progress, for_task=for_task)
    except ImageError as error:
        if refused is None:
            if error.code == "unreachable" and backend.name != "local":
                error.hint = f"pier image pull --env {backend.name} {reference}, if you trust its registry"
            raise
        hint = refused.hint if error.code in ("not_found", "refused") else error.hint
        message = f"{error.message}\n  - {refused.message}"
        if error.code == "refused":
            # The backend reached the registry and pier may not: what the backend was answered counts.
            message, error = f"{refused.message}\n  - registry: {error.message}", refused
        raise ImageError(message, code=error.code, blame=error.blame, retryable=error.retryable, hint=hint) from error


class SandboxRunner:
    """A `StepRunner` on a backend that can snapshot."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    async def run(self, step: BuildStep, layer: Path, on_output: OnOutput) -> int:
        """See `pier.image.build.StepRunner`."""
        from pier.image import owner

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
    """Whether sandboxes can be had here at all; what else may be wrong is for the build to report."""
    from pier.sandbox.linux.zygotes import NO_SANDBOXES
    from pier.sandbox.local.backend import NO_PLACE

    try:
        async with await backend.start(SandboxSpec(host_image(), name="build")):
            return True
    except SandboxError as error:
        return error.code not in (NO_SANDBOXES, NO_PLACE)


@asynccontextmanager
async def open_runner(backend: str = "local") -> AsyncIterator[SandboxRunner]:
    """A runner on a new backend, for one build."""
    with Lease(label="build") as lease:
        async with open_backend(backend, lease) as opened:
            yield SandboxRunner(opened)
