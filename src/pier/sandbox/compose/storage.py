"""What is mounted into a service: volumes of the trial's own, files of the task's, memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pier.sandbox.compose.model import Volume
from pier.sandbox.compose.words import Place

LOGS = "/.pier/"
"""Paths below this stand for directories of logs of the host, which Harbor's tasks mount and pier fetches instead."""

_VOLUME = {"type", "source", "target", "read_only", "bind", "volume", "tmpfs", "consistency"}
_OPTIONS = {
    "bind": {"create_host_path", "propagation", "recursive", "selinux"},
    "volume": {"nocopy", "labels"},
    "tmpfs": {"size", "mode"},
}

_TMPFS = re.compile(
    r"size=\d+[kmg%]?|mode=[0-7]+|[ug]id=\d+|nr_inodes=\d+[kmg]?|r[ow]|(no)?(exec|suid|dev|diratime|atime)|relatime",
    re.I,
)


def read_volumes(rows: Any, place: Place, root: Path) -> tuple[tuple[Volume, ...], dict[str, str]]:
    """The volumes of a service, and what it has in memory; files of the task are below `root`."""
    volumes: list[Volume] = []
    tmpfs: dict[str, str] = {}
    for row in rows if isinstance(rows, list) else [rows] if rows else []:
        keys = _long_volume(row, place) if isinstance(row, dict) else _short_volume(str(row), place)
        source, target = str(keys.get("source") or ""), str(keys.get("target") or "")
        if not target.startswith("/"):
            raise place.error(f"the target {target!r} is not an absolute path")
        if keys.get("type") == "tmpfs":
            tmpfs[target] = _options(keys.get("tmpfs") or {}, place.at("tmpfs"))
        elif not source.startswith(LOGS):
            volumes.append(_volume(keys, source, target, len(volumes), place, root))
    return tuple(volumes), tmpfs


def _volume(keys: dict[str, Any], source: str, target: str, number: int, place: Place, root: Path) -> Volume:
    read_only = place.at("read_only").flag(keys.get("read_only"))
    if not source and keys.get("type") == "bind":
        raise place.error(f"the source of the bind at {target} is missing", "add a source next to the compose file")
    if not source:
        return Volume(target, name=f"/{number}{target}", read_only=read_only)
    if keys.get("type") != "bind" and not source.startswith((".", "/", "~")):
        return Volume(target, name=source, read_only=read_only)
    if source.startswith(("/", "~")) and not Path(source).is_relative_to(root):
        hint = "use a path next to the compose file, or a named volume"
        raise place.error(f"{source!r} is a path of the machine, which no task may mount", hint)
    return Volume(target, source=place.inside(source, root), read_only=read_only)


def _long_volume(row: dict[str, Any], place: Place) -> dict[str, Any]:
    keys = place.mapping(row, _VOLUME)
    place.at("type").one_of(keys.get("type", "volume"), tuple(_OPTIONS))
    for name, known in _OPTIONS.items():
        place.at(name).mapping(keys.get(name), known)
    return keys


def _short_volume(text: str, place: Place) -> dict[str, Any]:
    parts = text.split(":")
    if len(parts) > 3:
        raise place.error(f"{text!r} is not of the form source:target:mode")
    if len(parts) == 1:
        return {"target": parts[0]}
    modes = parts[2].split(",") if len(parts) == 3 else []
    if strange := set(modes) - {"ro", "rw", "z", "Z", "cached", "delegated", "consistent", "nocopy"}:
        raise place.error(f"{text!r}: the mode {min(strange)!r} is not supported")
    return {"source": parts[0], "target": parts[1], "read_only": "ro" in modes}


def _options(keys: dict[str, Any], place: Place) -> str:
    size, mode = place.at("size").size(keys.get("size")), keys.get("mode")
    mode = f"{mode:o}" if isinstance(mode, int) else str(mode or "").removeprefix("0o")
    return _checked(",".join([*([f"size={size}"] if size else []), *([f"mode={mode}"] if mode else [])]), place)


def read_tmpfs(value: Any, place: Place) -> dict[str, str]:
    """What a service has in memory, each with its options."""
    found: dict[str, str] = {}
    for row in place.texts(value):
        target, _, options = row.partition(":")
        if not target.startswith("/"):
            raise place.error(f"{target!r} is not an absolute path")
        found[target] = _checked(options, place)
    return found


def _checked(options: str, place: Place) -> str:
    for option in options.split(",") if options else []:
        if not _TMPFS.fullmatch(option):
            raise place.error(f"unsupported tmpfs option {option!r}")
    return options
