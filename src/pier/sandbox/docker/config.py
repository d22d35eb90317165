"""What an engine is told of a container that is to be a sandbox.

What an engine offers beyond every engine: GPUs, and limits on disk where its storage driver has them.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiodocker.containers import DockerContainer
from aiodocker.exceptions import DockerError

from pier.lease import Lease
from pier.network.plumbing import GATEWAY
from pier.sandbox.contract import Mount, SandboxSpec
from pier.sandbox.docker import idle
from pier.sandbox.docker.box import passing_container
from pier.sandbox.docker.client import Client, bring_image, engine_error, is_no_driver
from pier.sandbox.docker.holding import holding
from pier.sandbox.docker.images import REPOSITORY
from pier.sandbox.host import masks
from pier.sandbox.linux.oom import SCORE
from pier.sandbox.linux.root import ipc_limits

_SHM = 64 << 20
"""The size of /dev/shm that engines give by default."""
_OWN_PROCESSES = 4
"""The idle program, the attendant and its workers, which the limit on processes does not count."""


@dataclass(frozen=True, slots=True)
class Placing:
    """What depends on where the engine is: the program that keeps a container alive, what is mounted into it, whether
    its host has IPv6, and whether it may limit System V memory, which rootless engines may not before Linux 5.19."""

    program: str
    binds: tuple[str, ...]
    has_six: bool
    limits_ipc: bool


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
        "OomScoreAdj": SCORE,
        "ReadonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"],
    }
    if placing.has_six:
        # Engines switch IPv6 off where they give no network; the policy's own has both families.
        host["Sysctls"] = {f"net.ipv6.conf.{name}.disable_ipv6": "0" for name in ("all", "default", "lo")}
    if limits.memory is not None:
        host |= {"Memory": limits.memory, "MemorySwap": limits.memory}
        host["ShmSize"] = min(_SHM, limits.memory // 2)
        if placing.limits_ipc:
            host["Sysctls"] = host.get("Sysctls", {}) | ipc_limits(limits.memory)
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
        config = {"Image": name, "Cmd": [f"/{idle.IDLE}"], "HostConfig": {"NetworkMode": "none", **more}}
        async with passing_container(docker, lease, config) as container:
            yield container


@asynccontextmanager
async def idle_image(docker: Client, machine: str) -> AsyncIterator[str]:
    """The name of an image that has nothing but the program that waits, which is kept until the end."""
    data = idle.archive(machine)
    name = f"{REPOSITORY}/{idle.IDLE}:{hashlib.sha256(data).hexdigest()[:24]}"
    async with holding(name):
        await bring_image(docker, name, lambda: data, "pier's program that waits")
        yield name
