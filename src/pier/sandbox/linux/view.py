"""A layer that is some directories of this machine's root, at their places, and nothing else of it.

Overlay has no such thing: a layer is a directory with all that it holds. So an overlay is mounted of two layers, the
root and above it a directory that hides its namesake in the root and is filled with directories which say, in overlay's
own words, where in the root they are from. The layer is that one directory of the overlay.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

from pier.sandbox.linux import kernel
from pier.sandbox.linux.root import HOST

_NAME = "view"


def make_view(mount_point: Callable[[], str], trees: list[str], shift: int | None, owner: int) -> str:
    """Where the layer is that shows `trees`; with the ids of the user namespace `shift`, if given, in which `owner` is
    root. OSError where the kernel cannot make it: on a root that is an overlay itself, or with trees on other disks."""
    if len({os.stat(HOST + path).st_dev for path in ("/", *trees)}) > 1:
        raise OSError(errno.EXDEV, "the directories are on several file systems")
    root, names, merged, target = (mount_point() for _ in range(4))
    fd = kernel.open_tree(HOST + "/")
    try:
        if shift is not None:
            kernel.set_mount(fd, user_namespace=shift)
        kernel.attach(fd, root)
    finally:
        os.close(fd)
    _make_names(f"{names}/{_NAME}", trees, owner)
    kernel.mount("overlay", merged, "overlay", kernel.MS_RDONLY, f"lowerdir={names}:{root},redirect_dir=follow")
    _check_depth(f"{merged}/{_NAME}", target)
    fd = kernel.open_tree(f"{merged}/{_NAME}")
    try:
        kernel.attach(fd, target)
    finally:
        os.close(fd)
    return target


def _make_names(directory: str, trees: list[str], owner: int) -> None:
    """They lie in a zygote's own memory: layers may not lie in each other."""
    for tree in ("", *trees):
        path = directory + tree
        os.makedirs(path, 0o755)
        if tree:
            os.setxattr(path, "trusted.overlay.redirect", os.fsencode(tree))
    for path, _, _ in os.walk(directory):
        os.chmod(path, 0o755)
        os.chown(path, owner, owner)
        if path.removeprefix(directory) not in trees:
            os.setxattr(path, "trusted.overlay.opaque", b"y")


def _check_depth(layer: str, place: str) -> None:
    """The kernel lets overlays lie on overlays, but not without end."""
    kernel.mount("overlay", place, "overlay", kernel.MS_RDONLY, f"lowerdir=/e:{layer}")
    kernel.unmount(place)
