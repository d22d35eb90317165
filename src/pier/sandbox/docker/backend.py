"""The Docker backend: containers without a network of the engine's, each entered by pier from the engine's own host.

pier joins a container's namespaces instead of asking the engine to run each command, which is forty times faster, kills
whole process trees and needs no program inside the image. As root on the engine's host it does so itself; else a helper
container there does it for pier (`pier.sandbox.docker.helper`). `examine` is the part of `pier doctor` about Docker.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import fields, replace
from typing import Any, Literal

import aiodocker
from aiodocker.exceptions import DockerError

from pier.errors import PierError, PolicyError, SandboxError, UsageError
from pier.image.engine_address import shown
from pier.image.importing import engine_address
from pier.image.model import Image, ImageConfig, OnProgress
from pier.lease import Held, Lease, close_all, close_in_turn
from pier.network.policy import Rules
from pier.sandbox import arguments
from pier.sandbox.contract import Backend, BuildOrder, Capabilities, Change, Finding, Limits, Sandbox, SandboxSpec
from pier.sandbox.docker.building import build_there
from pier.sandbox.docker.client import SPACE_HINT, connect, engine_error
from pier.sandbox.docker.container import CONTAINER_ENDED
from pier.sandbox.docker.engine import Engine, attendant_plan, container_config
from pier.sandbox.docker.entering import ENGINE_ELSEWHERE
from pier.sandbox.docker.images import REPOSITORY
from pier.sandbox.docker.runtime import HELPER, remove_idle
from pier.sandbox.docker.sandbox import IMAGE_MISSING, KIND, LABEL, ContainerBox, DockerSandbox, remove
from pier.sandbox.docker.services import start_services
from pier.sandbox.docker.volumes import VOLUME, TrialVolumes, remove_volume
from pier.sandbox.linux.sandbox import LinuxSandbox
from pier.sandbox.linux.zygotes import NO_SANDBOXES

_LITTLE = 1e9
"""Bytes of space below which images and containers are about to fail."""


async def examine(engine: Engine, start: Callable[[SandboxSpec], Awaitable[Sandbox]]) -> list[Finding]:
    """Look at the engine, and enter a container of pier's own there: `start` makes one."""
    version = engine.version
    name = version.get("Platform", {}).get("Name") or "Docker"
    report = f"{name} {version.get('Version', '?')} at {shown(engine.address)}, API {version.get('ApiVersion', '?')}"
    found = [Finding("Docker engine", True, report), await _examine_entrance(engine, start)]
    return [*found, *(await _examine_disk(engine) if found[-1].ok else ())]


async def _examine_disk(engine: Engine) -> list[Finding]:
    """How much space the engine has, if its disk is this machine's."""
    root = await engine.data_directory()
    try:
        space = os.statvfs(root) if root and await engine.shares_disk() else None
    except OSError:
        space = None
    if space is None:
        return []
    free, total = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
    report = f"{free / 1e9:.1f} GB free of {total / 1e9:.1f} GB at {root}"
    if free >= _LITTLE:
        return [Finding("engine's disk", True, report)]
    return [Finding("engine's disk", False, report, SPACE_HINT)]


async def _examine_entrance(engine: Engine, start: Callable[[SandboxSpec], Awaitable[Sandbox]]) -> Finding:
    try:
        async with engine.idle_image() as name, await start(SandboxSpec(Image(name, "", (), ImageConfig()))):
            pass
        if not engine.through_helper:
            return Finding("containers", True, "entered by pier itself, as root on the engine's host")
        helper = await engine.helper()
    except PierError as error:
        return Finding("containers", False, error.message, error.hint or "")
    except DockerError as error:
        return Finding("containers", False, engine_error(error).message)
    modes = ", ".join(sorted(helper.networks))
    disk = "the engine sees this machine's files" if helper.shares_disk else "mounts are copied into volumes"
    return Finding("containers", True, f"entered by a helper container; networks: {modes}; {disk}")


SNAPSHOT = "engine-image"
_NOT_HERE = (ENGINE_ELSEWHERE, CONTAINER_ENDED, NO_SANDBOXES)
"""Why the first container of an engine cannot be entered, if pier is root but not on the engine's host, or not allowed
to do there what root usually may, as in a container that has the engine's socket."""
_BUILDERS: dict[str, Literal["pier", "own", "either"]] = {"": "either", "pier": "pier", "engine": "own"}


