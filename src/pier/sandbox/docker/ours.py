"""The images that pier brought to an engine: which they are, and the removal of those that nothing uses.

Only names that pier gives count. Snapshots are not among them: they belong to a run, and end with it or by `pier gc`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiodocker
from aiodocker.exceptions import DockerError

from pier.image.fetch import engine_address
from pier.image.model import Image, OnProgress
from pier.sandbox.docker.client import Client, connect, engine_error
from pier.sandbox.docker.holding import letting_go
from pier.sandbox.docker.images import EngineImages, collected_name
from pier.sandbox.docker.volumes import collect_volumes


@dataclass(frozen=True, slots=True)
class OurImage:
    """An image at an engine. `in_use`: some container is made from it."""

    reference: str
    id: str
    size: int
    created: int
    in_use: bool


async def list_ours() -> list[OurImage]:
    """The images that pier brought to the engine, oldest first."""
    async with _engine() as docker:
        return await _list(docker)


async def collect_ours(*, max_size: int | None = None, dry_run: bool = False) -> list[OurImage]:
    """Remove images that no container uses or is about to use, oldest first; with `max_size` only until the rest has no
    more bytes."""
    async with _engine() as docker:
        found = await _list(docker)
        size = sum(image.size for image in found)
        removed: list[OurImage] = []
        for image in found:
            if image.in_use or (max_size is not None and size <= max_size):
                continue
            with letting_go(image.reference) as is_free:
                if is_free and (dry_run or await _remove(docker, image)):
                    removed.append(image)
                    size -= image.size
        return removed


async def collect_our_volumes(*, dry_run: bool = False) -> list[str]:
    """Remove the volumes with copies of directories that no container uses; their names."""
    async with _engine() as docker:
        return await collect_volumes(docker, dry_run=dry_run)


async def pull_there(reference: str, on_progress: OnProgress | None = None) -> Image:
    """Have the engine pull an image, which it then has as its own."""
    async with _engine() as docker:
        return await EngineImages(docker).pull(reference, on_progress)


async def _list(docker: aiodocker.Docker) -> list[OurImage]:
    rows: list[dict[str, Any]] = await docker._query_json("images/json")
    containers: list[dict[str, Any]] = await docker._query_json("containers/json", params={"all": "1"})
    used = {container["ImageID"] for container in containers}
    found = [
        OurImage(name, row["Id"], row["Size"], row["Created"], row["Id"] in used)
        for row in rows
        for tag in row.get("RepoTags") or []
        if (name := collected_name(tag)) is not None
    ]
    return sorted(found, key=lambda image: (image.created, image.reference))


async def _remove(docker: aiodocker.Docker, image: OurImage) -> bool:
    """Whether it is gone; an engine keeps what a container that was started meanwhile uses."""
    try:
        await docker.images.delete(image.reference)
    except DockerError as error:
        if error.status in (404, 409):
            return error.status == 404
        raise
    return True


@asynccontextmanager
async def _engine() -> AsyncIterator[Client]:
    docker, _ = await connect(engine_address())
    try:
        yield docker
    except DockerError as error:
        raise engine_error(error) from error
    finally:
        await docker.close()
