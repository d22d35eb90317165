"""Takes images into a store from files: a root file system as a directory or a tar, a docker-archive, an OCI layout.

An image is put together from an OCI configuration and the archives of its layers, wherever those came from.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pier.errors import ImageError
from pier.image import owner
from pier.image.disk import told_by_disk
from pier.image.layers import Origin
from pier.image.model import Image, ImageConfig, choose_platform, digest_of, is_digest, parse
from pier.image.store import ImageStore, canonical
from pier.image.unpack import decompressed, entries, unpack
from pier.image.view import View

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
    with told_by_disk(f"reading {source}"), decompressed(str(source)) as stream:
        for _, member in entries(stream):
            name = member.name.removeprefix("./").strip("/")
            if name and name != ".":
                return bool(_ARCHIVE_NAME.fullmatch(name))
    return False


def _unpack_here(source: Path, directory: Path) -> None:
    with told_by_disk(f"unpacking {source}"), decompressed(str(source)) as stream:
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
