"""What an engine offers beyond every engine: GPUs, and limits on disk where its storage driver has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_OWN_QUOTAS = ("btrfs", "zfs")
"""Storage drivers that can always limit what a container writes."""
_QUOTA_OPTIONS = {"prjquota", "pquota"}


def has_gpus(info: dict[str, Any]) -> bool:
    """Whether an engine says that it can hand out GPUs: by a runtime of NVIDIA's, or by devices that it found."""
    devices = info.get("DiscoveredDevices") or []
    return "nvidia" in (info.get("Runtimes") or {}) or any("gpu" in str(each.get("ID", "")) for each in devices)


def can_limit_disk(info: dict[str, Any], mounts: str) -> bool:
    """Whether `storage_opt` works: `mounts` is the engine's host's mountinfo, empty if it cannot be read."""
    driver = info.get("Driver")
    if driver in _OWN_QUOTAS:
        return True
    backing = dict(row for row in info.get("DriverStatus") or [] if len(row) == 2).get("Backing Filesystem")
    if driver != "overlay2" or backing not in ("xfs", "<unknown>"):
        return False
    return bool(_options(Path(info.get("DockerRootDir") or "/"), mounts) & _QUOTA_OPTIONS)


def _options(path: Path, mounts: str) -> set[str]:
    """The options of the file system that holds `path`."""
    found: dict[Path, set[str]] = {}
    for row in mounts.splitlines():
        before, _, after = row.partition(" - ")
        if len(fields := before.split()) > 4 and after:
            found[Path(fields[4])] = set(after.split()[-1].split(","))
    return next((found[place] for place in (path, *path.parents) if place in found), set())
