"""The files of a workspace: moved into its directory, replaced, copied and removed; and what changed in a sandbox
outside of it, kept over a stop, for a fork and for a verification.

The image's own tar keeps a state in one go. Images without one that can (busybox, none at all) have each path copied by
pier.

    <directory>/...              as `pier.trial.collect` keeps the state of a trial
    <directory>/changed.tar      else: every path that changed
    <directory>/paths.json       else: the paths that were removed; written last
"""

from __future__ import annotations

import asyncio
import json
import os
import tarfile
import tempfile
from collections.abc import AsyncIterator, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pier.beneath import TreeError, remove
from pier.errors import SandboxError, StorageError
from pier.files import write_json
from pier.sandbox.contract import Sandbox
from pier.sandbox.tree.pack import pack_entry
from pier.sandbox.tree.unpack import unpack
from pier.tree import Tree
from pier.trial.collect import has_state, keep_state, restore_state
from pier.verifier.changes import TESTS, VERIFIER_LOGS
from pier.workspace.workspace import PIER, TASK

SAVE_FAILURES = (SandboxError, StorageError, OSError, TreeError, tarfile.TarError)
"""What goes wrong when files of a sandbox are saved."""


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


_INDEX, _CHANGED = "paths.json", "changed.tar"
_CHUNK = 1 << 20
_NOT_KEPT = (TESTS, VERIFIER_LOGS)


async def keep(sandbox: Sandbox, directory: Path) -> None:
    """Write what differs from the image to `directory`, in place of what was kept there before."""
    scratch = directory.with_name(f".{directory.name}.new")
    await asyncio.to_thread(remove_tree, scratch)
    try:
        await keep_state(sandbox, scratch)
    except SandboxError:
        await asyncio.to_thread(remove_tree, scratch)
        await _keep_paths(sandbox, scratch)
    await asyncio.to_thread(remove_tree, directory)
    scratch.rename(directory)


def is_kept(directory: Path) -> bool:
    """Whether a whole state is in `directory`."""
    return has_state(directory) or (directory / _INDEX).is_file()


async def restore(sandbox: Sandbox, directory: Path) -> None:
    """Bring what was kept into a sandbox of the same image."""
    if has_state(directory):
        await restore_state(sandbox, directory)
        return
    for path in json.loads((directory / _INDEX).read_text()):
        await sandbox.remove(path)
    await sandbox.put_tar(_chunks(directory / _CHANGED), "/")


async def _keep_paths(sandbox: Sandbox, directory: Path) -> None:
    if len(sandbox.services()) > 1:
        raise SandboxError("what the other services of the task hold cannot be kept", code="no_state", retryable=False)
    changes = await sandbox.changes()
    if changes is None:
        raise SandboxError("this backend cannot list what changed", code="no_state", blame="user", retryable=False)
    directory.mkdir(parents=True)
    with tarfile.open(directory / _CHANGED, "w", format=tarfile.PAX_FORMAT) as archive:
        for change in changes:
            if change.kind != "removed" and not _left_out(change.path):
                await _add(archive, sandbox, change.path)
    removed = [change.path for change in changes if change.kind == "removed"]
    write_json(directory / _INDEX, removed, durable=False)


async def _add(archive: tarfile.TarFile, sandbox: Sandbox, path: str) -> None:
    """Add one path to an archive; what is gone or no regular file meanwhile is left out."""
    with tempfile.SpooledTemporaryFile(_CHUNK) as stream:
        try:
            async for chunk in sandbox.get_tar(path):
                stream.write(chunk)
        except FileNotFoundError:
            return
        stream.seek(0)
        with tarfile.open(fileobj=stream) as one:
            for entry in one:
                if entry.name == ".":
                    entry.name, entry.pax_headers = path.lstrip("/"), {}
                    archive.addfile(entry, one.extractfile(entry) if entry.isfile() else None)


def _left_out(path: str) -> bool:
    return any(path == top or path.startswith(f"{top}/") for top in _NOT_KEPT)


async def _chunks(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb") as stream:
        while data := stream.read(_CHUNK):
            yield data
