"""Images at an engine: what is there is used as it is; what is in pier's store is brought there once.

Has an engine pull an image from its registry, and tells how far it is.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import re
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import IO, Any

import aiodocker
from aiodocker.exceptions import DockerError

from pier.errors import ImageError
from pier.image.importing import config_of
from pier.image.model import Image, OnProgress, Reference, parse
from pier.image.registry import find_credentials
from pier.sandbox.docker.client import DISK_FULL, SPACE_HINT, is_disk_full
from pier.sandbox.docker.flatten import write_archive, write_flat
from pier.sandbox.docker.holding import holding, making, sending

_DONE = ("Pull complete", "Already exists")


async def pull(docker: aiodocker.Docker, reference: str, on_progress: Callable[[str], None] | None = None) -> None:
    """Pull `reference` with the credentials that `docker login` left. `ImageError` with the code `not_found`,
    `unauthorized` or `unreachable` says why it could not."""
    named = parse(reference)
    tell = on_progress or (lambda _: None)
    params = {"fromImage": f"{named.registry}/{named.repository}", "tag": named.digest or named.tag}
    layers: dict[str, str] = {}
    try:
        async with docker._query("images/create", "POST", params=params, headers=await _headers(named)) as answer:
            async for line in answer.content:
                message: dict[str, Any] = json.loads(line) if line.strip() else {}
                if "error" in message:
                    raise _failure(reference, str(message["error"]))
                _tell(message, layers, tell)
    except DockerError as error:
        raise _failure(reference, error.message if isinstance(error.message, str) else str(error)) from error


async def _headers(named: Reference) -> dict[str, str]:
    found = await find_credentials(named.registry)
    if found is None:
        return {}
    who = {"username": found.username, "password": found.password, "serveraddress": named.registry}
    if found.identity_token:
        who = {"identitytoken": found.identity_token, "serveraddress": named.registry}
    return {"X-Registry-Auth": base64.urlsafe_b64encode(json.dumps(who).encode()).decode()}


def _tell(message: dict[str, Any], layers: dict[str, str], tell: Callable[[str], None]) -> None:
    """One line for each step of each layer, not for each piece of it."""
    status, layer = str(message.get("status", "")), str(message.get("id", ""))
    size = (message.get("progressDetail") or {}).get("total")
    if not layer or layers.get(layer) == status or "Pulling from" in status:
        return
    layers[layer] = status
    done = sum(each in _DONE for each in layers.values())
    told = f" of {size / 1e6:.1f} MB" if size else ""
    tell(f"{layer}: {status}{told} ({done} of {len(layers)} layers)")


def _failure(reference: str, text: str) -> ImageError:
    lower = text.lower()
    message = f"the engine cannot pull {reference}: {text}"
    if is_disk_full(text):
        return ImageError(message, code=DISK_FULL, hint=SPACE_HINT, retryable=True)
    if any(word in lower for word in ("unauthorized", "denied", "authentication required", "no basic auth")):
        hint = f"docker login {parse(reference).registry}"
        return ImageError(message, code="unauthorized", hint=hint, blame="user")
    if any(word in lower for word in ("not found", "manifest unknown", "no such image", "no such manifest")):
        hint = f"check the name and its tag: docker manifest inspect {reference}"
        return ImageError(message, code="not_found", hint=hint, blame="user")
    hint = f"check that the engine reaches {parse(reference).registry}: docker pull {reference}"
    return ImageError(message, code="unreachable", hint=hint, retryable=True)


_CHUNK = 1 << 20
ANSWER_SECONDS = 120.0
REPOSITORY = "pier"
_OURS = re.compile(r"(?:localhost/|docker\.io/)?(pier/(?:[0-9a-f]{32}|(?:helper|idle):[0-9a-f]{24}))(?::latest)?")


def our_name(image: Image) -> str:
    """What an image of pier's own is called at an engine."""
    return f"{REPOSITORY}/{image.digest.removeprefix('sha256:')[:32]}"


def collected_name(tag: str) -> str | None:
    """What an image at an engine is called by pier if `pier image gc` may remove it. Only names that pier gives count,
    so that images of somebody who is called pier are left alone; snapshots end with their run. podman writes names out.
    """
    found = _OURS.fullmatch(tag)
    return found[1] if found else None


