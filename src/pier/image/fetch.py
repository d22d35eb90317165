"""Finds an image that the store does not have: in a Docker engine if one answers, then in its registry."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pier.errors import ImageError
from pier.image.model import OnProgress
from pier.image.reference import is_digest, parse

if TYPE_CHECKING:
    from pier.image.model import Image
    from pier.image.registry import Registry
    from pier.image.store import ImageStore


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
    from pier.image.engine import take_from_engine

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
    from pier.image.assemble import LayerSource, Origins, assemble
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
