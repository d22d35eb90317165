"""`pier gc`: remove leftovers of dead runs, and images beyond the store's budget."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from pier.cli.main import JSON, echo
from pier.errors import PierError
from pier.sizes import parse_size, size_text

if TYPE_CHECKING:
    from pier.image.store import CollectedImages
    from pier.lease import Destroy, Held, Swept


@click.command()
@click.option(
    "--max-size",
    help="Size of the image store to keep, such as 20G. [default: $PIER_IMAGE_BUDGET or a fifth of the disk up to 50G]",
)
@click.option("--dry-run", is_flag=True, help="Only print what would be removed.")
@JSON
def gc(max_size: str | None, dry_run: bool, as_json: bool) -> None:
    """Remove leftovers of dead runs, and the least recently used images.

    Each sandbox, container and network was recorded by its owner before it was created; those of running owners are
    kept. From the image store, build caches and then images that can be pulled or built again are removed until it fits
    the budget. Exits with 1 if something could not be removed.
    """
    swept, images = asyncio.run(_collect(max_size, dry_run))
    verb = "would remove" if dry_run else "removed"
    lines = [f"{verb} {held.kind} {held.id}" for held in swept.removed]
    for held, why in swept.failed:
        click.echo(f"could not remove {held.kind} {held.id}: {why}", err=True)
    if parts := len(images.images) + len(images.layers) + len(images.caches) + len(images.leftovers):
        left = f"{size_text(images.freed)} freed, {size_text(images.size)} left in the image store"
        lines.append(f"{verb} {len(images.images)} images and {parts - len(images.images)} layers and caches: {left}")
    removed = [_row(held) for held in swept.removed]
    failed = [_row(held) | {"reason": why} for held, why in swept.failed]
    report = {"dry_run": dry_run, "removed": removed, "failed": failed, "images": asdict(images)}
    echo(report, as_json, lines or ([] if failed else ["nothing to remove"]))
    raise click.exceptions.Exit(1 if swept.failed else 0)


def _row(held: Held) -> dict[str, Any]:
    return {"kind": held.kind, "id": held.id, "owner": held.owner}


async def _collect(max_size: str | None, dry_run: bool) -> tuple[Swept, CollectedImages]:
    from pier.image.store import ImageStore, collect, default_budget

    limit = None if max_size is None else parse_size(max_size, "--max-size")
    swept = await _sweep(dry_run)
    store = ImageStore()
    if not store.root.is_dir():
        return swept, await collect(store)
    if limit is None:
        limit = default_budget(store)
    return swept, await collect(store, max_size=limit, keep_imports=True, dry_run=dry_run)


async def _sweep(dry_run: bool) -> Swept:
    from pier.lease import Lease, sweep
    from pier.sandbox import BACKENDS, open_backend

    destroyers: dict[str, Destroy] = {}
    async with AsyncExitStack() as stack:
        lease = stack.enter_context(Lease(label="pier gc"))
        for name in BACKENDS:
            try:
                backend = await stack.enter_async_context(open_backend(name, lease))
            except (PierError, OSError):
                continue
            for kind in backend.kinds:
                destroyers.setdefault(kind, backend.destroy)
        return await sweep(destroyers, dry_run=dry_run)
