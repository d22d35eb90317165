"""`pier gc`: remove what dead runs left behind, and nothing else."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from pier.lease import Destroy, Swept


@click.command()
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def gc(dry_run: bool, as_json: bool) -> None:
    """Remove what dead runs left behind.

    Each sandbox, container and network was written down by its owner before it was made; what belongs to an owner that
    still runs is not touched. The exit code is 1 when something could not be removed.
    """
    swept = asyncio.run(_sweep(dry_run))
    if as_json:
        removed = [{"kind": held.kind, "id": held.id, "owner": held.owner} for held in swept.removed]
        failed = [{"kind": held.kind, "id": held.id, "owner": held.owner, "reason": why} for held, why in swept.failed]
        click.echo(json.dumps({"dry_run": dry_run, "removed": removed, "failed": failed}, indent=2))
    else:
        for held in swept.removed:
            click.echo(f"{'would remove' if dry_run else 'removed'} {held.kind} {held.id}")
        for held, why in swept.failed:
            click.echo(f"could not remove {held.kind} {held.id}: {why}", err=True)
        if not swept.removed and not swept.failed:
            click.echo("nothing to remove")
    raise click.exceptions.Exit(1 if swept.failed else 0)


async def _sweep(dry_run: bool) -> Swept:
    from pier.errors import PierError
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
