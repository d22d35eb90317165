"""Removal of what a dead pier left: its sandboxes end by themselves, their directories and control groups do not."""

from __future__ import annotations

import asyncio
from pathlib import Path

from pier.lease import Held
from pier.sandbox.cgroup import ControlGroup
from pier.sandbox.linux.zygotes import Zygotes
from pier.sandbox.local.box import wait_for_end


async def destroy(held: Held, zygotes: Zygotes) -> None:
    """Remove a sandbox or a snapshot that was written down; whatever of it is gone already is fine."""
    directory = Path(held.data["directory"])
    await wait_for_end(directory)
    if groups := held.data.get("groups"):
        await asyncio.to_thread(ControlGroup(tuple(groups)).remove)
    if directory.exists():
        await zygotes.remove(directory)
