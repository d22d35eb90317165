"""Removes what a store no longer needs.

Always: what dead processes left half made, and layers that no image needs. With a size budget also, least recently
used first, layers that only serve as a build's cache, then images. What a living process uses is never removed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pier.image.store import ImageStore

_DOWNLOADS_KEPT = 24 * 3600


@dataclass(slots=True)
class Collected:
    """What was removed (or, in a dry run, would be), and how many bytes are left."""

    images: list[str] = field(default_factory=list)
    layers: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    freed: int = 0
    size: int = 0


async def collect(store: ImageStore, *, max_size: int | None = None, dry_run: bool = False) -> Collected:
    """Collect garbage; with `max_size` until the layers hold no more bytes than that."""
    done = Collected()
    if not store.root.is_dir():
        return done
    done.leftovers = [str(path) for path in await store.layers.sweep(dry_run=dry_run)]
    for path in _stale_downloads(store):
        done.leftovers.append(str(path))
        if not dry_run:
            path.unlink(missing_ok=True)
    async with store.only_one("gc"), store.layers.scratch() as away:
        with store.users.collecting():
            _choose(store, max_size, done)
            if not dry_run:
                for reference in done.images:
                    store.forget(reference)
                for layer in done.layers:
                    store.layers.hide(layer, away)
    return done


def _stale_downloads(store: ImageStore) -> list[Path]:
    """Downloads that were cut off and that nobody went on with."""
    place = store.root / "downloads"
    files = sorted(place.iterdir()) if place.is_dir() else []
    return [path for path in files if path.stat().st_mtime < time.time() - _DOWNLOADS_KEPT]


def _choose(store: ImageStore, max_size: int | None, done: Collected) -> None:
    """Fill `done` with what is to go."""
    records = {layer: record for layer in store.layers.ids() if (record := store.layers.record(layer))}
    images = sorted(store.list(), key=lambda image: store.last_used(image.reference))
    in_use = store.users.noted()
    needed = {layer for image in images for layer in image.layers}
    done.size = sum(record.size for record in records.values())

    def drop(layer: str) -> None:
        done.layers.append(layer)
        done.freed += records[layer].size
        done.size -= records.pop(layer).size

    for layer in [id for id, record in records.items() if id not in needed | in_use and record.origin != "build"]:
        drop(layer)
    if max_size is None:
        return
    cache = sorted((id for id in records if id not in needed | in_use), key=store.layers.last_used)
    while done.size > max_size and cache:
        drop(cache.pop(0))
    for position, image in enumerate(images):
        if done.size <= max_size:
            return
        if in_use.intersection(image.layers):
            continue
        done.images.append(image.reference)
        still = {layer for other in images[position + 1 :] for layer in other.layers}
        kept = [other for other in images[:position] if other.reference not in done.images]
        still |= {layer for other in kept for layer in other.layers}
        for layer in image.layers:
            if layer in records and layer not in still | in_use:
                drop(layer)
