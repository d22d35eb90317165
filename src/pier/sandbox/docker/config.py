"""What an engine is told of a container that is to be a sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pier.network.plumbing import GATEWAY
from pier.sandbox.contract import Mount, SandboxSpec
from pier.sandbox.hidden import masks
from pier.sandbox.linux.oom import SCORE

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
        "OomScoreAdj": SCORE,
        "ReadonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"],
    }
    if placing.has_six:
        # Engines switch IPv6 off where they give no network; the policy's own has both families.
        host["Sysctls"] = {f"net.ipv6.conf.{name}.disable_ipv6": "0" for name in ("all", "default", "lo")}
    if limits.memory is not None:
        host |= {"Memory": limits.memory, "MemorySwap": limits.memory}
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
