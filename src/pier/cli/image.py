"""`pier image`: import, pull, build, list, look at and remove images."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from pier.image.model import Image
    from pier.image.records import ImageRecord
    from pier.image.store import ImageStore

_json = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")


@click.group(name="image")
def image() -> None:
    """Import, pull, build and remove images.

    An image is what the root of a sandbox is made from. `host`, this machine's own root, is built in.
    """


@image.command(name="import")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("name", required=False)
@_json
def import_(source: Path, name: str | None, as_json: bool) -> None:
    """Import a root file system (tar or directory), a docker-archive or an OCI layout."""
    from pier.image.importing import import_image

    _tell(asyncio.run(import_image(_store(), source, name)), as_json)


@image.command(name="list")
@_json
def list_(as_json: bool) -> None:
    """List the images of the store."""
    store = _store()
    rows = [_summary(store, record) for record in store.list()]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    if not rows:
        click.echo("no images yet; `host` is always there. Try: pier image import ROOTFS.tar NAME")
        return
    width = max(len(row["reference"]) for row in rows)
    click.echo(f"{'IMAGE':{width}}  DIGEST        LAYERS      SIZE  FROM")
    for row in rows:
        size = _size_text(row["size"])
        name = f"{row['reference']:{width}}"
        click.echo(f"{name}  {row['digest'][7:19]}  {row['layers']:6}  {size:>8}  {row['origin']}")


@image.command()
@click.argument("name")
@_json
def inspect(name: str, as_json: bool) -> None:
    """Show an image: its layers and the settings that a sandbox starts with."""
    store = _store()
    if name == "host":
        found = asyncio.run(store.resolve(name))
        value: dict[str, Any] = {"reference": found.reference, "digest": found.digest, "on_host": True, "layers": []}
    else:
        record = store.record(name)
        value = {**_summary(store, record), **record.model_dump(mode="json", exclude={"reference", "layers"})}
        value["layers"] = [
            {"id": layer, "size": known.size if (known := store.layers.record(layer)) else None, "path": str(path)}
            for layer, path in zip(record.layers, store.image(record).layers, strict=True)
        ]
    if as_json:
        click.echo(json.dumps(value, indent=2))
        return
    import yaml

    click.echo(yaml.safe_dump(value, sort_keys=False, allow_unicode=True).rstrip())


@image.command()
@click.argument("names", nargs=-1, required=True)
@_json
def rm(names: tuple[str, ...], as_json: bool) -> None:
    """Remove images, and the layers that nothing else needs."""
    store = _store()
    for name in names:
        asyncio.run(store.remove(name))
    click.echo(json.dumps({"removed": list(names)}) if as_json else "\n".join(f"removed {name}" for name in names))


@image.command()
@click.option("--max-size", help="Remove least recently used images until the rest fits, such as 20G.")
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@_json
def gc(max_size: str | None, dry_run: bool, as_json: bool) -> None:
    """Remove what is half made or not needed, and with a budget what was not used for longest."""
    from dataclasses import asdict

    from pier.image.collect import collect

    limit = None if max_size is None else _parse_size(max_size)
    done = asyncio.run(collect(_store(), max_size=limit, dry_run=dry_run))
    if as_json:
        click.echo(json.dumps(asdict(done), indent=2))
        return
    verb = "would remove" if dry_run else "removed"
    click.echo(
        f"{verb} {len(done.images)} images, {len(done.layers)} layers and {len(done.leftovers)} leftovers, "
        f"{_size_text(done.freed)}; {_size_text(done.size)} are left"
    )


def _store() -> ImageStore:
    from pier.image.store import ImageStore

    return ImageStore()


def _summary(store: ImageStore, record: ImageRecord) -> dict[str, Any]:
    from pier.image.store import familiar

    sizes = [known.size for layer in record.layers if (known := store.layers.record(layer))]
    return {
        "reference": familiar(record.reference),
        "digest": record.digest,
        "layers": len(record.layers),
        "size": sum(sizes),
        "origin": record.origin,
        "created": record.created,
    }


def _tell(made: Image, as_json: bool) -> None:
    if as_json:
        value = {"reference": made.reference, "digest": made.digest, "layers": [str(path) for path in made.layers]}
        click.echo(json.dumps(value, indent=2))
    else:
        click.echo(f"{made.reference}  {made.digest}")


def _parse_size(text: str) -> int:
    units = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
    number = text.strip().lower().removesuffix("b").removesuffix("i")
    unit = number[-1:] if number[-1:] in units and not number[-1:].isdigit() else ""
    try:
        return int(float(number.removesuffix(unit)) * units[unit])
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a size such as 500M or 20G", param_hint="--max-size") from None


def _size_text(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