class DockerBackend(Backend):
    """Sandboxes that are containers of the engine that `pier.image.engine_address` finds."""

    name = "docker"
    options = ("host", "context", "builder")

    def __init__(self, lease: Lease, *, host: str = "", context: str = "", builder: str = "") -> None:
        if builder not in _BUILDERS:
            raise UsageError(f"invalid value {builder!r} for --ek builder: expected pier or engine")
        self.builder = _BUILDERS[builder]
        self._lease = lease
        self._where = (str(host), str(context))
        self._opened: Engine | None = None
        self._sandboxes: set[DockerSandbox] = set()
        self._opening = asyncio.Lock()

    @property
    def lease(self) -> Lease:
        return self._lease

    @property
    def kinds(self) -> frozenset[str]:
        return frozenset({KIND, SNAPSHOT, VOLUME, HELPER})

    async def capabilities(self) -> Capabilities:
        engine = await self._engine()
        return Capabilities(
            networks=await engine.networks(),
            switch_network=True,
            limits=await engine.limits(),
            snapshot=True,
            compose=True,
            isolates_verifier=True,
            bind_mounts=await engine.shares_disk(),
        )

    async def has_gpus(self) -> bool:
        return await (await self._engine()).has_gpus()

    async def _engine(self) -> Engine:
        async with self._opening:
            if self._opened is None:
                self._opened = await Engine.open(engine_address(*self._where), self._lease)
            return self._opened

    async def start(self, spec: SandboxSpec) -> Sandbox:
        return await self.start_container(spec) if spec.compose is None else await start_services(self, spec)

    async def reopen(self, id: str, spec: SandboxSpec) -> DockerSandbox:
        """The dead sandbox's container, started again as it was."""
        engine = await self._engine()
        box = ContainerBox(self._lease, await engine.entrance(), engine.docker, engine.address, reopened=id)
        try:
            await box.start({}, attendant_plan(spec))
        except SandboxError as error:
            await asyncio.shield(box.stop())
            if isinstance(error.__cause__, DockerError) and error.__cause__.status == 404:
                raise SandboxError(
                    f"the container {box.name} is gone", code="cannot_reopen", retryable=False
                ) from error
            raise
        except BaseException:
            await asyncio.shield(box.stop())
            raise
        sandbox = DockerSandbox(spec, box, self)
        self._sandboxes.add(sandbox)
        await sandbox.begin()
        return sandbox

    async def start_container(
        self, spec: SandboxSpec, more: Mapping[str, Any] | None = None, kind: type[DockerSandbox] = DockerSandbox
    ) -> DockerSandbox:
        """Start one container; `more` replaces parts of what the engine is told of its host side, and adds `Binds`."""
        arguments.check_spec(spec)
        offered = await self.capabilities()
        if spec.network.mode not in offered.networks:
            raise PolicyError(
                f"the Docker backend cannot enforce the network policy {spec.network.mode!r} here",
                hint="use --env local",
            )
        Rules(spec.network.hosts)
        if spec.gpus and not await self.has_gpus():
            raise SandboxError(
                "the Docker engine hands out no GPUs: it has no driver for them",
                code="no_gpu",
                blame="user",
                retryable=False,
                hint="install the NVIDIA container toolkit on the engine's host and start the engine again; "
                "docker run --gpus 1 shows whether it works",
            )
        asked = (each.name for each in fields(spec.limits) if getattr(spec.limits, each.name) is not None)
        for name in (name for name in asked if name not in offered.limits):
            raise SandboxError(
                f"the Docker backend cannot limit {name} here: the engine's host has no control group for it",
                code="no_limit",
                blame="user",
                retryable=False,
                hint="leave the limit out, or use --env local",
            )
        engine = await self._engine()
        try:
            sandbox = await self._start_container(engine, spec, more or {}, kind)
        except SandboxError as error:
            if error.code not in _NOT_HERE or engine.was_entered or engine.through_helper:
                raise
            engine.through_helper = True
            sandbox = await self._start_container(engine, spec, more or {}, kind)
        engine.was_entered = True
        return sandbox

    async def _start_container(
        self, engine: Engine, spec: SandboxSpec, more: Mapping[str, Any], kind: type[DockerSandbox]
    ) -> DockerSandbox:
        placing = await engine.place(spec.mounts, spec.on_progress)
        box = ContainerBox(self._lease, await engine.entrance(), engine.docker, engine.address)
        has_quota = spec.limits.disk is not None and await engine.has_quotas()
        try:
            labels = {LABEL: self._lease.owner}
            async with engine.images.held(spec.image, spec.on_progress) as image:
                if has_quota and spec.limits.disk is not None:
                    own = await engine.images.size(image) if await engine.disk_counts_image() else 0
                    more = {"StorageOpt": {"size": str(spec.limits.disk + own)}, **more}
                config = container_config(spec, image, placing, labels, more)
                try:
                    await box.start(config, attendant_plan(spec), spec.keep)
                except SandboxError as error:
                    if error.code != IMAGE_MISSING:
                        raise
                    await engine.images.ensure(spec.image, spec.on_progress)
                    await box.start(config, attendant_plan(spec), spec.keep)
        except DockerError as error:
            await asyncio.shield(box.stop())
            raise engine_error(error) from error
        except BaseException:
            await asyncio.shield(box.stop())
            raise
        sandbox = kind(spec, box, self)
        if has_quota:
            sandbox.free_disk = engine.free_disk
        if spec.limits.disk is not None and (box.volumes or not has_quota):
            box.watch_disk(spec.limits.disk)
        self._sandboxes.add(sandbox)
        await sandbox.begin()
        if engine.is_podman:
            # It says nowhere who resolves names, where it gives no network.
            names = "".join(f"nameserver {address}\n" for address in config["HostConfig"]["Dns"])
            await sandbox.write_file("/etc/resolv.conf", names.encode())
        return sandbox

    async def volumes(self, image: Image) -> TrialVolumes:
        """The volumes of one trial, none so far."""
        engine = await self._engine()
        return TrialVolumes(engine.docker, self._lease, await engine.images.ensure(image))

    async def share(self) -> Limits:
        """Half of the memory of the engine's host, and of the disk that is free there as far as that is known."""
        engine, share = await self._engine(), await super().share()
        can = "memory" in await engine.limits()
        memory, disk = await engine.memory() if can else 0, await engine.free_disk() or 0
        return replace(share, memory=memory // 2 or None, disk=disk // 2 or None)

    async def memory(self) -> int:
        """How many bytes of memory the engine's host has."""
        return await (await self._engine()).memory()

    async def find_image(self, reference: str) -> Image | None:
        engine = await self._engine()
        try:
            return await engine.images.find(reference)
        except DockerError as error:
            raise engine_error(error) from error

    async def pull_image(self, reference: str, on_progress: OnProgress | None = None) -> Image | None:
        engine = await self._engine()
        try:
            return await engine.images.pull(reference, on_progress)
        except DockerError as error:
            raise engine_error(error) from error

    async def build_image(self, order: BuildOrder) -> Image:
        engine = await self._engine()
        try:
            return await build_there(engine.docker, engine.images, order)
        except DockerError as error:
            raise engine_error(error) from error

    async def snapshot(self, sandbox: LinuxSandbox[ContainerBox]) -> Image:
        """Commit the container as an image of the engine's; the container goes on."""
        await sandbox.kill_all()
        engine = await self._engine()
        id = secrets.token_hex(6)
        reference = f"{REPOSITORY}/snapshot-{id}"
        self._lease.write(SNAPSHOT, id, {"engine": engine.address, "name": reference})
        try:
            container = engine.docker.containers.container(f"pier-{sandbox.id}")
            made = await container.commit(repository=reference, pause=False, config={})
        except DockerError as error:
            self._lease.strike(SNAPSHOT, id)
            raise engine_error(error) from error
        return Image(reference, made["Id"], (), sandbox.spec.image.config)

    async def remove_snapshot(self, image: Image) -> None:
        engine = await self._engine()
        await _remove_image(engine.docker, image.reference)
        self._lease.strike(SNAPSHOT, image.reference.rpartition("-")[2])

    async def changes(self, sandbox: LinuxSandbox[ContainerBox]) -> list[Change]:
        return await sandbox.box.changes()

    async def end(self, sandbox: LinuxSandbox[ContainerBox]) -> None:
        assert isinstance(sandbox, DockerSandbox)
        self._sandboxes.discard(sandbox)
        await sandbox.box.stop()

    async def doctor(self) -> list[Finding]:
        try:
            engine = await self._engine()
        except PierError as error:
            return [Finding("Docker engine", False, error.message, error.hint or "")]
        return await examine(engine, self.start)

    async def destroy(self, held: Held) -> None:
        ends = {SNAPSHOT: _remove_image, VOLUME: remove_volume, HELPER: remove_idle}
        docker, _ = await connect(held.data.get("engine") or engine_address(*self._where))
        try:
            await ends.get(held.kind, remove)(docker, held.data["name"])
        finally:
            await docker.close()

    async def close(self) -> None:
        """All sandboxes are stopped, also when one of them fails to; what failed is raised in the end."""
        stops = [sandbox.stop() for sandbox in self._sandboxes]
        self._sandboxes.clear()
        await close_in_turn(lambda: close_all(stops), self._close_engine)

    async def _close_engine(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            await opened.close()


async def _remove_image(docker: aiodocker.Docker, name: str) -> None:
    try:
        await docker.images.delete(name, force=True)
    except DockerError as error:
        if error.status != 404:
            raise engine_error(error) from error
