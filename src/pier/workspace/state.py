"""The files of a workspace: copied out of its image, in and out of its sandbox, and replaced; and what changed in a
sandbox outside of it, kept over a stop, for a fork and for a verification, as the state of a trial is.
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
"""The file that holds the id of the sandbox while its files are nowhere else: after a crash it is opened again."""
REPLACED = "replaced"
"""Files of the directory that `pier stop` replaced with those of the sandbox, if they had been edited."""
_COPIED = "copied"
SAVE_FAILURES = (SandboxError, StorageError, OSError, TreeError, tarfile.TarError)
"""The errors of saving files of a sandbox."""


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


async def save(workspace: Workspace, sandbox: Sandbox, workdir: str) -> str | None:
    """Keep what is in the sandbox alone, for the next start: what differs from the image outside of the mounted
    directories, and the files of a workspace that is not mounted. A note if there is something to know."""
    await keep(sandbox, workspace.pier / STATE)
    return await _copy_back(workspace, sandbox, workdir) if not workspace.config.mounted else None


async def _copy_back(workspace: Workspace, sandbox: Sandbox, workdir: str) -> str | None:
    """Copy the files of a workspace that is not mounted out to its directory, in place of the files there. If some of
    those were made or edited since the start, the old files are kept: a note says where."""
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
    """The files of the directory that were made or changed since they were copied in."""
    try:
        since = (workspace.pier / _COPIED).stat().st_mtime_ns
    except OSError:
        since = 0
    with Tree(workspace.root) as tree:
        paths = [entry.path for entry in content(tree)]
    return sorted(path for path in paths if (workspace.root / path).lstat().st_ctime_ns > since)


async def fill(workspace: Workspace, sandbox: Sandbox, workdir: str, owner: str | None, *, fresh: bool) -> None:
    """Copy the files of a workspace that is not mounted into its sandbox, in place of those of the image; at the first
    start they are added to those. `owner` is the user whom commands run as."""
    if workspace.config.mounted:
        return
    (workspace.pier / _COPIED).touch()
    if not fresh:
        await clear_directory(sandbox, workdir)
    await sandbox.upload(workspace.root, workdir, leave_out=(PIER,), owner=owner)


async def clear_directory(sandbox: Sandbox, path: str) -> None:
    """Remove what is in a directory of the sandbox."""
    if await sandbox.exists(path):
        for entry in await sandbox.list_dir(path):
            await sandbox.remove(f"{path}/{entry.name}")


async def seed(
    workspace: Workspace, starter: SandboxStarter, plan: SandboxPlan, policy: NetworkPolicy, workdir: str
) -> None:
    """Copy the image's working directory and the task's own files into the workspace's directory. Files that are there
    already stay: the user asked for that with --force."""
    scratch = new_directory(workspace.pier / "incoming")
    async with starter.open(plan, policy, "seed") as (sandbox, _):
        if await sandbox.exists(workdir):
            await sandbox.download(workdir, scratch / "files")
    if os.path.lexists(scratch / "files"):
        await asyncio.to_thread(merge_tree, scratch / "files", workspace.root)
    await asyncio.to_thread(remove_tree, workspace.pier / "incoming")


async def note_seed(workspace: Workspace, sandbox: Sandbox, workdir: str) -> None:
    """Note what the workspace began with."""
    if workspace.config.mounted:
        await asyncio.to_thread(keep_seed, workspace)
        return
    scratch = new_directory(workspace.pier / "incoming")
    await sandbox.download(workdir, scratch / "files")
    await asyncio.to_thread(keep_seed, workspace, scratch / "files")
    await asyncio.to_thread(remove_tree, workspace.pier / "incoming")


def copy_environment(source: Path, root: Path) -> None:
    """Copy the files of a task's environment, which its Dockerfile would."""
    for child in source.iterdir():
        if child.name in ("Dockerfile", ".dockerignore", "docker-compose.yaml") or os.path.lexists(root / child.name):
            continue
        if child.is_dir():
            shutil.copytree(child, root / child.name, symlinks=True)
        else:
            shutil.copy2(child, root / child.name, follow_symlinks=False)


async def keep(sandbox: Sandbox, directory: Path) -> None:
    """Write what differs from the image to `directory`, in place of what was kept there before."""
    scratch = directory.with_name(f".{directory.name}.new")
    await asyncio.to_thread(remove_tree, scratch)
    await keep_state(sandbox, scratch)
    await asyncio.to_thread(remove_tree, directory)
    scratch.rename(directory)
