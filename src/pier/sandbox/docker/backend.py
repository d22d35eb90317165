"""The Docker backend: containers without a network of the engine's, each entered by pier from the engine's own host.

pier must be root on the machine of the engine: it joins a container's namespaces instead of asking the engine to run
each command, which is forty times faster, kills whole process trees and needs no program inside the image.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiodocker
import aiohttp
from aiodocker.exceptions import DockerError

from pier.errors import PolicyError, SandboxError
from pier.home import pier_home
from pier.idmap import IdMap
from pier.image.engine import engine_address
from pier.image.model import Image
from pier.lease import Held, Lease
from pier.network.plumbing import GATEWAY
from pier.network.rules import Rules
from pier.sandbox import seccomp
from pier.sandbox.contract import Backend, Capabilities, Change, Finding, Mount, Sandbox, SandboxSpec
from pier.sandbox.docker import idle
from pier.sandbox.docker.box import KIND, LABEL, ContainerBox, engine_error, remove
from pier.sandbox.docker.compose.services import start_services
from pier.sandbox.docker.compose.volumes import VOLUME, TrialVolumes, remove_volume
from pier.sandbox.docker.images import REPOSITORY, EngineImages
from pier.sandbox.docker.sandbox import DockerSandbox
from pier.sandbox.local.network import offered_modes
from pier.sandbox.local.sandbox import LocalSandbox
from pier.sandbox.local.zygotes import Zygotes

SNAPSHOT = "engine-image"
_IDLE = "/.pier-idle"
_IPV6 = "/proc/sys/net/ipv6"
_OWN_PROCESSES = 4
"""The idle program, the attendant and its workers, which the limit on processes does not count."""


class DockerBackend(Backend):
    """Sandboxes that are containers of the engine at `$DOCKER_HOST` or at its usual socket."""

    name = "docker"

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._address = engine_address()
        self._docker: aiodocker.Docker | None = None
        self._images: EngineImages | None = None
        self._zygotes: Zygotes | None = None
        self._sandboxes: set[DockerSandbox] = set()
        self._opening = asyncio.Lock()

    @property
    def lease(self) -> Lease:
        return self._lease

    @property
    def kinds(self) -> frozenset[str]:
        return frozenset({KIND, SNAPSHOT, VOLUME})

    @property
    def zygotes(self) -> Zygotes:
        if self._zygotes is None:
            self._zygotes = Zygotes(IdMap.detect())
        return self._zygotes

    async def capabilities(self) -> Capabilities:
        limits = {"cpus": "cgroup", "memory": "cgroup", "processes": "cgroup", "open_files": "rlimit"}
        return Capabilities(networks=offered_modes(), switch_network=True, limits=limits, snapshot=True, compose=True)

    async def _engine(self) -> aiodocker.Docker:
        async with self._opening:
            if self._docker is None:
                self._refuse_far_engines()
                _refuse_plain_users()
                self._docker, _ = await self._connect()
                self._images = EngineImages(self._docker)
            return self._docker

    async def _connect(self) -> tuple[aiodocker.Docker, dict[str, Any]]:
        """A connection to the engine and what it says of its version."""
        docker = aiodocker.Docker(url=self._address)
        try:
            return docker, await docker.version()
        except (DockerError, aiohttp.ClientError, OSError) as error:
            await docker.close()
            raise SandboxError(
                f"the Docker engine at {self._address} does not answer: {error}",
                code="engine_down",
                hint="start the engine, or set DOCKER_HOST",
            ) from error

    def _refuse_far_engines(self) -> None:
        if not self._address:
            raise SandboxError(
                "no Docker engine was found: DOCKER_HOST is not set and the usual sockets are not there",
                code="no_engine",
                blame="user",
                retryable=False,
                hint="start an engine, set DOCKER_HOST, or use --env local",
            )
        if not self._address.startswith("unix://"):
            raise SandboxError(
                f"DOCKER_HOST={self._address}: the engine must be on this machine, at a unix:// socket",
                code="far_engine",
                blame="user",
                retryable=False,
                hint="run pier on the engine's host",
            )

    async def start(self, spec: SandboxSpec) -> Sandbox:
        return await self.start_container(spec) if spec.compose is None else await start_services(self, spec)

    async def start_container(self, spec: SandboxSpec, more: Mapping[str, Any] | None = None) -> DockerSandbox:
        """Start one container; `more` replaces parts of what the engine is told of its host side, and adds `Binds`."""
        if spec.network.mode not in (await self.capabilities()).networks:
            raise PolicyError(
                f"the Docker backend cannot enforce the network policy {spec.network.mode!r} here",
                hint="use --env local",
            )
        Rules(spec.network.hosts)
        if spec.limits.disk is not None:
            raise SandboxError(
                "the Docker backend cannot limit the disk here: the engine's storage driver has no quotas",
                code="no_limit",
                blame="user",
                retryable=False,
                hint="leave the limit out, or use --env local",
            )
        docker = await self._engine()
        assert self._images is not None
        box = ContainerBox(self._lease, self.zygotes, docker, self._address)
        try:
            image = await self._images.ensure(spec.image)
            await box.start(self._container(spec, image, more or {}), _plan(spec))
        except DockerError as error:
            await asyncio.shield(box.stop())
            raise engine_error(error) from error
        except BaseException:
            await asyncio.shield(box.stop())
            raise
        sandbox = DockerSandbox(spec, box, self)
        self._sandboxes.add(sandbox)
        if spec.network.mode == "none":
            sandbox.network.begin(box.proof)
            return sandbox
        try:
            await sandbox.network.enforce(box.channel, spec.network)
        except BaseException:
            await asyncio.shield(sandbox.stop())
            raise
        return sandbox

    async def volumes(self, image: Image) -> TrialVolumes:
        """The volumes of one trial, none so far."""
        docker = await self._engine()
        assert self._images is not None
        return TrialVolumes(docker, self._address, self._lease, await self._images.ensure(image))

    async def find_image(self, reference: str) -> Image | None:
        await self._engine()
        assert self._images is not None
        try:
            return await self._images.find(reference)
        except DockerError as error:
            raise engine_error(error) from error

    def _container(self, spec: SandboxSpec, image: str, more: Mapping[str, Any]) -> dict[str, Any]:
        program = idle.place(pier_home() / "docker")
        limits = spec.limits
        host: dict[str, Any] = {
            "NetworkMode": "none",
            "Dns": [GATEWAY],
            "ExtraHosts": [f"{spec.hostname}:127.0.1.1"],
            "Binds": [f"{program}:{_IDLE}:ro", *(_bind(mount) for mount in spec.mounts if mount.source is not None)],
            "Tmpfs": {mount.target: _tmpfs(mount) for mount in spec.mounts if mount.source is None},
            "ReadonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"],
        }
        if Path(_IPV6).exists():
            # Engines switch IPv6 off where they give no network; the policy's own has both families.
            host["Sysctls"] = {f"net.ipv6.conf.{name}.disable_ipv6": "0" for name in ("all", "default", "lo")}
        if limits.memory is not None:
            host |= {"Memory": limits.memory, "MemorySwap": limits.memory}
        if limits.cpus is not None:
            host["NanoCpus"] = int(limits.cpus * 1e9)
        if limits.processes is not None:
            host["PidsLimit"] = limits.processes + _OWN_PROCESSES
        if spec.gpus:
            host["DeviceRequests"] = [{"Driver": "nvidia", "Count": spec.gpus, "Capabilities": [["gpu"]]}]
        for key, value in more.items():
            host[key] = [*host["Binds"], *value] if key == "Binds" else value
        return {
            "Image": image,
            "Entrypoint": [_IDLE],
            "Cmd": [],
            "User": "0:0",
            "WorkingDir": "/",
            "Hostname": spec.hostname,
            "Labels": {LABEL: self._lease.owner, **spec.labels},
            "HostConfig": host,
            "StopSignal": "SIGKILL",
            "Healthcheck": {"Test": ["NONE"]},
        }

    async def snapshot(self, sandbox: LocalSandbox) -> Image:
        """Commit the container as an image of the engine's; the container goes on."""
        await sandbox.kill_all()
        docker = await self._engine()
        id = secrets.token_hex(6)
        reference = f"{REPOSITORY}/snapshot-{id}"
        self._lease.write(SNAPSHOT, id, {"engine": self._address, "name": reference})
        try:
            container = docker.containers.container(f"pier-{sandbox.id}")
            made = await container.commit(repository=reference, pause=False)
        except DockerError as error:
            self._lease.strike(SNAPSHOT, id)
            raise engine_error(error) from error
        return Image(reference, made["Id"], (), sandbox.spec.image.config)

    async def remove_snapshot(self, image: Image) -> None:
        docker = await self._engine()
        await _remove_image(docker, image.reference)
        self._lease.strike(SNAPSHOT, image.reference.rpartition("-")[2])

    async def changes(self, sandbox: LocalSandbox) -> list[Change]:
        assert isinstance(sandbox, DockerSandbox)
        return await sandbox.box.changes()

    async def end(self, sandbox: LocalSandbox) -> None:
        assert isinstance(sandbox, DockerSandbox)
        self._sandboxes.discard(sandbox)
        await sandbox.box.stop()

    async def doctor(self) -> list[Finding]:
        return [await self._examine_engine(), _examine_user()]

    async def _examine_engine(self) -> Finding:
        try:
            self._refuse_far_engines()
            docker, version = await self._connect()
        except SandboxError as error:
            return Finding("Docker engine", False, error.message, error.hint or "")
        await docker.close()
        told = f"{version.get('Version', '?')} at {self._address}, API {version.get('ApiVersion', '?')}"
        return Finding("Docker engine", True, told)

    async def destroy(self, held: Held) -> None:
        address = held.data.get("engine", self._address)
        async with aiodocker.Docker(url=address) as docker:
            ends = {SNAPSHOT: _remove_image, VOLUME: remove_volume}
            await ends.get(held.kind, remove)(docker, held.data["name"])

    async def close(self) -> None:
        await asyncio.gather(*(sandbox.stop() for sandbox in list(self._sandboxes)))
        self._sandboxes.clear()
        if self._zygotes is not None:
            self._zygotes.close()
            self._zygotes = None
        if self._docker is not None:
            await self._docker.close()
            self._docker = None


