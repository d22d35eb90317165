"""What a spec means for a local sandbox: the plan that its init carries out."""

from __future__ import annotations

import math
import os
import re
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
_SEEN_IN_TIME = 8 << 30
"""A file of a size like this takes longer to write than the disk goes unwatched. Sparse ones may be as long."""


def make_plan(spec: SandboxSpec, host: HostRoot | None, *, enforced_by: Mapping[str, str]) -> dict[str, Any]:
    """The plan for `spec`. `enforced_by` says which limits are left to init."""
    rlimits: dict[str, int] = {}
    if spec.limits.open_files is not None:
        rlimits["RLIMIT_NOFILE"] = spec.limits.open_files
    if spec.limits.disk is not None and spec.limits.disk < _SEEN_IN_TIME:
        rlimits["RLIMIT_FSIZE"] = spec.limits.disk
    by_init = spec.limits.processes if enforced_by.get("processes") != "cgroup" else None
    if by_init is not None:
        rlimits["RLIMIT_NPROC"] = by_init + _SLACK
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
        "processes": (by_init or 0) + _SLACK if by_init else 0,
        "no_new_privileges": spec.no_new_privileges,
        "shm_size": max(64 << 20, (spec.limits.memory or 0) // 2),
        "watched_memory": (spec.limits.memory or 0) if enforced_by.get("memory") == "watched" else 0,
        "cores": math.ceil(spec.limits.cpus) if spec.limits.cpus and enforced_by.get("cpus") == "affinity" else 0,
    }


def limits_of(groups: Hierarchies | None) -> dict[str, str]:
    """By what each limit is enforced here."""
    found = dict.fromkeys(groups.limits if groups else (), "cgroup")
    count = "namespace" if _counts_in_namespaces() else "rlimit"
    weaker = {"processes": count, "open_files": "rlimit", "memory": "watched", "disk": "watched", "cpus": "affinity"}
    return weaker | found


def _counts_in_namespaces() -> bool:
    """Whether the kernel limits how many processes a pid namespace has: those from 6.14 on do."""
    found = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return found is not None and (int(found[1]), int(found[2])) >= (6, 14)


def machine_memory() -> int:
    """How many bytes of memory this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


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
