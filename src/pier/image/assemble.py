"""Puts an image together from an OCI configuration and its layers' archives, wherever those came from."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pier.errors import ImageError
from pier.image import owner
from pier.image.model import Image, ImageConfig
from pier.image.records import Origin
from pier.image.reference import is_digest
from pier.image.store import ImageStore

_AT_ONCE = 3


@dataclass(frozen=True, slots=True)
class LayerSource:
    """A layer's archive: `fetch` gives its (compressed) file, and is called only if the store lacks the layer."""

    name: str
    fetch: Callable[[], Awaitable[Path]]


@dataclass(frozen=True, slots=True)
class Origins:
    """What is written down about where an image came from."""

    origin: Origin
    source: str
    digest: str = ""


async def assemble(
    store: ImageStore, reference: str | None, raw: bytes, layers: Sequence[LayerSource], origins: Origins
) -> Image:
    """Take the layers that the store lacks, check each against the configuration, and write the image down."""
    config = _parse(raw)
    root = config.get("rootfs")
    ids = (root.get("diff_ids") if isinstance(root, dict) else None) or []
    if not isinstance(ids, list) or not all(isinstance(id, str) and is_digest(id) for id in ids):
        raise ImageError("the configuration lists layers that are not sha256 digests", code="broken_archive")
    if len(ids) != len(layers):
        raise ImageError(
            f"the configuration lists {len(ids)} layers and the manifest {len(layers)}", code="broken_archive"
        )
    settings = config_of(config)
    store.prepare("layers")
    slots = asyncio.Semaphore(_AT_ONCE)

    async def take(id: str, source: LayerSource) -> None:
        async with slots:
            await _take(store, id, source, origins)

    try:
        async with asyncio.TaskGroup() as group:
            for id, source in dict(zip(ids, layers, strict=True)).items():
                group.create_task(take(id, source))
    except BaseExceptionGroup as problems:
        raise problems.exceptions[0] from None
    return store.put(reference, ids, settings, origin=origins.origin, source=origins.source, digest=origins.digest)


async def _take(store: ImageStore, id: str, source: LayerSource, origins: Origins) -> None:
    if store.layers.use(id) is not None:
        return
    async with store.only_one(f"layer {id}"):
        if store.layers.use(id) is not None:
            return
        archive = await source.fetch()
        async with store.layers.draft() as draft:
            made = await owner.run("unpack_archive", archive=str(archive), target=str(draft.path))
            if made["digest"] != id:
                raise ImageError(
                    f"the layer {source.name} unpacks to {made['digest']}, not to {id} as its image says", code="digest"
                )
            await draft.keep(id, size=made["size"], origin=origins.origin, source=origins.source)


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except ValueError as error:
        raise ImageError(f"the image's configuration is not JSON: {error}", code="broken_archive") from None
    if not isinstance(value, dict):
        raise ImageError("the image's configuration is not a JSON object", code="broken_archive")
    return value


def config_of(raw: dict[str, Any]) -> ImageConfig:
    """The settings of an OCI image configuration; `ImageError` if they are not of the right kinds."""
    try:
        return _config_of(raw.get("config") or {})
    except (AttributeError, TypeError, ValueError) as error:
        raise ImageError(f"the image's configuration is broken: {error}", code="broken_archive") from None


def _config_of(config: dict[str, Any]) -> ImageConfig:
    env = dict(row.partition("=")[::2] for row in config.get("Env") or [])
    return ImageConfig(
        env=env,
        workdir=config.get("WorkingDir") or "/",
        user=config.get("User") or "",
        entrypoint=tuple(config.get("Entrypoint") or ()),
        cmd=tuple(config.get("Cmd") or ()),
        shell=tuple(config.get("Shell") or ("/bin/sh", "-c")),
        labels=dict(config.get("Labels") or {}),
        exposed_ports=tuple(config.get("ExposedPorts") or ()),
        volumes=tuple(config.get("Volumes") or ()),
        stop_signal=config.get("StopSignal") or "",
        healthcheck=config.get("Healthcheck"),
        on_build=tuple(map(str, config.get("OnBuild") or ())),
    )
