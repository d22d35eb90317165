"""`pier image`: import, pull, build, list, inspect and remove images."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from pier.cli.main import JSON, echo
from pier.cli.options import PATH
from pier.errors import ImageError
from pier.sizes import columns, parse_size, size_text

if TYPE_CHECKING:
    from pier.image.layers import ImageRecord
    from pier.image.model import Image
    from pier.image.store import ImageStore

_progress = partial(click.echo, err=True)
_env = click.option(
    "--env",
    type=click.Choice(["local", "docker"]),
    default="local",
    help="Location of the images: pier's store, or a Docker engine.",
)


@click.group(name="image")
def image() -> None:
    """Import, pull, build and remove images.

    An image is the root file system of a sandbox. `host`, this machine's own root, is built in.
    """


@image.command(name="import")
@click.argument("source", required=False, type=click.Path(path_type=Path, allow_dash=True))
@click.argument("name", required=False)
@click.option("--from-docker", metavar="IMAGE", help="Import an image from the Docker engine.")
@JSON
def import_(source: Path | None, name: str | None, from_docker: str | None, as_json: bool) -> None:
    """Import a root file system, a docker-archive or an OCI layout.

    SOURCE is a tar file or a directory, or `-` for a tar on stdin. With --from-docker, the optional first argument is
    the new name.
    """
    if from_docker is not None:
        from pier.image.importing import take_from_engine

        made = asyncio.run(take_from_engine(_store(), from_docker, str(source) if source else None))
        if made is None:
            raise ImageError(f"the Docker engine has no image {from_docker!r}", code="not_found", blame="user")
    elif source is None:
        raise click.UsageError("missing SOURCE or --from-docker")
    else:
        made = asyncio.run(_import(source, name))
    _print_image(made, as_json)


async def _import(source: Path, name: str | None) -> Image:
    from pier.image.importing import import_image

    store = _store()
    if str(source) != "-":
        return await import_image(store, source, name)
    store.prepare("tmp")
    async with store.layers.scratch() as directory:
        with (directory / "stdin.tar").open("wb") as sink:
            shutil.copyfileobj(sys.stdin.buffer, sink, 1 << 20)
        return await import_image(store, directory / "stdin.tar", name, told="stdin")


@image.command()
@click.argument("name")
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
@_env
@JSON
def pull(name: str, quiet: bool, env: str, as_json: bool) -> None:
    """Pull an image from its registry. With `--env docker`, into the Docker engine."""
    from pier.image.importing import pull_image
    from pier.sandbox.docker.images import pull_there

    on_progress = None if quiet else _progress
    work = pull_there(name, on_progress) if env == "docker" else pull_image(_store(), name, on_progress=on_progress)
    _print_image(asyncio.run(work), as_json)


@image.command()
@click.argument("context", default=".", type=PATH)
@click.option("--file", "dockerfile", type=PATH, help="Default: CONTEXT/Dockerfile.")
@click.option("--tag", help="Name of the image.")
@click.option("--build-arg", "build_args", multiple=True, metavar="NAME=VALUE", help="Value of an ARG; repeatable.")
@click.option("--target", help="Stage to build, instead of the last one.")
@click.option("--network", type=click.Choice(["public", "none"]), default="public", help="Network of RUN and ADD.")
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
@JSON
def build(
    context: Path,
    dockerfile: Path | None,
    build_args: tuple[str, ...],
    network: Literal["public", "none"],
    quiet: bool,
    as_json: bool,
    tag: str | None,
    target: str | None,
) -> None:
    """Build an image from a Dockerfile, without a daemon."""
    from pier.image.build import build_image
    from pier.network.policy import NetworkPolicy
    from pier.sandbox.opening import open_runner

    values = {}
    for row in build_args:
        key, equals, value = row.partition("=")
        values[key] = value if equals else os.environ.get(key, "")

    async def work() -> Image:
        async with open_runner() as runner:
            return await build_image(
                _store(),
                context,
                dockerfile,
                build_args=values,
                runner=runner,
                network=NetworkPolicy(network),
                on_progress=None if quiet else _progress,
                tag=tag,
                target=target,
            )

    _print_image(asyncio.run(work()), as_json)


@image.command(name="list")
@click.option("--cached", is_flag=True, help="List build caches instead: unused layers, RUN --mount=type=cache.")
@_env
@JSON
def list_(cached: bool, env: str, as_json: bool) -> None:
    """List images. With `--env docker`, those that pier added to the Docker engine."""
    if env == "docker":
        _list_engine(as_json)
    elif cached:
        _list_cached(as_json)
    else:
        store = _store()
        rows = [_summary(store, record) for record in store.list()]
        heads = ("IMAGE", "DIGEST", "LAYERS", "SIZE", "FROM")
        cells = [(r["reference"], r["digest"][7:19], r["layers"], size_text(r["size"]), r["origin"]) for r in rows]
        none = ["no images except the built-in `host`; try: pier image import ROOTFS.tar NAME"]
        echo(rows, as_json, columns(heads, *cells) if rows else none)


def _list_cached(as_json: bool) -> None:
    from pier.image.store import list_cached

    rows = asyncio.run(list_cached(_store()))
    cells = [(row["kind"], size_text(row["size"]), row["used"], row["name"]) for row in rows]
    total = size_text(sum(row["size"] for row in rows))
    last = f"{total} in total; to keep only the last used: pier image gc --max-size SIZE" if rows else "no build caches"
    echo(rows, as_json, [*columns(*cells), last])


def _list_engine(as_json: bool) -> None:
    from dataclasses import asdict

    from pier.sandbox.docker.images import list_pier_images

    found = asyncio.run(list_pier_images())
    cells = [(one.reference, one.id[7:19], size_text(one.size), "in use" if one.in_use else "") for one in found]
    none = ["the Docker engine has no images from pier"]
    echo([asdict(one) for one in found], as_json, columns(*cells) or none)


@image.command()
@click.argument("name")
@JSON
def inspect(name: str, as_json: bool) -> None:
    """Show the layers and settings of an image."""
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
    import yaml

    echo(value, as_json, [yaml.safe_dump(value, sort_keys=False, allow_unicode=True).rstrip()])


@image.command()
@click.argument("names", nargs=-1, required=True)
@JSON
def rm(names: tuple[str, ...], as_json: bool) -> None:
    """Remove images and their unshared layers."""
    store = _store()
    for name in names:
        asyncio.run(store.remove(name))
    echo({"removed": names}, as_json, (f"removed {name}" for name in names))


@image.command()
@click.option("--max-size", help="Remove the least recently used until the rest fits in this size, such as 20G.")
@click.option("--dry-run", is_flag=True, help="Only print what would be removed.")
@_env
@JSON
def gc(max_size: str | None, dry_run: bool, env: str, as_json: bool) -> None:
    """Remove incomplete and unreferenced files. With --max-size, also the least recently used build caches, then
    images.

    With `--env docker`: the images that pier added to the engine and that no container uses, oldest first, and, without
    --max-size, its volumes with copies of packs. Other images are never touched.
    """
    from dataclasses import asdict

    from pier.image.store import collect

    limit = None if max_size is None else parse_size(max_size, "--max-size")
    if env == "docker":
        _collect_engine(limit, dry_run, as_json)
        return
    done = asyncio.run(collect(_store(), max_size=limit, dry_run=dry_run))
    counts = f"{len(done.images)} images, {len(done.layers)} layers, {len(done.caches)} caches"
    sizes = f"{size_text(done.freed)}; {size_text(done.size)} are left"
    verb = "would remove" if dry_run else "removed"
    echo(asdict(done), as_json, [f"{verb} {counts} and {len(done.leftovers)} leftovers, {sizes}"])


def _collect_engine(limit: int | None, dry_run: bool, as_json: bool) -> None:
    from pier.sandbox.docker.images import collect_pier_images, collect_pier_volumes

    removed = asyncio.run(collect_pier_images(max_size=limit, dry_run=dry_run))
    volumes = asyncio.run(collect_pier_volumes(dry_run=dry_run)) if limit is None else []
    freed = sum(one.size for one in removed)
    summary = {"images": [one.reference for one in removed], "volumes": volumes, "freed": freed}
    more = f" and {len(volumes)} volumes" if volumes else ""
    verb = "would remove" if dry_run else "removed"
    echo(summary, as_json, [f"{verb} {len(removed)} images{more}, {size_text(freed)}"])


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


def _print_image(made: Image, as_json: bool) -> None:
    value = {"reference": made.reference, "digest": made.digest, "layers": [str(path) for path in made.layers]}
    echo(value, as_json, [f"{made.reference}  {made.digest}"])
