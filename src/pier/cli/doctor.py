"""`pier doctor`: the capabilities of this machine, missing requirements, and the commands that fix them."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from pier.cli.main import JSON, echo
from pier.errors import PierError

if TYPE_CHECKING:
    from pier.sandbox.contract import Finding


@click.command()
@JSON
def doctor(as_json: bool) -> None:
    """Check this machine and suggest fixes.

    Exits with 1 if no backend can start sandboxes.
    """
    found = asyncio.run(_examine())
    usable = any(_is_usable(rows) for rows in found.values())
    lines: list[str] = []
    for name, rows in found.items():
        lines.append(name)
        for one in rows:
            lines.append(f"  {'ok     ' if one.ok else 'missing'} {one.subject}: {one.detail}")
            lines += [f"          try: {one.fix}"] if not one.ok and one.fix else []
    echo({name: [asdict(one) for one in rows] for name, rows in found.items()}, as_json, lines)
    raise click.exceptions.Exit(0 if usable else 1)


def usable_backends() -> dict[str, bool]:
    """Return each built-in backend, and whether it can start sandboxes on this machine."""
    return {name: _is_usable(rows) for name, rows in asyncio.run(_examine()).items()}


def _is_usable(rows: list[Finding]) -> bool:
    """Whether starting a sandbox succeeded or, if it was not tried, all checks passed."""
    tried = [one.ok for one in rows if one.subject == "sandboxes"]
    return all(tried or [one.ok for one in rows])


async def _examine() -> dict[str, list[Finding]]:
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
