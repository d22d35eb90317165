"""Images: what the root of a sandbox is made from, kept in a store of content-addressed layers."""

from pier.image.model import Image, ImageConfig

__all__ = ["Image", "ImageConfig"]