class EngineImages:
    """The images of one engine. Bringing or pulling the same image twice at once happens once, also by several pier
    processes of one user."""

    def __init__(self, docker: aiodocker.Docker) -> None:
        self._docker = docker
        self._seen: set[str] = set()

    @asynccontextmanager
    async def held(self, image: Image, on_progress: OnProgress | None = None) -> AsyncIterator[str]:
        """The name under which the engine has `image`, which no collection removes meanwhile. It is asked once; for an
        image that is gone since then call `ensure` again."""
        name = our_name(image) if image.layers else image.reference
        if collected_name(name) is None:
            yield await self._seen_once(image, name, on_progress)
            return
        async with holding(name):
            yield await self._seen_once(image, name, on_progress)

    async def _seen_once(self, image: Image, name: str, on_progress: OnProgress | None) -> str:
        if name not in self._seen:
            self._seen.add(await self.ensure(image, on_progress))
        return name

    async def ensure(self, image: Image, on_progress: OnProgress | None = None) -> str:
        """The name under which the engine has `image`."""
        if image.is_host:
            raise ImageError(
                "containers cannot be made from this machine's own root",
                code="host_image",
                blame="user",
                hint="name an image: --image REFERENCE",
            )
        if not image.layers:
            if await self._has(image.reference):
                return image.reference
            raise ImageError(
                f"the engine has no image {image.reference}",
                code="image_missing",
                hint=f"docker pull {image.reference}",
            )
        name = our_name(image)
        if not await self._has(name):
            async with making(name):
                if not await self._has(name):
                    await self._bring(image, name, on_progress)
        return name

    async def pull(self, reference: str, on_progress: OnProgress | None = None) -> Image:
        """Have the engine pull an image, as whoever `docker login` says. `ImageError` says why it could not."""
        async with making(f"pull {reference}"):
            found = await self.find(reference)
            if found is None:
                await pull(self._docker, reference, on_progress)
                found = await self.find(reference)
        if found is None:
            raise ImageError(f"the engine pulled {reference} and does not have it", code="image_missing")
        return found

    async def find(self, reference: str) -> Image | None:
        """The engine's own image of that name, with its settings."""
        try:
            found = await self._inspect(reference)
        except DockerError as error:
            if error.status in (400, 404):
                return None
            raise
        return Image(reference, found["Id"], (), config_of({"config": found.get("Config")}))

    async def size(self, name: str) -> int:
        """How many bytes an image holds."""
        return int((await self._inspect(name))["Size"])

    async def _inspect(self, name: str) -> dict[str, Any]:
        """Ask the engine, and not for ever: locks are held meanwhile."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await self._docker.images.inspect(name)
        except TimeoutError:
            raise DockerError(900, f"no answer about the image {name} in {ANSWER_SECONDS:g} s") from None

    async def _has(self, name: str) -> bool:
        try:
            await self._inspect(name)
        except DockerError as error:
            if error.status == 404:
                return False
            raise
        return True

    async def load(self, image: Image, name: str, on_progress: OnProgress | None = None) -> None:
        """Bring an image of the store with its settings, under the name that Dockerfiles have for it."""
        with tempfile.TemporaryFile(prefix="pier-image.") as packed:
            await asyncio.to_thread(write_archive, image, name, packed)
            packed.seek(0)
            async with (
                sending(_read(packed), f"bringing {name} to the engine", on_progress) as stream,
                self._docker._query(
                    "images/load",
                    "POST",
                    params={"quiet": "1"},
                    data=stream,
                    headers={"Content-Type": "application/x-tar"},
                ) as answer,
            ):
                text = await answer.text()
        _raise_if_failed(text, image)

    async def _bring(self, image: Image, name: str, on_progress: OnProgress | None) -> None:
        query = {"fromSrc": "-", "repo": name, "message": f"brought by pier from {image.reference}"}
        query["changes"] = f'LABEL dev.pier.image="{image.digest}"'
        what = f"bringing {image.reference} to the engine"
        async with (
            _flat(image) as parts,
            sending(parts, what, on_progress) as stream,
            self._docker._query(
                "images/create",
                "POST",
                params=query,
                data=stream,
                headers={"Content-Type": "application/x-tar"},
            ) as answer,
        ):
            text = await answer.text()
        _raise_if_failed(text, image)


@asynccontextmanager
async def _flat(image: Image) -> AsyncIterator[AsyncIterator[bytes]]:
    """An image as one tar stream, which a thread writes. It ends with this, also if none of it was read."""
    read, write = os.pipe()
    source = os.fdopen(read, "rb", buffering=0)
    writing = asyncio.create_task(asyncio.to_thread(_write, image, write))
    try:
        yield _read(source)
    finally:
        nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        os.dup2(nothing, read, inheritable=False)
        os.close(nothing)
        try:
            await asyncio.shield(writing)
        finally:
            source.close()


def _write(image: Image, fd: int) -> None:
    with contextlib.suppress(BrokenPipeError), open(fd, "wb") as sink:
        write_flat(image.layers, sink)


async def _read(source: IO[bytes]) -> AsyncIterator[bytes]:
    while data := await asyncio.to_thread(source.read, _CHUNK):
        yield data


def _raise_if_failed(text: str, image: Image) -> None:
    for line in text.splitlines():
        message: dict[str, Any] = json.loads(line) if line.strip() else {}
        if "error" in message:
            told = str(message["error"])
            if is_disk_full(told):
                text = f"the Docker engine's disk is full, so it did not take {image.reference}: {told}"
                raise ImageError(text, code=DISK_FULL, hint=SPACE_HINT, retryable=True)
            raise ImageError(f"the engine did not take {image.reference}: {told}", code="image_import")
