"""What a service may use, by the keys that compose has had for it over the years."""

from __future__ import annotations

from typing import Any

from pier.sandbox.compose.words import Place


def read_limits(keys: dict[str, Any], deploy: dict[str, Any], place: Place) -> dict[str, Any]:
    """Limits by their old keys and by those of `deploy`, which come first."""
    at = place.at("deploy.resources")
    resources = at.mapping(deploy.get("resources"), {"limits", "reservations"})
    limits = at.at("limits").mapping(resources.get("limits"), {"cpus", "memory", "pids"})
    kept = at.at("reservations").mapping(resources.get("reservations"), {"cpus", "memory", "devices"})
    devices = at.at("reservations.devices")

    def said(name: str, old: str) -> tuple[Any, Place]:
        """A limit, and where it stands."""
        return (limits[name], at.at(f"limits.{name}")) if limits.get(name) else (keys.get(old), place.at(old))

    cpus, where = said("cpus", "cpus")
    if (share := where.number(cpus) or 0) < 0:
        raise where.error("must not be negative")
    memory, where = said("memory", "mem_limit")
    size = where.size(memory)
    processes, where = said("pids", "pids_limit")
    most = int(where.number(processes) or 0)
    return {
        "cpus": share or None,
        "memory": size or None,
        "processes": most if most > 0 else None,
        "gpus": _gpus(kept.get("devices"), devices) or _count(keys.get("gpus"), place.at("gpus")),
    }


def _gpus(rows: Any, place: Place) -> int:
    total = 0
    for row in rows or []:
        keys = place.mapping(row, {"driver", "count", "capabilities", "device_ids", "options"})
        if "gpu" not in place.at("capabilities").texts(keys.get("capabilities")):
            raise place.at("capabilities").error("only devices with the capability gpu are supported")
        total += _count(keys.get("count", len(keys.get("device_ids") or []) or "all"), place.at("count"))
    return total


def _count(value: Any, place: Place) -> int:
    if value == "all":
        return -1
    return int(place.number(value) or 0)
