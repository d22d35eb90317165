"""Images at an engine: an image that is there is used as it is; one in pier's store is brought there once.

Engines know nothing of pier's layers, so an image is sent as one tar stream. `list_pier_images` and
`collect_pier_images` cover the images that pier brought, recognized by their names. Snapshots are not among them: they
belong to a run, and end with it or by `pier gc`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import os
import re
import stat
import tarfile
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import aiodocker
from aiodocker.exceptions import DockerError

from pier.errors import ImageError
from pier.image.importing import config_of, engine_address
from pier.image.layer_directories import View, ViewEntry
from pier.image.model import Image, ImageConfig, OnProgress, Reference, architecture, parse
from pier.image.registry import find_credentials
from pier.sandbox.docker.client import (
    DISK_FULL,
    SPACE_HINT,
    Client,
    connect,
    creation_lock,
    engine_error,
    in_use_lock,
    is_disk_full,
    removal_lock,
    sending,
)
from pier.sandbox.docker.volumes import collect_volumes


def write_flat(layers: tuple[Path, ...], sink: IO[bytes]) -> None:
    """Write what the layers (lowest first) show together, with owners, modes and links."""
    links: dict[tuple[int, int], str] = {}
    with tarfile.open(fileobj=sink, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        view = View([str(layer) for layer in layers])
        for entry in _walk(view, view.root):
            name, path, found = entry.path.lstrip("/"), Path(entry.place), entry.status
            info = archive.gettarinfo(str(path), arcname=name)
            if info is None:
                continue
            info.uname = info.gname = ""
            key = (found.st_dev, found.st_ino)
            if stat.S_ISREG(found.st_mode) and found.st_nlink > 1 and key in links:
                info.type, info.linkname, info.size = tarfile.LNKTYPE, links[key], 0
                archive.addfile(info)
            elif stat.S_ISREG(found.st_mode):
                info.type, info.linkname, info.size = tarfile.REGTYPE, "", found.st_size
                links[key] = name
                with path.open("rb") as stream:
                    archive.addfile(info, stream)
            else:
                archive.addfile(info)


def write_archive(image: Image, name: str, sink: IO[bytes]) -> None:
    """Write an image as `docker load` takes it: its files as one layer, its settings, and a name with a tag."""
    sink.seek(tarfile.BLOCKSIZE)
    layer = _Hashed(sink)
    write_flat(image.layers, layer)  # type: ignore[arg-type] - a tar stream is only written to
    sink.write(bytes(-layer.size % tarfile.BLOCKSIZE))
    config = {
        "architecture": architecture(),
        "os": "linux",
        "config": _settings(image.config),
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer.hash.hexdigest()}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    for member, value in (("config.json", config), ("manifest.json", manifest)):
        data = json.dumps(value).encode()
        sink.write(_header(member, len(data)) + data + bytes(-len(data) % tarfile.BLOCKSIZE))
    sink.write(bytes(2 * tarfile.BLOCKSIZE))
    sink.seek(0)
    sink.write(_header("layer.tar", layer.size))


class _Hashed:
    """Counts and digests what is written."""

    def __init__(self, sink: IO[bytes]) -> None:
        self.hash, self.size, self._sink = hashlib.sha256(), 0, sink

    def write(self, data: bytes) -> int:
        self.hash.update(data)
        self.size += len(data)
        return self._sink.write(data)


def _header(name: str, size: int) -> bytes:
    """A header of one block, whatever the size."""
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT)


def _settings(config: ImageConfig) -> dict[str, Any]:
    """The settings as an image's configuration has them."""
    return {
        "Env": [f"{key}={value}" for key, value in config.env.items()],
        "WorkingDir": config.workdir,
        "User": config.user,
        "Entrypoint": list(config.entrypoint) or None,
        "Cmd": list(config.cmd) or None,
        "Shell": list(config.shell),
        "Labels": config.labels,
        "ExposedPorts": {port: {} for port in config.exposed_ports},
        "Volumes": {path: {} for path in config.volumes},
        "StopSignal": config.stop_signal,
        "Healthcheck": config.healthcheck,
    }


def _walk(view: View, directory: ViewEntry) -> Iterator[ViewEntry]:
    """Everything below a directory, parents before children."""
    for entry in view.children(directory):
        yield entry
        if entry.is_dir:
            yield from _walk(view, entry)


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
    total = f" of {size / 1e6:.1f} MB" if size else ""
    tell(f"{layer}: {status}{total} ({done} of {len(layers)} layers)")


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


def engine_name(image: Image) -> str:
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
        name = engine_name(image) if image.layers else image.reference
        if collected_name(name) is None:
            yield await self._seen_once(image, name, on_progress)
            return
        async with in_use_lock(name):
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
        name = engine_name(image)
        if not await self._has(name):
            async with creation_lock(name):
                if not await self._has(name):
                    await self._bring(image, name, on_progress)
        return name

    async def pull(self, reference: str, on_progress: OnProgress | None = None) -> Image:
        """Have the engine pull an image, as whoever `docker login` says. `ImageError` says why it could not."""
        async with creation_lock(f"pull {reference}"):
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
            report = str(message["error"])
            if is_disk_full(report):
                text = f"the Docker engine's disk is full, so it did not take {image.reference}: {report}"
                raise ImageError(text, code=DISK_FULL, hint=SPACE_HINT, retryable=True)
            raise ImageError(f"the engine did not take {image.reference}: {report}", code="image_import")


@dataclass(frozen=True, slots=True)
class PierImage:
    """An image at an engine. `in_use`: some container is made from it."""

    reference: str
    id: str
    size: int
    created: int
    in_use: bool


async def list_pier_images() -> list[PierImage]:
    """The images that pier brought to the engine, oldest first."""
    async with _engine() as docker:
        return await _list(docker)


async def collect_pier_images(*, max_size: int | None = None, dry_run: bool = False) -> list[PierImage]:
    """Remove images that no container uses or is about to use, oldest first; with `max_size` only until the rest has no
    more bytes."""
    async with _engine() as docker:
        found = await _list(docker)
        size = sum(image.size for image in found)
        removed: list[PierImage] = []
        for image in found:
            if image.in_use or (max_size is not None and size <= max_size):
                continue
            with removal_lock(image.reference) as is_free:
                if is_free and (dry_run or await _remove(docker, image)):
                    removed.append(image)
                    size -= image.size
        return removed


async def collect_pier_volumes(*, dry_run: bool = False) -> list[str]:
    """Remove the volumes with copies of directories that no container uses; their names."""
    async with _engine() as docker:
        return await collect_volumes(docker, dry_run=dry_run)


async def pull_there(reference: str, on_progress: OnProgress | None = None) -> Image:
    """Have the engine pull an image, which it then has as its own."""
    async with _engine() as docker:
        return await EngineImages(docker).pull(reference, on_progress)


async def _list(docker: aiodocker.Docker) -> list[PierImage]:
    rows: list[dict[str, Any]] = await docker._query_json("images/json")
    containers: list[dict[str, Any]] = await docker._query_json("containers/json", params={"all": "1"})
    used = {container["ImageID"] for container in containers}
    found = [
        PierImage(name, row["Id"], row["Size"], row["Created"], row["Id"] in used)
        for row in rows
        for tag in row.get("RepoTags") or []
        if (name := collected_name(tag)) is not None
    ]
    return sorted(found, key=lambda image: (image.created, image.reference))


async def _remove(docker: aiodocker.Docker, image: PierImage) -> bool:
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
