"""Has an engine build a Dockerfile itself: with BuildKit, or with the older builder of an engine without it.

An engine's builder follows registries and URLs to any host without reporting it. So pier brings the base images to the
engine before the build, checking each host, and refuses everything else that the builder would fetch by itself. Of
BuildKit's protocol only the messages about steps, their output and errors are read.
"""

from __future__ import annotations

import asyncio
import base64
import csv
import hashlib
import json
import re
import tarfile
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import IO, Any

import aiodocker
import aiohttp
from aiodocker.exceptions import DockerError

from pier.errors import ImageError, PolicyError
from pier.image.build import arg_pairs
from pier.image.copying import Ignore, read_ignore
from pier.image.dockerfile import Dockerfile, Instruction, expand, read, split
from pier.image.model import HOST, SCRATCH, Image, OnProgress, host_refusal, parse
from pier.image.registry import find_credentials
from pier.image.store import ImageStore
from pier.sandbox.contract import BuildOrder
from pier.sandbox.docker.client import DISK_FULL, SPACE_HINT, creation_lock, is_disk_full
from pier.sandbox.docker.images import REPOSITORY, EngineImages

OWN_BUILDER = "build it with pier's own: --ek builder=pier"
_SYNTAX = re.compile(r"^\s*(?:#|//)\s*syntax\s*=\s*(\S+)", re.IGNORECASE | re.MULTILINE)
_FRONTEND = re.compile(r"(?:docker\.io/)?docker/dockerfile(?:-upstream)?(?:[:@][\w.:-]+)?")
"""Docker's own programs that read Dockerfiles, which no task can change."""
_REMOTE = re.compile(r"[^/]*://|[^/]+@[^/]+:")
"""A URL, or a repository as git names it."""
_VARIABLE = re.compile(r"\$\{?(\w+)")
_PLATFORM = re.compile(r"(?:TARGET|BUILD)\w+")
"""Arguments that builders set themselves."""
_FETCHING = re.compile(r"^\s*(?:FROM|ADD|COPY|RUN)\b", re.IGNORECASE | re.MULTILINE)
_TRIGGER = re.compile(r"\s*ADD\b|.*\bfrom=", re.IGNORECASE)


def refuse_fetches(order: BuildOrder) -> None:
    """Raise `PolicyError` if the builder may fetch something that the file names, apart from images."""
    file = read(order.file)
    frontends = _SYNTAX.findall(order.file.read_text(encoding="utf-8-sig"))
    for name in (*frontends, *filter(None, [order.args.get("BUILDKIT_SYNTAX")])):
        if not _FRONTEND.fullmatch(name):
            raise _refusal(order, f"a program that reads it ({name})")
    for instruction in file.instructions:
        if instruction.name == "ADD" and _adds_remote(instruction, file):
            raise _refusal(order, f"line {instruction.line}: what ADD names")
        # Builders that do not know here-documents take their lines for instructions.
        if any(_FETCHING.search(document.text) for document in instruction.heredocs):
            raise _refusal(order, f"line {instruction.line}: what some builders read in this here-document")
        mounts = (mount for mount in instruction.all("mount") if "from" in mount.lower())
        if any("$" in each for each in (*instruction.all("from"), *mounts)):
            raise _refusal(order, f"line {instruction.line}: an image that depends on a variable")
        if instruction.name == "FROM" and instruction.all("platform"):
            raise _refusal(order, f"line {instruction.line}: an image of another platform")
        names = _VARIABLE.findall(instruction.text) if instruction.name == "FROM" else []
        if unknown := [name for name in names if _PLATFORM.fullmatch(name) or name not in _arguments(order, file)]:
            raise _refusal(order, f"line {instruction.line}: an image that depends on {unknown[0]}")


def _refusal(order: BuildOrder, what: str) -> PolicyError:
    return PolicyError(f"{order.file}: an engine's builder would fetch, from any host, {what}", hint=OWN_BUILDER)


def _adds_remote(instruction: Instruction, file: Dockerfile) -> bool:
    """Whether an ADD has a URL, or a variable that may have one."""
    words = instruction.exec_form or split(instruction.text, file.escape)
    return any("$" in word or _REMOTE.match(expand(word, {}, file.escape)) for word in words[:-1])


async def bring_bases(images: EngineImages, order: BuildOrder) -> None:
    """Have the images at the engine that the file is made from. The engine pulls itself from registries that the user
    has logged in to; its builder knows no credentials."""
    for base in _bases(order):
        if base == HOST:
            raise host_refusal(f"{order.file}: FROM {base}")
        found = await images.find(base) or await _bring(images, base, order.on_progress)
        if found.is_host:
            raise host_refusal(f"{order.file}: FROM {base}")
        if any(_TRIGGER.match(trigger) for trigger in found.config.on_build):
            raise _refusal(order, f"what ONBUILD of {base} names")


