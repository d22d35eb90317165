"""The store of images: what was imported, pulled or built, by reference; and the removal of what it no longer needs.

    <store>/refs/<hex>.json    one image each
    <store>/layers, tmp        see `pier.image.layers`
    <store>/steps/<key>.json   which layer an instruction came to; the key is a digest of all that goes into it
    <store>/caches/<name>/     a directory of `RUN --mount=type=cache`, and <name>.json with its full name
    <store>/users, locks       see `pier.image.layers` and `only_one`

The modification time of a JSON file is when it was last used. The store is private to its user: images hold
set-user-id programs.

`collect` always removes what dead processes left half made, and layers that neither an image nor a build's cache needs.
With a size budget it also removes, least recently used first, what only makes builds faster (layers of build steps, the
directories of `RUN --mount=type=cache`), then images. What a living process uses is never removed. `pier gc` has a
default budget and removes only images that can be pulled or built again.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from pier.errors import ImageError
from pier.files import write_json
from pier.home import pier_home
from pier.image import owner
from pier.image.layers import ConfigRecord, ImageRecord, Layers, Origin, Users, image_digest
from pier.image.model import HOST, SCRATCH, Image, ImageConfig, OnProgress, disk_errors, host_image, is_digest, parse
from pier.sizes import parse_size

if TYPE_CHECKING:
    from pier.image.layers import ImageRecord


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
        with disk_errors("writing a build step down"):
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
        with disk_errors("making a cache directory"):
            self._place.mkdir(parents=True, exist_ok=True)
        with self._users.using(), disk_errors("making a cache directory"):
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
        from pier.image.importing import fetch

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
        with disk_errors("writing the image down"):
            write_json(self._record_path(record.reference), record.model_dump(mode="json"))
        return self.image(record)

    async def remove(self, reference: str) -> None:
        """Remove an image, and those of its layers that nothing else needs and that are not a build's cache."""

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
        with disk_errors(f"the image store {self.root} cannot be used"):
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


BUDGET_VARIABLE = "PIER_IMAGE_BUDGET"
DEFAULT_BUDGET = 50 * 1000**3
"""The most that `pier gc` leaves in a store, on a disk of at least five times that size."""

_DOWNLOADS_KEPT = 24 * 3600
_STEPS_KEPT = 30 * 24 * 3600
"""For how long it is remembered that an instruction changed no file."""


@dataclass(slots=True)
class CollectedImages:
    """What was removed (or, in a dry run, would be), and how many bytes are left."""

    images: list[str] = field(default_factory=list)
    layers: list[str] = field(default_factory=list)
    caches: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    freed: int = 0
    size: int = 0


def default_budget(store: ImageStore) -> int:
    """How many bytes a store may hold before `pier run` suggests `pier gc`: `$PIER_IMAGE_BUDGET`, or else a fifth of
    its disk, at most 50 GB."""
    if text := os.environ.get(BUDGET_VARIABLE):
        return parse_size(text, BUDGET_VARIABLE)
    return min(DEFAULT_BUDGET, shutil.disk_usage(store.root).total // 5)


def layers_size(store: ImageStore) -> int:
    """How many bytes the layers of a store hold."""
    return sum(record.size for layer in store.layers.ids() if (record := store.layers.record(layer)))


async def collect(
    store: ImageStore, *, max_size: int | None = None, keep_imports: bool = False, dry_run: bool = False
) -> CollectedImages:
    """Collect garbage; with `max_size` until layers and caches hold no more bytes than that. `keep_imports` spares
    images that were imported: pier cannot get them again."""
    done = CollectedImages()
    if not store.root.is_dir():
        return done
    done.leftovers = [str(path) for path in await store.layers.sweep(dry_run=dry_run)]
    for path in _stale_downloads(store):
        done.leftovers.append(str(path))
        if not dry_run:
            path.unlink(missing_ok=True)
    async with store.only_one("gc"), store.layers.scratch() as away:
        caches = {cache.name: cache for cache in await store.caches.measured()}
        with store.users.collecting():
            choice = _Choice(store, caches, done)
            choice.make(max_size, keep_imports=keep_imports)
            if not dry_run:
                _carry_out(store, done, away)
        done.caches = [caches[name].id for name in done.caches]
    return done


async def list_cached(store: ImageStore) -> list[dict[str, Any]]:
    """What makes builds faster and belongs to no image, last used first: layers of build steps, cache directories."""
    needed = {layer for image in store.list() for layer in image.layers}
    rows = [
        (store.layers.last_used(id), "layer", record.source or id, record.size)
        for id in store.layers.ids()
        if id not in needed and (record := store.layers.record(id)) is not None
    ]
    rows += [(one.used, "directory", one.id, one.size) for one in await store.caches.measured()]
    return [
        {"kind": kind, "name": name, "size": size, "used": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(used))}
        for used, kind, name, size in sorted(rows, reverse=True)
    ]


