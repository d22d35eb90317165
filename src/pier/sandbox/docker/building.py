"""Has an engine build a Dockerfile itself: with BuildKit, or with the older builder of an engine that has none."""

from __future__ import annotations

import asyncio
import hashlib
import json
import tarfile
import tempfile
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO, Any

import aiodocker
import aiohttp
from aiodocker.exceptions import DockerError

from pier.errors import ImageError, PolicyError
from pier.image.copying import Ignore, read_ignore
from pier.image.model import Image
from pier.sandbox.docker.bases import OWN_BUILDER, bring_bases, refuse_fetches
from pier.sandbox.docker.buildkit import Trace
from pier.sandbox.docker.client import DISK_FULL, SPACE_HINT, is_disk_full
from pier.sandbox.docker.holding import making
from pier.sandbox.docker.images import REPOSITORY, EngineImages
from pier.sandbox.order import BuildOrder

_OUTSIDE = ".pier.Dockerfile"
"""The name in the context of a Dockerfile that is not below it."""
_TAIL = 20
_DOCKER = "Engine"
"""What Docker calls the part of itself that builds."""
_NETWORKS = {"none": "none", "public": "default"}


def built_name(order: BuildOrder) -> str:
    """What the image of an order is called at an engine, whoever built it there."""
    network = order.network.mode if order.network else ""
    return f"{REPOSITORY}/{hashlib.sha256(f'{order.key} {network}'.encode()).hexdigest()[:32]}"


async def build_there(docker: aiodocker.Docker, images: EngineImages, order: BuildOrder) -> Image:
    """The image of an order, built once for everyone who uses the engine. Errors are `ImageError`s: code `build`, with
    the end of the output, blames the task."""
    await _refuse_network(docker, order)
    refuse_fetches(order)
    name = built_name(order)
    async with making(name):
        found = await images.find(name)
        if found is None:
            await bring_bases(images, order)
            await _build(docker, order, name)
            found = await images.find(name)
    if found is None:
        raise ImageError(f"the engine built {order.file} and does not have it", code="image_missing")
    return found


async def _refuse_network(docker: aiodocker.Docker, order: BuildOrder) -> None:
    """A policy is kept or refused: no builder keeps an allowlist, and podman's builds have the host's network even when
    they are told to have none."""
    if order.network is not None and order.network.mode not in _NETWORKS:
        message = "an engine's builder cannot keep an allowlist, which this task asks for while its Dockerfile is built"
        raise PolicyError(message, hint=OWN_BUILDER)
    if order.network is not None and order.network.mode == "none":
        parts = (await docker.version()).get("Components") or []
        if _DOCKER not in {part.get("Name") for part in parts}:
            message = "this engine is not Docker's: its builder may not keep a build without a network"
            raise PolicyError(f"{message}, which this task asks for", hint=OWN_BUILDER)


async def _build(docker: aiodocker.Docker, order: BuildOrder, name: str) -> None:
    with tempfile.TemporaryFile(prefix="pier-context.") as packed:
        file = await asyncio.to_thread(_pack, order, packed)
        params = {
            "t": name,
            "dockerfile": file,
            "buildargs": json.dumps(dict(order.args)),
            "labels": json.dumps({"dev.pier.image": order.key}),
            "networkmode": _NETWORKS[order.network.mode] if order.network else "default",
            "rm": "1",
            "forcerm": "1",
            **({"target": order.target} if order.target else {}),
        }
        try:
            if await _builds_with_buildkit(docker, order, params, packed):
                return
            packed.seek(0)
            await _ask(docker, order, params, packed)
        except DockerError as error:
            if error.status not in (400, 404, 500):
                raise
            # An engine that finds a fault before it begins says so by its status.
            raise _failure(order, str(error.message), deque()) from error


async def _builds_with_buildkit(
    docker: aiodocker.Docker, order: BuildOrder, params: dict[str, str], packed: IO[bytes]
) -> bool:
    """Whether the engine has BuildKit, and has built with it."""
    try:
        await _ask(docker, order, params | {"version": "2"}, packed)
    except DockerError as error:
        if error.status in (400, 501) and "buildkit" in str(error.message).lower():
            return False
        raise
    return True


async def _ask(docker: aiodocker.Docker, order: BuildOrder, params: dict[str, str], packed: IO[bytes]) -> None:
    trace = Trace()
    tail: deque[str] = deque(maxlen=_TAIL)
    headers = {"Content-Type": "application/x-tar"}
    async with docker._query("build", "POST", params=params, data=_chunks(packed), headers=headers) as answer:
        async for message in _messages(answer.content):
            if "error" in message:
                raise _failure(order, str(message["error"]), tail)
            for row in _rows(message, trace):
                tail.append(row)
                if order.on_progress is not None:
                    order.on_progress(row)


async def _messages(content: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """One object a line; lines may be longer than what a stream gives at once."""
    held = b""
    async for data in content.iter_any():
        *lines, held = (held + data).split(b"\n")
        for line in lines:
            if line.strip():
                yield json.loads(line)


async def _chunks(packed: IO[bytes]) -> AsyncIterator[bytes]:
    while data := await asyncio.to_thread(packed.read, 1 << 20):
        yield data


def _rows(message: dict[str, Any], trace: Trace) -> list[str]:
    if message.get("id") == "moby.buildkit.trace":
        return list(trace.lines(message["aux"]))
    return [row for row in str(message.get("stream", "")).splitlines() if row.strip()]


def _failure(order: BuildOrder, told: str, tail: deque[str]) -> ImageError:
    output = "\n".join(tail)
    if is_disk_full(told) or is_disk_full(output):
        return ImageError(f"the Docker engine's disk is full: {told}", code=DISK_FULL, hint=SPACE_HINT, retryable=True)
    if "network bridge not found" in told:
        hint = "give the engine a bridge, or have pier build: --ek builder=pier"
        return ImageError(f"{order.file}: the engine has no network for builds: {told}", code="no_bridge", hint=hint)
    return ImageError(f"{order.file}: the engine could not build it: {told}\n{output}", code="build", blame="task")


def _pack(order: BuildOrder, sink: IO[bytes]) -> str:
    """Write the context, all of it root's, without what the ignore file leaves out; where the Dockerfile is in it."""
    root, file = order.context.resolve(), order.file.resolve()
    ignore = read_ignore(order.context, order.file)
    inside = file.relative_to(root).as_posix() if file.is_relative_to(root) else ""
    with tarfile.open(fileobj=sink, mode="w", format=tarfile.PAX_FORMAT) as archive:
        # BuildKit takes what does not begin with a plain header for a lone Dockerfile.
        archive.add(root, ".", recursive=False, filter=_as_roots)
        for path in sorted(root.rglob("*")):
            name = path.relative_to(root).as_posix()
            if name == inside or not _is_left_out(path, name, ignore):
                archive.add(path, name, recursive=False, filter=_as_roots)
        if not inside:
            archive.add(file, _OUTSIDE, recursive=False, filter=_as_roots)
    sink.seek(0)
    return inside or _OUTSIDE


def _is_left_out(path: Path, name: str, ignore: Ignore) -> bool:
    """Directories stay where something below them may be taken back in."""
    return ignore.excludes(name) and not (ignore.has_exceptions and path.is_dir() and not path.is_symlink())


def _as_roots(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    info.uid = info.gid = 0
    info.mtime = int(info.mtime)
    info.uname = info.gname = ""
    return info if info.isreg() or info.isdir() or info.issym() or info.islnk() else None
