"""One engine in use: the connection to it, how its containers are made and entered, and what it offers.

Engines differ in GPUs, in limits on disk (a matter of the storage driver) and in whether they see this machine's files.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiodocker.containers import DockerContainer
from aiodocker.exceptions import DockerError

from pier.errors import SandboxError
from pier.home import pier_home
from pier.idmap import IdMap
from pier.image.engine_address import is_socket, shown
from pier.image.model import OnProgress
from pier.lease import Lease, close_in_turn
from pier.network.plumbing import GATEWAY
from pier.network.policy import NetworkMode
from pier.sandbox.contract import Mount, SandboxSpec
from pier.sandbox.docker import runtime
from pier.sandbox.docker.client import Client, bring_image, connect, engine_error, in_use_lock, is_no_driver
from pier.sandbox.docker.entering import Entrance, OwnEntrance
from pier.sandbox.docker.helper import Helper, open_helper
from pier.sandbox.docker.images import REPOSITORY, EngineImages
from pier.sandbox.docker.runtime import HELPER_REPOSITORY, IDLE
from pier.sandbox.docker.sandbox import temporary_container
from pier.sandbox.docker.volumes import PREFIX, PackVolumes
from pier.sandbox.host import masks
from pier.sandbox.linux.kernel import OOM_SCORE
from pier.sandbox.linux.limits import free_bytes
from pier.sandbox.linux.network import offered_modes
from pier.sandbox.linux.root import ipc_limits
from pier.sandbox.linux.zygotes import Zygotes

_SHM = 64 << 20
"""The size of /dev/shm that engines give by default."""
_OWN_PROCESSES = 4
"""The idle program, the attendant and its workers, which the limit on processes does not count."""


@dataclass(frozen=True, slots=True)
class Placing:
    """What depends on where the engine is: the program that keeps a container alive, what is mounted into it, and
    whether its host has IPv6."""

    program: str
    binds: tuple[str, ...]
    has_six: bool


def container_config(
    spec: SandboxSpec, image: str, placing: Placing, labels: Mapping[str, str], more: Mapping[str, Any]
) -> dict[str, Any]:
    """A container without a network that runs nothing. `more` replaces parts of the host's side, and adds to
    `Binds` and tables."""
    limits = spec.limits
    host: dict[str, Any] = {
        "NetworkMode": "none",
        "Dns": [GATEWAY],
        "ExtraHosts": [f"{spec.hostname}:127.0.1.1"],
        "Binds": list(placing.binds),
        "Tmpfs": {
            mount.target: _tmpfs(mount)
            for mount in (*spec.mounts, *masks(spec.mounts, spec.hidden))
            if mount.source is None
        },
        "OomScoreAdj": OOM_SCORE,
        "ReadonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"],
    }
    if placing.has_six:
        # Engines switch IPv6 off where they give no network; the policy's own has both families.
        host["Sysctls"] = {f"net.ipv6.conf.{name}.disable_ipv6": "0" for name in ("all", "default", "lo")}
    if limits.memory is not None:
        host |= {"Memory": limits.memory, "MemorySwap": limits.memory}
        host["Sysctls"] = host.get("Sysctls", {}) | ipc_limits(limits.memory)
        host["ShmSize"] = min(_SHM, limits.memory // 2)
    if limits.cpus is not None:
        host["NanoCpus"] = int(limits.cpus * 1e9)
    if limits.processes is not None:
        host["PidsLimit"] = limits.processes + _OWN_PROCESSES
    if spec.gpus:
        host["DeviceRequests"] = [gpu_request(spec.gpus)]
    for key, value in more.items():
        if key == "Binds":
            value = [*placing.binds, *value]
        elif isinstance(host.get(key), dict):
            value = host[key] | value
        host[key] = value
    return {
        "Image": image,
        "Entrypoint": [placing.program],
        "Cmd": [],
        "User": "0:0",
        "Hostname": spec.hostname,
        "Labels": {**labels, **spec.labels},
        "HostConfig": host,
        "StopSignal": "SIGKILL",
        "Healthcheck": {"Test": ["NONE"]},
    }


def gpu_request(count: int) -> dict[str, Any]:
    """What an engine is told that is to hand out GPUs; -1 is all that it has. Which ones is up to the engine."""
    return {"Driver": "", "Count": count, "Capabilities": [["gpu"]]}


def attendant_plan(spec: SandboxSpec) -> dict[str, Any]:
    """What whoever enters the container is told."""
    return {
        "no_new_privileges": spec.no_new_privileges,
        "many_ids": True,
        "watched_memory": 0,
        "rlimits": {"RLIMIT_NOFILE": spec.limits.open_files} if spec.limits.open_files else {},
    }


def _tmpfs(mount: Mount) -> str:
    words = ["ro"] if mount.read_only else []
    words += [f"size={mount.size}"] if mount.size else []
    return ",".join([*words, "mode=1777"])


OWN_QUOTAS = ("btrfs", "zfs")
"""Storage drivers that can always limit what a container holds, its image included."""
_TOLD = {"cpus": ("CpuCfsPeriod", "CpuCfsQuota"), "memory": ("MemoryLimit",), "processes": ("PidsLimit",)}
"""By what an engine says that it cannot keep a limit."""
_TRIED_SIZE = "1073741824"


def kept_limits(info: Mapping[str, Any]) -> dict[str, str]:
    """The limits that an engine keeps, and by what. Those that its host's control groups lack it would leave out of a
    container without a word."""
    kept = {name: "cgroup" for name, keys in _TOLD.items() if all(info.get(key, True) for key in keys)}
    return {**kept, "open_files": "rlimit"}


async def has_gpus(docker: Client, lease: Lease, machine: str) -> bool:
    """Whether an engine hands out GPUs. It says so only when a container starts that asks for one, so such a container
    is started for a moment; engines that know nothing of GPUs leave the wish out. `machine`: the engine's word for its
    processor."""
    try:
        async with _tried(docker, lease, machine, {"DeviceRequests": [gpu_request(1)]}) as container:
            found = await container.show()
            await container.start()
    except DockerError as error:
        if is_no_driver(error):
            return False
        raise engine_error(error) from error
    return bool(found["HostConfig"].get("DeviceRequests"))


async def can_limit_disk(docker: Client, lease: Lease, machine: str, info: Mapping[str, Any]) -> bool:
    """Whether `storage_opt` works. `info` is what the engine says of itself; where that leaves it open, a container
    that asks for it is made and removed: the engine refuses if the file system below has no project quotas."""
    driver = info.get("Driver")
    if driver in OWN_QUOTAS:
        return True
    backing = dict(row for row in info.get("DriverStatus") or [] if len(row) == 2).get("Backing Filesystem")
    if driver != "overlay2" or backing not in ("xfs", "<unknown>"):
        return False
    try:
        async with _tried(docker, lease, machine, {"StorageOpt": {"size": _TRIED_SIZE}}):
            return True
    except DockerError as error:
        if "storage-opt" in str(error.message):
            return False
        raise engine_error(error) from error


@asynccontextmanager
async def _tried(docker: Client, lease: Lease, machine: str, more: Mapping[str, Any]) -> AsyncIterator[DockerContainer]:
    """A container with nothing in it but the program that waits, made as `more` says."""
    async with idle_image(docker, machine) as name:
        config = {"Image": name, "Cmd": [f"/{runtime.IDLE}"], "HostConfig": {"NetworkMode": "none", **more}}
        async with temporary_container(docker, lease, config) as container:
            yield container


@asynccontextmanager
async def idle_image(docker: Client, machine: str) -> AsyncIterator[str]:
    """The name of an image that has nothing but the program that waits, which is kept until the end."""
    data = runtime.archive(machine)
    name = f"{REPOSITORY}/{runtime.IDLE}:{hashlib.sha256(data).hexdigest()[:24]}"
    async with in_use_lock(name):
        await bring_image(docker, name, lambda: data, "pier's program that waits")
        yield name


_IPV6 = Path("/proc/sys/net/ipv6")


def needs_helper(address: str) -> bool:
    """Whether containers of the engine at `address` cannot be entered by this process."""
    here = is_socket(address) and os.geteuid() == 0 and sys.platform == "linux"
    return not here or bool(os.environ.get("PIER_DOCKER_HELPER"))


class Engine:
    """An engine that answers. Where pier is not root on its host, a helper there does what needs it."""

    def __init__(self, docker: Client, version: dict[str, Any], lease: Lease) -> None:
        self.docker = docker
        self.address = docker.address
        self.images = EngineImages(docker)
        self.through_helper = needs_helper(docker.address)
        self.was_entered = False
        """Whether a container of it was entered, so that the way is known to be right."""
        self.version = version
        self._machine = str(version.get("Arch", ""))
        self._lease = lease
        self._zygotes: Zygotes | None = None
        self._helper: Helper | None = None
        self._packs: PackVolumes | None = None
        self._info: dict[str, Any] = {}
        self._limits_disk: bool | None = None
        self._has_gpus: bool | None = None
        self._starting = asyncio.Lock()

    @classmethod
    async def open(cls, address: str, lease: Lease) -> Engine:
        """Reach the engine at `address`."""
        docker, version = await connect(address)
        return cls(docker, version, lease)

    @property
    def is_podman(self) -> bool:
        """Whether it is podman, which speaks Docker's API but does some things in ways of its own."""
        return any(part.get("Name") == "Podman Engine" for part in self.version.get("Components") or [])

    async def entrance(self) -> Entrance:
        """What enters containers here; a helper that was lost is replaced."""
        if self.through_helper:
            return await self.helper()
        if self._zygotes is None:
            self._zygotes = Zygotes(IdMap.detect())
        return OwnEntrance(self._zygotes)

    async def helper(self) -> Helper:
        """The helper, started if need be."""
        async with self._starting:
            if self._helper is not None and self._helper.closed:
                lost, self._helper = self._helper, None
                await lost.close()
            if self._helper is None:
                self._helper = await open_helper(self.docker, self._lease, self._machine)
            return self._helper

    async def networks(self) -> frozenset[NetworkMode]:
        """The policies that can be enforced there."""
        return (await self.helper()).networks if self.through_helper else offered_modes()

    async def has_gpus(self) -> bool:
        """Whether containers there can have GPUs; a container is started once to find out."""
        async with self._starting:
            if self._has_gpus is None:
                self._has_gpus = await has_gpus(self.docker, self._lease, self._machine)
            return self._has_gpus

    async def limits(self) -> dict[str, str]:
        """The limits that can be kept there, and by what."""
        kept = kept_limits(await self._ask_info())
        return {**kept, "disk": "quota" if await self.has_quotas() else "watched"}

    async def has_quotas(self) -> bool:
        """Whether the engine itself limits what a container writes."""
        async with self._starting:
            if self._limits_disk is None:
                info = await self._ask_info()
                self._limits_disk = await can_limit_disk(self.docker, self._lease, self._machine, info)
            return self._limits_disk

    async def disk_counts_image(self) -> bool:
        """Whether a limit on disk there counts what the image holds too."""
        return (await self._ask_info()).get("Driver") in OWN_QUOTAS

    async def data_directory(self) -> str:
        """Where the engine keeps images and containers, on its own host."""
        return str((await self._ask_info()).get("DockerRootDir") or "")

    async def free_disk(self) -> int | None:
        """How many bytes are free where the engine keeps containers; None if that cannot be seen from here."""
        root = await self.data_directory()
        if not root:
            return None
        if self.through_helper:
            return await (await self.helper()).free_disk(root)
        return free_bytes(Path(root)) if Path(root).exists() else None

    async def memory(self) -> int:
        """How many bytes of memory its host has."""
        return int((await self._ask_info()).get("MemTotal") or 0)

    async def _ask_info(self) -> dict[str, Any]:
        if not self._info:
            self._info = dict(await self.docker.system.info())
        return self._info

    def idle_image(self) -> AbstractAsyncContextManager[str]:
        """The name of an image there that has nothing in it that could run but the program that waits."""
        return idle_image(self.docker, self._machine)

    async def shares_disk(self) -> bool:
        """Whether the engine sees this machine's directories."""
        return (await self.helper()).shares_disk if self.through_helper else True

    async def place(self, mounts: tuple[Mount, ...], on_progress: OnProgress | None = None) -> Placing:
        """Make what a container needs there, and say where it is."""
        bound = [mount for mount in mounts if mount.source is not None]
        if not self.through_helper:
            program = runtime.place(pier_home() / "docker")
            return Placing(runtime.PLACE, (f"{program}:{runtime.PLACE}:ro", *map(_bind, bound)), _IPV6.exists())
        helper = await self.helper()
        own = f"{helper.volume}:{runtime.PLACE}:ro"
        binds = [
            _bind(mount) if helper.shares_disk else await self._copied(mount, helper, on_progress) for mount in bound
        ]
        return Placing(f"{runtime.PLACE}/{IDLE}", (own, *binds), helper.has_six)

    async def _copied(self, mount: Mount, helper: Helper, on_progress: OnProgress | None) -> str:
        """A mount for an engine that cannot see its source."""
        source = _existing(mount)
        if not mount.read_only or not source.is_dir():
            kind = "written to" if source.is_dir() else "mounted, since it is a file,"
            raise SandboxError(
                f"{source} cannot be {kind} at {mount.target}: the engine at {shown(self.address)} does not see this "
                "machine's files",
                code="far_mount",
                blame="user",
                retryable=False,
                hint="mount a directory read-only, or run pier on the engine's host",
            )
        if self._packs is None:
            digest = helper.volume.removeprefix(PREFIX)
            self._packs = PackVolumes(self.docker, self._lease, f"{HELPER_REPOSITORY}:{digest}")
        return f"{await self._packs.ensure(source, on_progress)}:{mount.target}:ro"

    async def close(self) -> None:
        """End everything that serves containers here, and the connection."""
        if self._zygotes is not None:
            self._zygotes.close()
            self._zygotes = None
        helper, self._helper = self._helper, None
        ends = [each.close for each in (self._packs, helper, self.docker) if each is not None]
        await close_in_turn(*ends)


def _existing(mount: Mount) -> Path:
    source = Path(mount.source or "")
    if not source.exists():
        raise SandboxError(f"cannot mount {source}: it does not exist", code="no_mount", blame="user", retryable=False)
    return source.resolve()


def _bind(mount: Mount) -> str:
    return f"{_existing(mount)}:{mount.target}:{'ro' if mount.read_only else 'rw'}"
