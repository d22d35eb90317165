"""Finds an image that the store does not have: in a Docker engine if one answers, then in its registry."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import aiohttp

from pier.errors import ImageError
from pier.image.importing import import_image
from pier.image.model import Image, OnProgress, is_digest, parse
from pier.image.reach import SshConnector, engine_address, open_connector, shown
from pier.image.store import ImageStore

if TYPE_CHECKING:
    from pier.image.registry import Registry


async def fetch(
    store: ImageStore,
    reference: str,
    *,
    pull: bool = True,
    on_progress: OnProgress | None = None,
    for_task: bool = False,
) -> Image:
    """Take an image into the store from wherever it is found. The error of the last place says what was tried."""
    tried = [f"pier's store ({store.root}): not there"]
    try:
        if (found := await _from_engine(store, reference, tried)) is not None:
            return found
        if pull and not is_digest(reference):
            return await pull_image(store, reference, on_progress=on_progress, for_task=for_task)
        tried.append("registry: not asked")
    except ImageError as error:
        if error.code not in ("not_found", "unauthorized", "unreachable"):
            raise
        tried.append(f"registry: {error.message}")
        raise _not_found(reference, tried, error) from error
    raise _not_found(reference, tried)


async def _from_engine(store: ImageStore, reference: str, tried: list[str]) -> Image | None:

    try:
        found = await take_from_engine(store, reference)
    except ImageError as error:
        if error.code != "no_engine":
            raise
        tried.append(f"Docker engine: {error.message}")
        return None
    if found is None:
        tried.append("Docker engine: not there")
    return found


async def pull_image(
    store: ImageStore, reference: str, *, on_progress: OnProgress | None = None, for_task: bool = False
) -> Image:
    """Pull an image from its registry, also if the store has one of that name: only what changed is downloaded."""
    from pier.image.importing import LayerSource, Origins, assemble
    from pier.image.registry import open_registry
    from pier.image.store import canonical

    canonical(reference)
    parsed = parse(reference)
    tell = on_progress or (lambda _: None)
    store.prepare("downloads")
    async with open_registry(parsed, for_task=for_task) as registry:
        tell(f"asking {parsed.registry} for {parsed.familiar}")
        manifest = await registry.manifest()
        raw = await registry.blob(manifest.config)
        done: list[Path] = []

        def source(digest: str) -> LayerSource:
            return LayerSource(digest, lambda: _download(store, registry, digest, tell, done))

        layers = [source(digest) for digest in manifest.layers]
        try:
            return await assemble(store, reference, raw, layers, Origins("pull", str(parsed), manifest.digest))
        finally:
            for path in done:
                path.unlink(missing_ok=True)


async def _download(store: ImageStore, registry: Registry, digest: str, tell: OnProgress, done: list[Path]) -> Path:
    target = store.root / "downloads" / digest.removeprefix("sha256:")
    async with store.only_one(f"download {digest}"):
        tell(f"  {digest[7:19]}  downloading")
        await registry.download(digest, target, tell)
    done.append(target)
    tell(f"  {digest[7:19]}  unpacking")
    return target


def _not_found(reference: str, tried: list[str], error: ImageError | None = None) -> ImageError:
    unreachable = error is not None and error.code == "unreachable"
    return ImageError(
        f"the image {reference!r} was not found; tried:\n" + "\n".join(f"  - {line}" for line in tried),
        code="unreachable" if unreachable else "not_found",
        blame="infra" if unreachable else "user",
        retryable=unreachable,
        hint=f"pier image import ROOTFS.tar {reference}",
    )


_CHUNK = 1 << 20

__all__ = ["engine_address", "take_from_engine"]


async def take_from_engine(store: ImageStore, name: str, reference: str | None = None) -> Image | None:
    """Import an engine's image; None if it has none of that name. No engine is an `ImageError` (code `no_engine`)."""
    address = engine_address()
    if not address:
        raise ImageError("no Docker engine was found", code="no_engine", hint="start one, or set DOCKER_HOST")
    store.prepare("tmp")
    try:
        async with _session(address) as (session, base):
            path = f"{base}/images/{quote(name, safe='/:@')}"
            async with session.get(f"{path}/json") as answer:
                if answer.status in (400, 404):
                    return None
                answer.raise_for_status()
            async with store.layers.scratch() as directory, session.get(f"{path}/get") as answer:
                answer.raise_for_status()
                archive = directory / "image.tar"
                with archive.open("wb") as sink:
                    async for chunk in answer.content.iter_chunked(_CHUNK):
                        sink.write(chunk)
                return await import_image(
                    store, archive, reference or name, origin="docker", told=f"{shown(address)} {name}"
                )
    except (aiohttp.ClientError, TimeoutError, PermissionError) as error:
        raise ImageError(f"the Docker engine at {shown(address)} does not answer: {error}", code="no_engine") from error


@asynccontextmanager
async def _session(address: str) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    timeout = aiohttp.ClientTimeout(total=None, connect=60, sock_read=600)
    connector, base = open_connector(address)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        yield session, base
    if isinstance(connector, SshConnector):
        await connector.ended()
