"""Removes what a store no longer needs.

Always: what dead processes left half made, and layers that neither an image nor a build's cache needs. With a size
budget also, least recently used first, what only makes builds faster (layers of build steps, the directories of
`RUN --mount=type=cache`), then images. What a living process uses is never removed. `pier gc` has a default budget and
removes only images that can be pulled or built again.
"""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pier.sizes import parse_size

if TYPE_CHECKING:
    from pier.image.layers import ImageRecord
    from pier.image.store import CacheDirectory, ImageStore


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
