"""What a spec means for a local sandbox: the plan that its init carries out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pier.errors import SandboxError
from pier.network.plumbing import RESOLV_CONF
from pier.sandbox.cgroup import Hierarchies
from pier.sandbox.contract import Mount, SandboxSpec
from pier.sandbox.hidden import masks
from pier.sandbox.host import HostRoot

_HOSTS = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n127.0.1.1\t{name}\n"
_SLACK = 3
"""Processes of pier's own inside, which a limit by rlimit would count too."""


def make_plan(
    spec: SandboxSpec, host: HostRoot | None, *, enforced_by: Mapping[str, str], caged: bool
) -> dict[str, Any]:
    """The plan for `spec`. `enforced_by` says which limits are left to init; `caged` that a control group comes."""
    rlimits: dict[str, int] = {}
    if spec.limits.open_files is not None:
        rlimits["RLIMIT_NOFILE"] = spec.limits.open_files
    if spec.limits.disk is not None:
        rlimits["RLIMIT_FSIZE"] = spec.limits.disk
    if spec.limits.processes is not None and enforced_by.get("processes") == "rlimit":
        rlimits["RLIMIT_NPROC"] = spec.limits.processes + _SLACK
    return {
        "trees": list(host.trees) if host else [],
        "mounts": [_mount(mount) for mount in (*spec.mounts, *_masks(spec, host))],
        "etc": {
            "resolv.conf": RESOLV_CONF,
            "hosts": _HOSTS.format(name=spec.hostname),
            "hostname": spec.hostname + "\n",
        },
        "hostname": spec.hostname,
        "rlimits": rlimits,
        "no_new_privileges": spec.no_new_privileges,
        "shm_size": max(64 << 20, (spec.limits.memory or 0) // 2),
        "caged": caged,
        "watched_memory": (spec.limits.memory or 0) if enforced_by.get("memory") == "watched" else 0,
        "cores": math.ceil(spec.limits.cpus) if spec.limits.cpus and enforced_by.get("cpus") == "affinity" else 0,
    }


def limits_of(groups: Hierarchies | None) -> dict[str, str]:
    """By what each limit is enforced here."""
    found = dict.fromkeys(groups.limits if groups else (), "cgroup")
    weaker = {"processes": "rlimit", "open_files": "rlimit", "memory": "watched", "disk": "watched", "cpus": "affinity"}
    return weaker | found


def layers_of(spec: SandboxSpec, host: HostRoot | None) -> list[str]:
    """The layers of the root, lowest first."""
    below = host.layers if host else ()
    layers = (*below, *spec.image.layers)
    for path in layers:
        if not path.is_dir():
            raise SandboxError(
                f"the image {spec.image.reference} lacks its layer {path}",
                code="image_gone",
                hint=f"pier image pull {spec.image.reference}",
                retryable=False,
            )
    if not layers:
        raise SandboxError(f"the image {spec.image.reference} has no layers", code="image_gone", retryable=False)
    return [str(path) for path in layers]


def _masks(spec: SandboxSpec, host: HostRoot | None) -> tuple[Mount, ...]:
    if host is None:
        return masks(spec.mounts, spec.hidden)
    return masks(spec.mounts, (*spec.hidden, *host.hidden), host.trees)


def _mount(mount: Mount) -> dict[str, Any]:
    wanted: dict[str, Any] = {"target": mount.target, "read_only": mount.read_only, "size": mount.size}
    if mount.source is not None:
        if not mount.source.exists():
            raise SandboxError(
                f"cannot mount {mount.source}: it does not exist", code="no_mount", blame="user", retryable=False
            )
        wanted["source"] = str(mount.source.resolve())
    return wanted
