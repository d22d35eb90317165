"""Takes images from a Docker engine, wherever it is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import quote

import aiohttp

from pier.errors import ImageError
from pier.image.importing import import_image
from pier.image.model import Image
from pier.image.reach import SshConnector, engine_address, open_connector, shown
from pier.image.store import ImageStore

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
