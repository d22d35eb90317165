"""Removal of what a dead pier left: its sandboxes end by themselves, their directories and control groups do not."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from pathlib import Path

from pier.errors import SandboxError
from pier.lease import Held
from pier.sandbox.cgroup import Group
from pier.sandbox.local.zygotes import Zygotes

_PAUSE = 0.02
_TRIES = 3000


async def destroy(held: Held, zygotes: Zygotes) -> None:
    """Remove a sandbox or a snapshot that was written down; whatever of it is gone already is fine."""
    directory = Path(held.data["directory"])
    await _wait_for_end(directory)
    if groups := held.data.get("groups"):
        await asyncio.to_thread(Group(tuple(map(Path, groups))).remove)
    if directory.exists():
        await zygotes.remove(directory)


async def _wait_for_end(directory: Path) -> None:
    """Wait until no process of a sandbox is left: its init, which ends when its owner does, holds a lock."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        for _ in range(_TRIES):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            await asyncio.sleep(_PAUSE)
        raise SandboxError(f"the processes of {directory.name} outlived their owner and do not end")
    finally:
        os.close(fd)
