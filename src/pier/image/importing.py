"""Takes images into a store: from files, from a Docker engine if one answers, or from a registry.

Files are a root file system as a directory or a tar, a docker-archive, or an OCI layout. An image is put together from
an OCI configuration and the archives of its layers, wherever those came from.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import aiohttp

from pier.errors import ImageError
from pier.image import owner
from pier.image.engine_address import SshConnector, engine_address, open_connector, shown
from pier.image.layer_directories import View
from pier.image.layer_tar import decompressed, entries, unpack
from pier.image.layers import Origin
from pier.image.model import Image, ImageConfig, OnProgress, choose_platform, digest_of, disk_errors, is_digest, parse
from pier.image.store import ImageStore, canonical

if TYPE_CHECKING:
    from pier.image.registry import Registry


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


_ARCHIVE_NAME = re.compile(r"blobs(/.*)?|oci-layout|manifest\.json|index\.json|repositories|[0-9a-f]{64}(\.json|/.*)?")
_DAMAGE = ("broken_archive", "unsafe_archive", "digest")
_REF_NAME = "org.opencontainers.image.ref.name"
_FULL_NAME = "io.containerd.image.name"


async def import_image(
    store: ImageStore, source: Path, reference: str | None = None, *, origin: Origin = "import", told: str = ""
) -> Image:
    """Import whatever `source` is. `reference` is needed for a root file system; an archive may name itself.

    A broken or hostile archive is an `ImageError` (codes `broken_archive`, `unsafe_archive`, `digest`), and leaves
    nothing behind. `told` is what is written down as the image's source.
    """
    if not source.exists():
        raise ImageError(f"{source} does not exist", code="not_found", blame="user")
    if reference:
        canonical(reference)
    origins = Origins(origin, told or str(source))
    store.prepare("layers")
    try:
        return await _import(store, source, reference, origins)
    except ImageError as error:
        if error.code in _DAMAGE and origins.source not in error.message:
            raise ImageError(f"{origins.source}: {error.message}", code=error.code, hint=error.hint) from error
        raise


async def _import(store: ImageStore, source: Path, reference: str | None, origins: Origins) -> Image:
    if source.is_dir():
        if (source / "oci-layout").is_file() or (source / "manifest.json").is_file():
            return await _import_unpacked(store, source, reference, origins)
        return await _import_rootfs(store, source, _named(source, reference), origins)
    if not await asyncio.to_thread(_is_image_archive, source):
        return await _import_rootfs(store, source, _named(source, reference), origins)
    async with store.layers.scratch() as directory:
        await asyncio.to_thread(_unpack_here, source, directory)
        return await _import_unpacked(store, directory, reference, origins)


async def _import_rootfs(store: ImageStore, source: Path, reference: str, origins: Origins) -> Image:
    async with store.layers.draft() as draft:
        if source.is_dir():
            made = await owner.run("copy_tree", source=str(source), target=str(draft.path))
        else:
            made = await owner.run("unpack_archive", archive=str(source), target=str(draft.path))
        await draft.keep(made["digest"], size=made["size"], origin=origins.origin, source=origins.source)
    return store.put(reference, [made["digest"]], ImageConfig(), origin=origins.origin, source=origins.source)


def _named(source: Path, reference: str | None) -> str:
    if reference:
        return reference
    raise ImageError(
        f"{source} does not say what the image is called",
        code="reference",
        blame="user",
        hint=f"pier image import {source} NAME",
    )


def _is_image_archive(source: Path) -> bool:
    """Whether a tar holds an image and not a root file system, told by its first names."""
    with disk_errors(f"reading {source}"), decompressed(str(source)) as stream:
        for _, member in entries(stream):
            name = member.name.removeprefix("./").strip("/")
            if name and name != ".":
                return bool(_ARCHIVE_NAME.fullmatch(name))
    return False


def _unpack_here(source: Path, directory: Path) -> None:
    with disk_errors(f"unpacking {source}"), decompressed(str(source)) as stream:
        unpack(stream, str(directory), owners=False)


async def _import_unpacked(store: ImageStore, directory: Path, reference: str | None, origins: Origins) -> Image:
    files = _Files(directory)
    if files.has("manifest.json"):
        return await _import_docker(store, files, reference, origins)
    if files.has("index.json"):
        return await _import_oci(store, files, reference, origins)
    raise ImageError("the archive has neither a manifest.json nor an index.json", code="broken_archive")


class _Files:
    """The files of an unpacked archive; its symbolic links lead nowhere else."""

    def __init__(self, directory: Path) -> None:
        self._view = View([str(directory)])

    def has(self, name: str) -> bool:
        return (entry := self._view.find(name)) is not None and entry.is_file

    def path(self, name: str) -> Path:
        entry = self._view.find(name)
        if entry is None or not entry.is_file:
            raise ImageError(f"the archive has no {name}", code="broken_archive")
        return Path(entry.place)

    def json(self, name: str) -> Any:
        return self.read_json(self.path(name))

    def read_json(self, path: Path) -> Any:
        """A file's JSON: an object or an array."""
        try:
            value = json.loads(path.read_bytes())
        except ValueError as error:
            raise ImageError(f"{path.name} of the archive is not JSON: {error}", code="broken_archive") from None
        if not isinstance(value, dict | list):
            raise ImageError(f"{path.name} of the archive is neither an object nor an array", code="broken_archive")
        return value

    async def blob(self, digest: str) -> Path:
        """A blob whose content was checked against its digest."""
        value = digest.removeprefix("sha256:")
        path = self.path(f"blobs/sha256/{value}")
        found = await asyncio.to_thread(_digest, path)
        if found != value:
            raise ImageError(f"a blob has the digest sha256:{found}, not {digest}", code="digest")
        return path


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