def _refuse_plain_users() -> None:
    if os.geteuid() != 0:
        raise SandboxError(
            "the Docker backend enters containers from outside, which needs root on the engine's host",
            code="not_root",
            blame="user",
            retryable=False,
            hint="run pier as root, or use --env local, which needs no root",
        )


def _examine_user() -> Finding:
    try:
        _refuse_plain_users()
    except SandboxError as error:
        return Finding("root", False, error.message, error.hint or "")
    return Finding("root", True, "containers can be entered from outside")


async def _remove_image(docker: aiodocker.Docker, name: str) -> None:
    try:
        await docker.images.delete(name, force=True)
    except DockerError as error:
        if error.status != 404:
            raise engine_error(error) from error


def _plan(spec: SandboxSpec) -> dict[str, Any]:
    return {
        "no_new_privileges": spec.no_new_privileges,
        "many_ids": True,
        "filter": seccomp.program().hex() if seccomp.supported() else "",
        "watched_memory": 0,
        "rlimits": {"RLIMIT_NOFILE": spec.limits.open_files} if spec.limits.open_files else {},
    }


def _bind(mount: Mount) -> str:
    source = Path(mount.source or "")
    if not source.exists():
        raise SandboxError(f"cannot mount {source}: it does not exist", code="no_mount", blame="user", retryable=False)
    return f"{source.resolve()}:{mount.target}:{'ro' if mount.read_only else 'rw'}"


def _tmpfs(mount: Mount) -> str:
    return f"size={mount.size},mode=1777" if mount.size else "mode=1777"
