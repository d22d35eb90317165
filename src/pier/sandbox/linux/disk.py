"""Keeps a sandbox below its limit on disk where the file system has no quota for it: what it wrote is measured."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from pier.errors import SandboxError
from pier.sandbox.linux.channel import Channel

_WATCH_SECONDS = 0.5
_MEASURE_SECONDS = 10.0
_LARGE = 1 << 30
"""A limit from which on measuring waits for a sign that it may be passed."""


class DiskWatch:
    """Kills everything inside whenever what it wrote takes more than `limit` bytes. `free` says how much space the disk
    has left (None if that is unknown), `measure` how much the sandbox takes."""

    def __init__(
        self,
        channel: Channel,
        limit: int,
        free: Callable[[], Awaitable[int | None]],
        measure: Callable[[], Awaitable[int]],
    ) -> None:
        self.kills = 0
        self._channel = channel
        self._limit = limit
        self._free = free
        self._measure = measure
        self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        """To measure costs much. Under a large limit it is done when the disk lost so much that the limit may be
        passed, and now and then, since others may have freed as much meanwhile."""
        loop = asyncio.get_running_loop()
        pause, used, most, due = _WATCH_SECONDS, 0, 0, loop.time() + _MEASURE_SECONDS
        while not self._channel.closed:
            await asyncio.sleep(pause)
            began = loop.time()
            try:
                free = await self._free() or 0
                most = max(most, free)
                if self._limit >= _LARGE and used + most - free <= self._limit and began < due:
                    continue
                used = await self._measure()
                most, due = free, began + _MEASURE_SECONDS
                if used > self._limit:
                    self.kills += 1
                    await self._channel.ask({"op": "kill_all"})
            except (SandboxError, OSError):
                continue
            pause = max(_WATCH_SECONDS, 10 * (loop.time() - began))

    async def stop(self) -> None:
        self._watching.cancel()
        await asyncio.wait([self._watching])


def free_bytes(directory: Path) -> int:
    """How much a user may still write where a directory is, or will be."""
    while not directory.exists():
        directory = directory.parent
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize
