"""`pier doctor`: what this machine can do, what is missing, and the command that fixes it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from pier.sandbox.contract import Finding


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def doctor(as_json: bool) -> None:
    """Check this machine and suggest fixes.

    The exit code is 1 when no backend can start sandboxes.
    """
    found = asyncio.run(_examine())
    usable = any(_is_usable(rows) for rows in found.values())
    if as_json:
        click.echo(json.dumps({name: [asdict(one) for one in rows] for name, rows in found.items()}, indent=2))
    else:
        for name, rows in found.items():
            click.echo(name)
            for one in rows:
                click.echo(f"  {'ok     ' if one.ok else 'missing'} {one.subject}: {one.detail}")
                if not one.ok and one.fix:
                    click.echo(f"          try: {one.fix}")
    raise click.exceptions.Exit(0 if usable else 1)


def usable_backends() -> dict[str, bool]:
    """Each built-in backend, and whether it can start sandboxes here."""
    return {name: _is_usable(rows) for name, rows in asyncio.run(_examine()).items()}


def _is_usable(rows: list[Finding]) -> bool:
    """A backend that tried to start a sandbox is as good as that went; of others everything must be well."""
    tried = [one.ok for one in rows if one.subject == "sandboxes"]
    return all(tried or [one.ok for one in rows])


async def _examine() -> dict[str, list[Finding]]:
    from pier.errors import PierError
    from pier.lease import Lease
    from pier.sandbox import BACKENDS, open_backend
    from pier.sandbox.contract import Finding

    found: dict[str, list[Finding]] = {}
    with Lease(label="pier doctor") as lease:
        for name in BACKENDS:
            try:
                async with open_backend(name, lease) as backend:
                    found[name] = await backend.doctor()
            except (PierError, OSError) as error:
                hint = error.hint if isinstance(error, PierError) else None
                found[name] = [Finding("sandboxes", False, str(error), hint or "")]
    return found
