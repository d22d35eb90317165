"""One engine in use: the connection to it, how its containers are entered, and what can be mounted there."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from pier.errors import SandboxError
from pier.home import pier_home
from pier.idmap import IdMap
from pier.image.model import OnProgress
from pier.image.reach import is_socket, shown
from pier.lease import Lease, close_in_turn
from pier.network.policy import NetworkMode
from pier.sandbox.contract import Mount
from pier.sandbox.docker import idle
from pier.sandbox.docker.client import Client, connect
from pier.sandbox.docker.config import OWN_QUOTAS, Placing, can_limit_disk, has_gpus, idle_image, kept_limits
from pier.sandbox.docker.entering import Entrance, OwnEntrance
from pier.sandbox.docker.helper import Helper, open_helper
from pier.sandbox.docker.helper_box import REPOSITORY
from pier.sandbox.docker.images import EngineImages
from pier.sandbox.docker.runtime import IDLE
from pier.sandbox.docker.volumes import PREFIX, PackVolumes
from pier.sandbox.linux.disk import free_bytes
from pier.sandbox.linux.network import offered_modes
from pier.sandbox.linux.zygotes import Zygotes

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
        limits_ipc = not any("rootless" in option for option in (await self._ask_info()).get("SecurityOptions") or ())
        if not self.through_helper:
            program = idle.place(pier_home() / "docker")
            binds = (f"{program}:{idle.PLACE}:ro", *map(_bind, bound))
            return Placing(idle.PLACE, binds, _IPV6.exists(), limits_ipc)
        helper = await self.helper()
        own = f"{helper.volume}:{idle.PLACE}:ro"
        placed = [
            _bind(mount) if helper.shares_disk else await self._copied(mount, helper, on_progress) for mount in bound
        ]
        return Placing(f"{idle.PLACE}/{IDLE}", (own, *placed), helper.has_six, limits_ipc)

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
            self._packs = PackVolumes(self.docker, self._lease, f"{REPOSITORY}:{digest}")
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
