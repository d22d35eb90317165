"""`pier agent`: the known agents, and the packs that install them in sandboxes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from pier.cli.main import JSON, echo
from pier.sizes import columns


@click.group()
def agent() -> None:
    """Build and inspect agent packs."""


def _described(name: str) -> dict[str, Any]:
    from pier.agent.contract import find_agent
    from pier.agent.pack import PackStore

    kind = find_agent(name)
    row: dict[str, Any] = {"name": name, "dialect": kind.dialect, "options": list(kind.options)}
    if kind.pack is None:
        return {**row, "pack": None}
    found = PackStore().find(kind.pack)
    row["pack"] = {
        "source": kind.pack.source,
        "package": kind.pack.package,
        "version": kind.pack.version,
        "built": found is not None,
        "path": str(found.path) if found else None,
        "digest": found.digest if found else None,
        "bytes": found.bytes if found else None,
    }
    return row


@agent.command("list")
@JSON
def list_(as_json: bool) -> None:
    """List the agents and the state of their packs."""
    from pier.agent.contract import agent_names

    rows = [_described(name) for name in agent_names()]
    cells = []
    for row in rows:
        pack = row["pack"] or {}
        state = f"built, {pack['bytes'] // 1_000_000} MB" if pack.get("built") else "built on first use"
        cells.append((row["name"], row["dialect"], pack.get("version"), state if pack else None))
    echo(rows, as_json, columns(("AGENT", "DIALECT", "VERSION", "PACK"), *cells))


@agent.command()
@click.argument("name")
@JSON
def show(name: str, as_json: bool) -> None:
    """Show one agent: its dialect, its options and its pack."""
    row = _described(name.partition("@")[0])
    pack = row["pack"] or {}
    lines = [row["name"], f"  dialect   {row['dialect'] or 'none: it calls no model'}"]
    lines += [f"  options   {', '.join(row['options']) or 'none'}"]
    lines += [f"  {key:9} {value}" for key, value in pack.items() if value is not None]
    echo(row, as_json, lines)


@agent.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME[@VERSION]...")
@JSON
def pack(names: tuple[str, ...], as_json: bool) -> None:
    """Build the packs of agents before their first run. Existing packs are kept."""
    import asyncio

    from pier.agent.contract import pack_spec
    from pier.agent.pack import ensure_pack

    rows = []
    for name in names:
        spec = pack_spec(name)
        if spec is None:
            rows.append({"agent": name, "path": None})
            continue
        built = asyncio.run(ensure_pack(spec, lambda line, name=name: click.echo(f"{name}: {line}", err=True)))
        rows.append({"agent": name, "version": built.version, "digest": built.digest, "path": str(built.path)})
    echo(rows, as_json, [f"{row['agent']}  {row['path'] or 'needs no pack'}" for row in rows])


@agent.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME[@VERSION]...")
@JSON
def rm(names: tuple[str, ...], as_json: bool) -> None:
    """Remove the packs of agents, by default all versions."""
    from pier.agent.contract import pack_spec
    from pier.agent.pack import PackStore

    store, removed = PackStore(), []
    for name in names:
        spec = pack_spec(name)
        for found in store.all():
            pinned = "@" in name and spec is not None and spec.version != found.version
            if spec is not None and found.package == spec.package and not pinned:
                store.remove(found)
                removed.append({"agent": name, "version": found.version, "digest": found.digest})
    echo(removed, as_json, [f"removed {row['agent']} {row['version']}" for row in removed] or ["nothing to remove"])


@agent.command()
@JSON
def doctor(as_json: bool) -> None:
    """Check existing packs and the requirements for building packs."""
    from pier.agent.pack.store import check_packs

    findings = check_packs()
    rows = [asdict(finding) for finding in findings]
    lines = [
        f"{'ok ' if f.ok else 'BAD'}  {f.subject}: {f.detail}{f'  (try: {f.fix})' if f.fix else ''}" for f in findings
    ]
    echo(rows, as_json, lines)
    if not all(f.ok for f in findings):
        raise SystemExit(1)
