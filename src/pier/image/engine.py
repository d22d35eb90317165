"""Takes images from a Docker engine, over its socket."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import quote

import aiohttp

from pier.errors import ImageError
from pier.image.importing import import_image
from pier.image.model import Image
from pier.image.store import ImageStore

_CHUNK = 1 << 20


def engine_address() -> str:
    """Where an engine is expected: `$DOCKER_HOST`, else the usual sockets; empty if there is none."""
    if address := os.environ.get("DOCKER_HOST"):
        return address
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    places = [Path("/var/run/docker.sock"), *([Path(runtime) / "docker.sock"] if runtime else [])]
    return next((f"unix://{place}" for place in places if place.is_socket()), "")


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
                return await import_image(store, archive, reference or name, origin="docker", told=f"{address} {name}")
    except (aiohttp.ClientError, TimeoutError, PermissionError) as error:
        raise ImageError(f"the Docker engine at {address} does not answer: {error}", code="no_engine") from error


@asynccontextmanager
async def _session(address: str) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    timeout = aiohttp.ClientTimeout(total=None, connect=10, sock_read=600)
    kind, _, rest = address.partition("://")
    if kind == "unix":
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(rest), timeout=timeout) as session:
            yield session, "http://docker"
    elif kind in ("tcp", "http", "https"):
        async with aiohttp.ClientSession(timeout=timeout) as session:
            yield session, f"{'http' if kind == 'tcp' else kind}://{rest}"
    else:
        raise ImageError(
            f"DOCKER_HOST={address} is not supported: only unix:// and tcp:// are", code="no_engine", blame="user"
        )
