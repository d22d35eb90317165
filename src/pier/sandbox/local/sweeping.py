"""Removal of what a dead pier left: its sandboxes end by themselves, their directories and control groups do not."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

from pier.lease import Held
from pier.sandbox.cgroup import Group
from pier.sandbox.local.box import kill_and_wait
from pier.sandbox.local.zygotes import Zygotes


async def destroy(held: Held, zygotes: Zygotes) -> None:
    """Remove a sandbox or a snapshot that was written down; whatever of it is gone already is fine."""
    directory = Path(held.data["directory"])
    await _end_init(directory / "pid")
    if groups := held.data.get("groups"):
        await asyncio.to_thread(Group(tuple(map(Path, groups))).remove)
    if directory.exists():
        await zygotes.ask_any({"op": "remove", "path": str(directory)})


async def _end_init(note: Path) -> None:
    """Kill the init that a note speaks of, if that very process still runs."""
    try:
        pid, born = note.read_text().split()
        pidfd = os.pidfd_open(int(pid))
    except (OSError, ValueError):
        return
    try:
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{int(pid)}/stat").read_text()
            if status.rpartition(")")[2].split()[19] == born:
                await kill_and_wait(pidfd)
    finally:
        os.close(pidfd)
