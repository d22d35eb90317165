"""What builds keep in a store beside images, to be faster the next time.

    <store>/steps/<key>.json     which layer an instruction came to; the key is a digest of all that goes into it
    <store>/caches/<name>/       a directory of `RUN --mount=type=cache`, and <name>.json with what it is called

The modification time of each JSON file is when it was last used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pier.files import write_json
from pier.image import owner
from pier.image.disk import told_by_disk
from pier.image.users import Users


@dataclass(frozen=True, slots=True)
class Step:
    """An instruction that was carried out: `layer` is empty if it changed no file."""

    key: str
    layer: str
    source: str
    used: float


@dataclass(frozen=True, slots=True)
class CacheDirectory:
    """A directory that `RUN --mount=type=cache` keeps between builds; `id` is what the Dockerfile calls it."""

    name: str
    id: str
    path: Path
    used: float
    size: int = 0


class Steps:
    """The instructions that a store at `root` knows the layers of."""

    def __init__(self, root: Path) -> None:
        self._place = root / "steps"

    def find(self, key: str) -> str | None:
        """The layer of an instruction, empty if it has none; None if it is not known."""
        path = self._place / f"{key}.json"
        found = _read(path)
        if found is None:
            return None
        with contextlib.suppress(FileNotFoundError):
            os.utime(path)
        return str(found.get("layer", ""))

    def note(self, key: str, layer: str, source: str) -> None:
        """Write down what an instruction came to."""
        with told_by_disk("writing a build step down"):
            self._place.mkdir(parents=True, exist_ok=True)
            write_json(self._place / f"{key}.json", {"layer": layer, "source": source}, durable=False)

    def all(self) -> list[Step]:
        return [
            Step(path.stem, str(value.get("layer", "")), str(value.get("source", "")), used)
            for path, value, used in _records(self._place)
        ]

    def forget(self, key: str) -> None:
        (self._place / f"{key}.json").unlink(missing_ok=True)


class Caches:
    """The directories of `RUN --mount=type=cache` of a store at `root`."""

    def __init__(self, root: Path, users: Users) -> None:
        self._place = root / "caches"
        self._users = users

    def path(self, id: str) -> Path:
        return self._place / _name(id)

    def open(self, id: str) -> Path:
        """The directory called `id`, made if it is missing, and kept while this process lives."""
        path = self.path(id)
        with told_by_disk("making a cache directory"):
            self._place.mkdir(parents=True, exist_ok=True)
        with self._users.using(), told_by_disk("making a cache directory"):
            self._users.note([f"cache {path.name}"])
            write_json(path.with_suffix(".json"), {"id": id}, durable=False)
            if not path.is_dir():
                path.mkdir()
                path.chmod(0o777)
        return path

    async def measured(self) -> list[CacheDirectory]:
        """All of them with their sizes."""
        found: list[CacheDirectory] = []
        for path, value, used in _records(self._place):
            directory = path.with_suffix("")
            if directory.is_dir():
                size = (await owner.run("measure", path=str(directory)))["size"]
                found.append(CacheDirectory(path.stem, str(value.get("id", "")), directory, used, size))
        return found

    def hide(self, name: str, directory: Path) -> None:
        """Take one out of sight, into `directory`. Call it inside `users.collecting`."""
        with contextlib.suppress(FileNotFoundError):
            (self._place / name).rename(directory / name)
        (self._place / f"{name}.json").unlink(missing_ok=True)


def _name(id: str) -> str:
    return hashlib.sha256(id.encode()).hexdigest()[:24]


def _records(place: Path) -> Iterator[tuple[Path, dict[str, Any], float]]:
    for path in sorted(place.glob("*.json")) if place.is_dir() else []:
        value = _read(path)
        with contextlib.suppress(FileNotFoundError):
            yield path, value or {}, path.stat().st_mtime


def _read(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return value if isinstance(value, dict) else None