async def _bring(images: EngineImages, base: str, on_progress: OnProgress | None) -> Image:
    named = parse(base)
    if await find_credentials(named.registry) is not None:
        return await images.pull(base, on_progress)
    if named.digest:
        hint = f"pier image pull --env docker {base}, if you trust its registry; or --ek builder=pier"
        message = f"the engine has no {base}, and only a registry can give it one by its digest"
        raise ImageError(message, code="image_missing", blame="user", hint=hint)
    image = await ImageStore().resolve(base, on_progress=on_progress, for_task=True)
    if not image.is_host:
        await images.load(image, str(named), on_progress)
    return image


def _bases(order: BuildOrder) -> list[str]:
    """The images that the stages of the file are made from, and that it copies or mounts from."""
    file = read(order.file)
    values = _arguments(order, file)
    stages, bases = {SCRATCH}, list[str]()
    for instruction in file.instructions:
        if instruction.name == "FROM":
            words = [expand(word, values, file.escape) for word in split(instruction.text, file.escape)]
            bases += [words[0]] if words and words[0].lower() not in stages else []
            stages |= {word.lower() for word in words[2:3]}
            continue
        sources = (expand(source, {}, file.escape) for source in _sources(instruction, file))
        bases += [source for source in sources if source.lower() not in stages and not source.isdigit()]
    return list(dict.fromkeys(base for base in bases if base))


def _sources(instruction: Instruction, file: Dockerfile) -> list[str]:
    """The stages and images that an instruction takes files from."""
    found = instruction.all("from")
    for row in csv.reader(expand(mount, {}, file.escape) for mount in instruction.all("mount")):
        parts = (part.partition("=") for part in row)
        found += [value for name, _, value in parts if name.lower() == "from"]
    return found


def _arguments(order: BuildOrder, file: Dockerfile) -> dict[str, str]:
    """The values that FROM sees: those of arguments before the first of them."""
    values: dict[str, str] = {}
    for instruction in file.instructions:
        if instruction.name == "FROM":
            break
        if instruction.name == "ARG":
            for name, default in arg_pairs(instruction, file, values).items():
                values[name] = order.args.get(name, default or "")
    return values


_VERTEX, _LOG = 1, 3
_NAME, _CACHED, _COMPLETED = 3, 4, 6
_TEXT = 4


class Trace:
    """Reads the messages of one build; `lines` gives what is new in each."""

    def __init__(self) -> None:
        self._report: set[tuple[str, str]] = set()

    def lines(self, packed: str) -> Iterator[str]:
        """The steps that began, were found in the cache or ended, once each, and what commands print."""
        for number, value in _fields(base64.b64decode(packed)):
            if number == _VERTEX and isinstance(value, bytes):
                yield from self._step(dict(_fields(value)))
            elif number == _LOG and isinstance(value, bytes):
                yield from _text(dict(_fields(value)).get(_TEXT)).splitlines()

    def _step(self, step: dict[int, int | bytes]) -> Iterator[str]:
        state = "cached" if step.get(_CACHED) else "done" if _COMPLETED in step else ""
        name = _text(step.get(_NAME))
        if (name, state) not in self._report:
            self._report.add((name, state))
            yield f"{name} {state}".rstrip()


def _text(value: int | bytes | None) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else ""


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message as they are on the wire: numbers, and bytes that may be messages in turn."""
    at = 0
    while at < len(data):
        key, at = _number(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _number(data, at)
            yield key >> 3, value
        elif kind == 2:
            size, at = _number(data, at)
            yield key >> 3, data[at : at + size]
            at += size
        else:
            at += {1: 8, 5: 4}.get(kind, len(data))


def _number(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    return value, at


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
    async with creation_lock(name):
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


def _failure(order: BuildOrder, report: str, tail: deque[str]) -> ImageError:
    output = "\n".join(tail)
    if is_disk_full(report) or is_disk_full(output):
        return ImageError(
            f"the Docker engine's disk is full: {report}", code=DISK_FULL, hint=SPACE_HINT, retryable=True
        )
    if "network bridge not found" in report:
        hint = "give the engine a bridge, or have pier build: --ek builder=pier"
        return ImageError(f"{order.file}: the engine has no network for builds: {report}", code="no_bridge", hint=hint)
    return ImageError(f"{order.file}: the engine could not build it: {report}\n{output}", code="build", blame="task")


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
