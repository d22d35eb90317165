"""A second workspace from the present state of one, and what is known about workspaces without asking much."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pier.beneath import remove
from pier.errors import WorkspaceError
from pier.workspace.client import call, call_now, is_running
from pier.workspace.diff import SEED, FileChange, changes_since_start
from pier.workspace.files import check_directory, copy_tree
from pier.workspace.ports import check_free
from pier.workspace.starting import StartOrder, start
from pier.workspace.workspace import PIER, Workspace, enclosing, new_directory

STATE, PLACED = "state", "placed.json"


async def fork(workspace: Workspace, target: Path, ports: Sequence[str], say: Callable[[str], None]) -> Workspace:
    """Copy the workspace to `target`, which must be new or empty, and start the copy."""
    if target.exists() and any(target.iterdir()):
        raise WorkspaceError(f"{target} is not empty", hint="choose another directory", code="not-empty")
    if enclosing(target) is not None:
        raise WorkspaceError(
            f"{target} lies in a workspace", hint="choose a directory elsewhere", code="nested-workspace"
        )
    check_free(ports)
    running = not workspace.is_host and is_running(workspace)
    target.mkdir(parents=True, exist_ok=True)
    made = Workspace(target.resolve(), workspace.config.model_copy(deep=True))
    made.config.id = type(workspace.config)().id
    made.config.ports = list(ports)
    (made.pier).mkdir()
    try:
        say("copying the files")
        if running:
            files = made.root / ".incoming"
            request = {"op": "save", "target": str(made.pier / STATE), "files": str(files)}
            await call(workspace, request)
            if os.path.lexists(files):
                check_directory(files)
                for child in files.iterdir():
                    if child.name not in (PIER, files.name):
                        child.rename(made.root / child.name)
                await asyncio.to_thread(remove, str(files))
        elif (workspace.pier / STATE).is_dir():
            await asyncio.to_thread(copy_tree, workspace.pier / STATE, made.pier / STATE)
        if not running or workspace.config.mounted:
            await asyncio.to_thread(copy_tree, workspace.root, made.root, (PIER,))
        for name in (SEED, "agent"):
            if (workspace.pier / name).is_dir():
                await asyncio.to_thread(copy_tree, workspace.pier / name, made.pier / name)
        if (workspace.pier / PLACED).is_file():
            shutil.copy2(workspace.pier / PLACED, made.pier / PLACED)
        made.save()
        made.keep_secrets(workspace.secret_env())
        made.agree(workspace.agreed())
    except BaseException:
        await asyncio.to_thread(remove, str(made.root))
        raise
    found, _ = await start(StartOrder(directory=made.root), say)
    return found


def workspace_changes(workspace: Workspace) -> list[FileChange]:
    """What changed in the workspace's directory since the start, wherever its files are now."""
    if workspace.config.mounted or not is_running(workspace):
        return changes_since_start(workspace)
    scratch = new_directory(workspace.pier / "incoming")
    try:
        workspace.fetch(workspace.config.workdir or "/", scratch / "files")
        return changes_since_start(workspace, scratch / "files")
    finally:
        remove(str(scratch))


def outside_changes(workspace: Workspace) -> list[dict[str, str]]:
    """What changed elsewhere in the sandbox since it was started; nothing if it does not run."""
    if workspace.is_host or not is_running(workspace):
        return []
    return call_now(workspace, {"op": "outside"})["changes"]


def status_of(workspace: Workspace) -> dict[str, Any]:
    """One row of `pier list`."""
    config = workspace.config
    running = not workspace.is_host and is_running(workspace)
    status = call_now(workspace, {"op": "status"}) if running else {}
    sandbox = status.get("sandbox")
    return {
        "workspace": str(workspace.root),
        "sandbox": f"pier-{workspace.root.name}-{sandbox}" if sandbox else None,
        "status": "—"
        if workspace.is_host
        else ("running" if status.get("ready") else "starting" if running else "stopped"),
        "mode": config.mode,
        "backend": None if workspace.is_host else config.backend,
        "task": config.task,
        "image": status.get("image") or config.image,
        "agents": config.agents,
        "ports": config.ports,
        "pid": status.get("pid"),
    }