def _carry_out(store: ImageStore, done: CollectedImages, away: Path) -> None:
    for reference in done.images:
        store.forget(reference)
    for layer in done.layers:
        store.layers.hide(layer, away)
    for name in done.caches:
        store.caches.hide(name, away)
    for step in store.steps.all():
        gone = step.layer and store.layers.path(step.layer) is None
        if gone or (not step.layer and step.used < time.time() - _STEPS_KEPT):
            store.steps.forget(step.key)


def _stale_downloads(store: ImageStore) -> list[Path]:
    """Downloads that were cut off and that nobody went on with."""
    place = store.root / "downloads"
    files = sorted(place.iterdir()) if place.is_dir() else []
    return [path for path in files if path.stat().st_mtime < time.time() - _DOWNLOADS_KEPT]


class _Choice:
    """What is to go, written into `done`."""

    def __init__(self, store: ImageStore, caches: dict[str, CacheDirectory], done: CollectedImages) -> None:
        self._store = store
        self._done = done
        self._records = {layer: record for layer in store.layers.ids() if (record := store.layers.record(layer))}
        self._caches = caches
        self._in_use = store.users.noted()
        done.size = sum(record.size for record in self._records.values())
        done.size += sum(cache.size for cache in caches.values())

    def make(self, max_size: int | None, *, keep_imports: bool) -> None:
        images = sorted(self._store.list(), key=lambda image: self._store.last_used(image.reference))
        needed = {layer for image in images for layer in image.layers} | self._in_use
        cached = {step.layer for step in self._store.steps.all()}
        for layer in [id for id in self._records if id not in needed | cached]:
            self._drop_layer(layer)
        if max_size is not None:
            self._drop_cached(max_size, needed)
            self._drop_images(max_size, images, keep_imports=keep_imports)

    def _drop_layer(self, layer: str) -> None:
        self._done.layers.append(layer)
        self._count(self._records.pop(layer).size)

    def _count(self, size: int) -> None:
        self._done.freed += size
        self._done.size -= size

    def _drop_cached(self, max_size: int, needed: set[str]) -> None:
        """What no image needs, whether a layer or a directory, by when it was last used."""
        rows = [(self._store.layers.last_used(id), id, "") for id in self._records if id not in needed]
        rows += [(one.used, "", name) for name, one in self._caches.items() if f"cache {name}" not in self._in_use]
        for _, layer, cache in sorted(rows):
            if self._done.size <= max_size:
                return
            if layer:
                self._drop_layer(layer)
            else:
                self._done.caches.append(cache)
                self._count(self._caches[cache].size)

    def _drop_images(self, max_size: int, images: list[ImageRecord], *, keep_imports: bool) -> None:
        """Images, least recently used first; a layer goes with the last image that needs it."""
        for position, image in enumerate(images):
            if self._done.size <= max_size:
                return
            if self._in_use.intersection(image.layers) or (keep_imports and image.origin == "import"):
                continue
            self._done.images.append(image.reference)
            kept = [other for other in images[:position] if other.reference not in self._done.images]
            still = {layer for other in (*kept, *images[position + 1 :]) for layer in other.layers}
            for layer in image.layers:
                if layer in self._records and layer not in still | self._in_use:
                    self._drop_layer(layer)


_held: WeakKeyDictionary[asyncio.AbstractEventLoop, WeakValueDictionary[str, asyncio.Lock]] = WeakKeyDictionary()


@asynccontextmanager
async def only_one(directory: Path, key: str) -> AsyncIterator[None]:
    """Hold `key` among all tasks and processes that use the same `directory`."""
    path = directory / hashlib.sha256(key.encode()).hexdigest()[:32]
    locks = _held.setdefault(asyncio.get_running_loop(), WeakValueDictionary())
    lock = locks.setdefault(str(path), asyncio.Lock())
    async with lock:
        directory.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            await _acquire(fd)
            yield
        finally:
            os.close(fd)


async def _acquire(fd: int) -> None:
    pause = 0.005
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            await asyncio.sleep(pause)
            pause = min(pause * 2, 0.2)
