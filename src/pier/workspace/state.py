"""Moves the files of a workspace between its image, its sandbox and its directory; and saves the sandbox's changes
outside of that directory for the next start, a fork or a verification.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tarfile
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pier.beneath import TreeError, remove
from pier.errors import SandboxError, StorageError
from pier.network.policy import NetworkPolicy
from pier.sandbox.contract import Sandbox
from pier.sandbox.tar import pack_entry, unpack
from pier.tree import Tree
from pier.trial.collect import keep_state
from pier.trial.environment import SandboxStarter
from pier.trial.plan import SandboxPlan
from pier.workspace.diff import content, keep_seed
from pier.workspace.workspace import PIER, TASK, Workspace, new_directory

STATE = "state"
RUNNING = "sandbox"
"""File with the id of a running sandbox with unsaved changes; after a crash, the next start reopens that sandbox."""
REPLACED = "replaced"
"""Directory for edited files of the workspace that `pier stop` replaced with those of the sandbox."""
_COPIED = "copied"
"""File whose modification time is that of the last copy into the sandbox."""
SAVE_FAILURES = (SandboxError, StorageError, OSError, TreeError, tarfile.TarError)
"""The errors of saving files of a sandbox."""


def check_directory(path: Path) -> None:
    """Refuse a download that is not a directory: a symbolic link could lead anywhere on this machine."""
    if path.is_symlink() or not path.is_dir():
        raise SandboxError(
            "the working directory in the sandbox is no longer a directory",
            code="not_directory",
            blame="agent",
            retryable=False,
        )


def merge_tree(source: Path, target: Path) -> None:
    """Move the content of `source` into `target`, without overwriting and without the workspace's `PIER` and `TASK`."""
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
    """Replace the content of `target` by that of `source`, apart from the workspace's `PIER` and `TASK`. Replaced files
    are moved to the empty directory `aside`."""
    check_directory(source)
    fresh = {child.name for child in source.iterdir()} - {PIER, TASK}
    for child in list(target.iterdir()):
        if child.name not in (PIER, TASK):
            child.rename(aside / child.name)
    for name in fresh:
        (source / name).rename(target / name)


def copy_tree(source: Path, target: Path, leave_out: Collection[str] = ()) -> None:
    """Copy a tree that a sandbox may be changing at the same time, without sockets, pipes and the paths `leave_out`. No
    link is followed."""
    with Tree(source) as original, Tree(target, make=True) as copy, ThreadPoolExecutor(1) as pool:
        read, write = os.pipe2(os.O_CLOEXEC)
        with open(read, "rb") as stream:
            packing = pool.submit(_pack, original.fd, write, leave_out)
            unpack(stream, copy.fd)
        packing.result()


def _pack(directory: int, out: int, leave_out: Collection[str]) -> None:
    with open(out, "wb") as stream:
        pack_entry(directory, ".", stream, leave_out=leave_out)


def remove_tree(path: Path) -> None:
    """Remove a tree of files from a sandbox, if it exists."""
    if os.path.lexists(path):
        remove(str(path))


async def save(workspace: Workspace, sandbox: Sandbox, workdir: str) -> str | None:
    """Save a sandbox's changes for the next start: those outside of the mounted directories and, if the workspace is
    not mounted, its files. Returns a note for the user, if any."""
    await keep(sandbox, workspace.pier / STATE)
    return await _copy_back(workspace, sandbox, workdir) if not workspace.config.mounted else None


async def _copy_back(workspace: Workspace, sandbox: Sandbox, workdir: str) -> str | None:
    """Replace the files of a workspace that is not mounted with those of its sandbox. If some were edited since the
    start, the old files are kept, and the note returned names their directory."""
    scratch = new_directory(workspace.pier / "incoming")
    await sandbox.download(workdir, scratch / "files")
    edited = await asyncio.to_thread(_edited_outside, workspace)
    aside = new_directory(workspace.pier / (REPLACED if edited else "incoming"))
    await asyncio.to_thread(replace_tree, scratch / "files", workspace.root, aside)
    for path in (scratch,) if edited else (scratch, aside):
        await asyncio.to_thread(remove_tree, path)
    if not edited:
        return None
    more = f" and {len(edited) - 1} more" if len(edited) > 1 else ""
    return f"{edited[0]}{more} changed in the directory while the workspace ran: the old files are in {aside}"


def _edited_outside(workspace: Workspace) -> list[str]:
    """The files of the directory that were created or changed since the copy into the sandbox."""
    try:
        since = (workspace.pier / _COPIED).stat().st_mtime_ns
    except OSError:
        since = 0
    with Tree(workspace.root) as tree:
        paths = [entry.path for entry in content(tree)]
    return sorted(path for path in paths if (workspace.root / path).lstat().st_ctime_ns > since)


async def fill(workspace: Workspace, sandbox: Sandbox, workdir: str, owner: str | None, *, fresh: bool) -> None:
    """Copy the files of a workspace that is not mounted into its sandbox. They replace the image's files; on the first
    start, when `fresh`, they are added to them. `owner` is the user that commands run as."""
    if workspace.config.mounted:
        return
    (workspace.pier / _COPIED).touch()
    if not fresh:
        await clear_directory(sandbox, workdir)
    await sandbox.upload(workspace.root, workdir, leave_out=(PIER,), owner=owner)


async def clear_directory(sandbox: Sandbox, path: str) -> None:
    """Remove the content of a directory of the sandbox."""
    if await sandbox.exists(path):
        for entry in await sandbox.list_dir(path):
            await sandbox.remove(f"{path}/{entry.name}")


async def seed(
    workspace: Workspace, starter: SandboxStarter, plan: SandboxPlan, policy: NetworkPolicy, workdir: str
) -> None:
    """Copy the image's working directory into the workspace's directory. Existing files, accepted with --force, are
    kept."""
    scratch = new_directory(workspace.pier / "incoming")
    async with starter.open(plan, policy, "seed") as (sandbox, _):
        if await sandbox.exists(workdir):
            await sandbox.download(workdir, scratch / "files")
    if os.path.lexists(scratch / "files"):
        await asyncio.to_thread(merge_tree, scratch / "files", workspace.root)
    await asyncio.to_thread(remove_tree, workspace.pier / "incoming")


async def note_seed(workspace: Workspace, sandbox: Sandbox, workdir: str) -> None:
    """Record the initial files of the workspace, for `pier diff`."""
    if workspace.config.mounted:
        await asyncio.to_thread(keep_seed, workspace)
        return
    scratch = new_directory(workspace.pier / "incoming")
    await sandbox.download(workdir, scratch / "files")
    await asyncio.to_thread(keep_seed, workspace, scratch / "files")
    await asyncio.to_thread(remove_tree, workspace.pier / "incoming")


def copy_environment(source: Path, root: Path) -> None:
    """Copy the files of a task's environment, in place of its Dockerfile."""
    for child in source.iterdir():
        if child.name in ("Dockerfile", ".dockerignore", "docker-compose.yaml") or os.path.lexists(root / child.name):
            continue
        if child.is_dir():
            shutil.copytree(child, root / child.name, symlinks=True)
        else:
            shutil.copy2(child, root / child.name, follow_symlinks=False)


async def keep(sandbox: Sandbox, directory: Path) -> None:
    """Save the differences from the image in `directory`, replacing an earlier save."""
    scratch = directory.with_name(f".{directory.name}.new")
    await asyncio.to_thread(remove_tree, scratch)
    await keep_state(sandbox, scratch)
    await asyncio.to_thread(remove_tree, directory)
    scratch.rename(directory)
