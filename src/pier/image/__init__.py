"""Images: what the root of a sandbox is made from, kept in a store of content-addressed layers."""

from typing import TYPE_CHECKING, Any

from pier.image.model import HOST, Image, ImageConfig

if TYPE_CHECKING:
    from pier.image.build import build_image
    from pier.image.store import ImageStore

__all__ = ["HOST", "Image", "ImageConfig", "ImageStore", "build_image"]


def __getattr__(name: str) -> Any:
    """The store and the builder come when they are asked for: a sandbox needs only the values above."""
    if name == "ImageStore":
        from pier.image.store import ImageStore

        return ImageStore
    if name == "build_image":
        from pier.image.build import build_image

        return build_image
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
