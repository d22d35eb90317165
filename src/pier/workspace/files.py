"""Trees of files on this machine: moved into a workspace's directory, replaced and removed."""

from __future__ import annotations

import os
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pier.beneath import remove
from pier.errors import SandboxError
from pier.sandbox.tree.pack import pack_entry
from pier.sandbox.tree.unpack import unpack
from pier.tree import Tree
from pier.workspace.workspace import PIER, TASK


def check_directory(path: Path) -> None:
    """Refuse what came out of a sandbox in place of a directory: a link would lead anywhere on this machine."""
    if path.is_symlink() or not path.is_dir():
        raise SandboxError(
            "the working directory in the sandbox is no longer a directory",
            code="not_directory",
            blame="agent",
            retryable=False,
        )


def merge_tree(source: Path, target: Path) -> None:
    """Move what is in `source` into `target`; what is there already stays. The workspace's own parts are left out."""
    check_directory(source)
    for child in source.iterdir():
        place = target / child.name
        if child.name in (PIER, TASK):
            continue
        if not os.path.lexists(place):
            child.rename(place)
        elif child.is_dir() and not child.is_symlink() and place.is_dir() and not place.is_symlink():
            merge_tree(child, place)


def replace_tree(source: Path, target: Path, aside: Path) -> None:
    """Make `target` hold what `source` holds, apart from the workspace's own parts. Replaced files are moved to the
    empty directory `aside`."""
    check_directory(source)
    fresh = {child.name for child in source.iterdir()} - {PIER, TASK}
    for child in list(target.iterdir()):
        if child.name not in (PIER, TASK):
            child.rename(aside / child.name)
    for name in fresh:
        (source / name).rename(target / name)


def copy_tree(source: Path, target: Path, leave_out: Collection[str] = ()) -> None:
    """Copy a tree that a sandbox may be changing meanwhile. No link is followed; sockets and pipes are left out, and so
    are the paths `leave_out`."""
    with Tree(source) as came, Tree(target, make=True) as made, ThreadPoolExecutor(1) as pool:
        read, write = os.pipe2(os.O_CLOEXEC)
        with open(read, "rb") as stream:
            packing = pool.submit(_pack, came.fd, write, leave_out)
            unpack(stream, made.fd)
        packing.result()


def _pack(directory: int, out: int, leave_out: Collection[str]) -> None:
    with open(out, "wb") as stream:
        pack_entry(directory, ".", stream, leave_out=leave_out)


def remove_tree(path: Path) -> None:
    """Remove a tree of files that came from a sandbox."""
    if os.path.lexists(path):
        remove(str(path))
