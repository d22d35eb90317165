"""Takes images into a store from files: a root file system as a directory or a tar, a docker-archive, an OCI layout."""

from __future__ import annotations

from pathlib import Path

from pier.errors import ImageError
from pier.image import owner
from pier.image.model import Image, ImageConfig
from pier.image.store import ImageStore, canonical


async def import_image(store: ImageStore, source: Path, reference: str | None = None) -> Image:
    """Import whatever `source` is. `reference` is needed for a root file system; an archive may name itself."""
    if not source.exists():
        raise ImageError(f"{source} does not exist", code="not_found", blame="user")
    if reference:
        canonical(reference)
    if source.is_dir() and not (source / "oci-layout").is_file():
        return await _import_rootfs(store, source, _named(source, reference))
    return await _import_rootfs(store, source, _named(source, reference))


async def _import_rootfs(store: ImageStore, source: Path, reference: str) -> Image:
    store.prepare("layers")
    async with store.layers.draft() as draft:
        if source.is_dir():
            made = await owner.run("copy_tree", source=str(source), target=str(draft.path))
        else:
            made = await owner.run("unpack_archive", archive=str(source), target=str(draft.path))
        await draft.keep(made["digest"], size=made["size"], origin="import", source=str(source))
    return store.put(reference, [made["digest"]], ImageConfig(), origin="import", source=str(source))


def _named(source: Path, reference: str | None) -> str:
    if reference:
        return reference
    raise ImageError(
        f"{source} does not say what the image is called",
        code="reference",
        blame="user",
        hint=f"pier image import {source} NAME",
    )
