"""The store of images: what was imported, pulled or built, by reference.

    <store>/refs/<hex>.json    one image each
    <store>/layers, tmp        see `pier.image.layers`
    <store>/steps/<key>.json   which layer an instruction came to; the key is a digest of all that goes into it
    <store>/caches/<name>/     a directory of `RUN --mount=type=cache`, and <name>.json with its full name
    <store>/users, locks       see `pier.image.disk`

The modification time of a JSON file is when it was last used. The store is private to its user: images hold
set-user-id programs.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pier.errors import ImageError
from pier.files import write_json
from pier.home import pier_home
from pier.image import owner
from pier.image.disk import only_one, told_by_disk
from pier.image.layers import ConfigRecord, ImageRecord, Layers, Origin, Users, image_digest
from pier.image.model import HOST, SCRATCH, Image, ImageConfig, OnProgress, host_image, is_digest, parse


@dataclass(frozen=True, slots=True)
class CachedStep:
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


class CachedSteps:
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

    def all(self) -> list[CachedStep]:
        return [
            CachedStep(path.stem, str(value.get("layer", "")), str(value.get("source", "")), used)
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


class ImageStore:
    """Images below `root` (`$PIER_HOME/images`). Several processes may use one store at once."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or pier_home() / "images"
        self.layers = Layers(self.root)
        self.users = self.layers.users
        self.steps = CachedSteps(self.root)
        self.caches = Caches(self.root, self.users)

    async def resolve(
        self, reference: str, *, pull: bool = True, on_progress: OnProgress | None = None, for_task: bool = False
    ) -> Image:
        """The image called `reference`: `host`, one of this store, one of a Docker engine, or one of a registry.

        What is not in the store is taken into it. `ImageError` with code `not_found` says all that was tried. With
        `for_task` a task named the image, not the user; `pier.image.registry` says which hosts that may reach.
        """
        if reference == HOST:
            return host_image()
        if (found := self.find(reference)) is not None:
            return found
        from pier.image.fetch import fetch

        async with self.only_one(f"fetch {reference}"):
            found = self.find(reference)
            return found or await fetch(self, reference, pull=pull, on_progress=on_progress, for_task=for_task)

    def find(self, reference: str) -> Image | None:
        """The image called `reference` if this store has it whole."""
        if reference == HOST:
            return host_image()
        path = self._record_path(canonical(reference))
        try:
            record = ImageRecord.model_validate_json(path.read_text())
        except FileNotFoundError:
            return None
        with self.users.using():
            if any(self.layers.path(layer) is None for layer in record.layers):
                return None
            self.users.note(record.layers)
        with contextlib.suppress(FileNotFoundError):
            os.utime(path)
        return self.image(record)

    def image(self, record: ImageRecord) -> Image:
        """A record as a value."""
        paths = tuple(self.layers.path(layer) or self.root / "missing" for layer in record.layers)
        return Image(familiar(record.reference), record.digest, paths, record.config.value(), record.on_host)

    def list(self) -> list[ImageRecord]:
        """All images, by reference."""
        found: list[ImageRecord] = []
        for path in sorted((self.root / "refs").glob("*.json")) if (self.root / "refs").is_dir() else []:
            with contextlib.suppress(FileNotFoundError, ValueError):
                found.append(ImageRecord.model_validate_json(path.read_text()))
        return sorted(found, key=lambda record: record.reference)

    def record(self, reference: str) -> ImageRecord:
        """What is written down about an image; `ImageError` with code `not_found` if it is not in this store."""
        try:
            return ImageRecord.model_validate_json(self._record_path(canonical(reference)).read_text())
        except FileNotFoundError:
            raise ImageError(
                f"unknown image {reference!r}: not in the store", code="not_found", blame="user", hint="pier image list"
            ) from None

    def last_used(self, reference: str) -> float:
        try:
            return self._record_path(canonical(reference)).stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def put(
        self,
        reference: str | None,
        layers: Sequence[str],
        config: ImageConfig,
        *,
        origin: Origin,
        source: str = "",
        digest: str = "",
        base: str = "",
    ) -> Image:
        """Write an image down under `reference`, or under its digest. All its layers must be in the store."""
        stored = ConfigRecord.of(config)
        digest = digest or image_digest(list(layers), stored, base=base)
        record = ImageRecord(
            reference=canonical(reference) if reference else digest,
            digest=digest,
            layers=list(layers),
            config=stored,
            on_host=bool(base),
            origin=origin,
            source=source,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )
        self.prepare("refs")
        with told_by_disk("writing the image down"):
            write_json(self._record_path(record.reference), record.model_dump(mode="json"))
        return self.image(record)

    async def remove(self, reference: str) -> None:
        """Remove an image, and those of its layers that nothing else needs and that are not a build's cache."""
        from pier.image.collect import collect

        self.record(reference)
        self.forget(reference)
        await collect(self)

    def forget(self, reference: str) -> None:
        """Take an image out of the list; its layers stay until they are collected."""
        self._record_path(canonical(reference)).unlink(missing_ok=True)

    def only_one(self, key: str) -> contextlib.AbstractAsyncContextManager[None]:
        """Hold `key` among all tasks and processes that use this store."""
        return self._only_one(key)

    @asynccontextmanager
    async def _only_one(self, key: str) -> AsyncIterator[None]:
        self.prepare("locks")
        async with only_one(self.root / "locks", key):
            yield

    def prepare(self, part: str) -> None:
        """Make a directory of the store."""
        with told_by_disk(f"the image store {self.root} cannot be used"):
            if not self.root.is_dir():
                self.root.mkdir(parents=True, exist_ok=True)
                self.root.chmod(0o700)
            (self.root / part).mkdir(exist_ok=True)

    def _record_path(self, name: str) -> Path:
        return self.root / "refs" / f"{hashlib.sha256(name.encode()).hexdigest()[:40]}.json"


def canonical(reference: str) -> str:
    """The one name under which a store keeps a reference."""
    if reference in (HOST, SCRATCH):
        raise ImageError(f"{reference!r} is a built-in image", code="reference", blame="user")
    return reference if is_digest(reference) else str(parse(reference))


def familiar(name: str) -> str:
    """The short form of a canonical name."""
    return name if is_digest(name) else parse(name).familiar