async def _import_docker(store: ImageStore, files: _Files, reference: str | None, origins: Origins) -> Image:
    manifests = files.json("manifest.json")
    if not isinstance(manifests, list) or not manifests:
        raise ImageError("manifest.json of the archive lists no image", code="broken_archive")
    if not all(isinstance(row, dict) and isinstance(row.get("Config"), str) for row in manifests):
        raise ImageError("manifest.json of the archive names no configuration", code="broken_archive")
    tags = [tag for manifest in manifests for tag in manifest.get("RepoTags") or []]
    chosen = manifests[0] if len(manifests) == 1 else None
    for manifest in manifests:
        if reference and canonical(reference) in [str(parse(tag)) for tag in manifest.get("RepoTags") or []]:
            chosen = manifest
    if chosen is None:
        raise ImageError(f"the archive holds several images: {', '.join(tags)}", hint="name one of them", blame="user")
    name = reference or next(iter(chosen.get("RepoTags") or []), None)
    raw = files.path(chosen["Config"]).read_bytes()
    layers = [_local(layer, files) for layer in chosen.get("Layers") or []]
    digest = f"sha256:{hashlib.sha256(raw).hexdigest()}"
    return await assemble(store, name, raw, layers, Origins(origins.origin, origins.source, digest))


def _local(name: str, files: _Files) -> LayerSource:
    async def fetch() -> Path:
        return files.path(name)

    return LayerSource(name, fetch)


async def _import_oci(store: ImageStore, files: _Files, reference: str | None, origins: Origins) -> Image:
    index = files.json("index.json")
    descriptors = (index.get("manifests") if isinstance(index, dict) else None) or []
    chosen = _choose(descriptors, reference)
    name = reference or _name_of(chosen)
    manifest: dict[str, Any] = {}
    for _ in range(4):
        manifest = files.read_json(await files.blob(digest_of(chosen)))
        if "manifests" not in manifest:
            break
        chosen = choose_platform(manifest["manifests"], "the OCI layout")
    if "config" not in manifest:
        raise ImageError("the OCI layout holds no image manifest", code="broken_archive")
    raw = (await files.blob(digest_of(manifest["config"]))).read_bytes()
    layers = [_checked(digest_of(layer), files) for layer in manifest.get("layers") or []]
    return await assemble(store, name, raw, layers, Origins(origins.origin, origins.source, chosen["digest"]))


def _checked(digest: str, files: _Files) -> LayerSource:
    return LayerSource(digest, lambda: files.blob(digest))


def _choose(descriptors: list[dict[str, Any]], reference: str | None) -> dict[str, Any]:
    if not descriptors:
        raise ImageError("the OCI layout lists no image", code="broken_archive")
    if len(descriptors) == 1:
        return descriptors[0]
    if reference:
        for descriptor in descriptors:
            if reference in (descriptor.get("annotations") or {}).values():
                return descriptor
    return choose_platform(descriptors, "the OCI layout")


def _name_of(descriptor: dict[str, Any]) -> str | None:
    """What a layout calls an image; a bare tag is no name."""
    notes = descriptor.get("annotations") or {}
    name = notes.get(_FULL_NAME) or notes.get(_REF_NAME) or ""
    return name if "/" in name or ":" in name else None


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
