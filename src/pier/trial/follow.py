"""Keeps an agent's trajectory up to date while it runs, so that it can be watched and a run that is killed leaves one.

Deriving takes time off the same interpreter that serves the agents' models, so all trials of this process together
spend at most a tenth of it on this; with many trials, each is written less often. The last word is the derivation at
the agent's end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from pier.trial.agents import RECORDING
from pier.trial.outcome import captured
from pier.trial.trajectory import Told, derive

_PAUSE = 2.0
_REST = 9.0
"""How many times as long as a derivation took, none is made after it."""


@dataclass(slots=True)
class _Pace:
    """Whose turn it is. One for the process, since what it shares out is the interpreter."""

    busy: bool = False
    free_at: float = 0.0

    def take(self) -> bool:
        if self.busy or time.monotonic() < self.free_at:
            return False
        self.busy = True
        return True

    def give_back(self, seconds: float) -> None:
        self.busy = False
        self.free_at = time.monotonic() + _REST * seconds


_pace = _Pace()


@asynccontextmanager
async def followed(logs: Path, told: Told, *, recorded: bool) -> AsyncIterator[None]:
    """Derive the trajectory now and then while the context lasts; none is under way when it is left."""
    if not recorded:
        yield
        return
    over = asyncio.Event()
    task = asyncio.create_task(_follow(logs, told, over))
    try:
        yield
    finally:
        over.set()
        await task


async def _follow(logs: Path, told: Told, over: asyncio.Event) -> None:
    known = 0
    while not await _is_set_within(over, _PAUSE):
        size = _size(logs / RECORDING)
        if size == known or not _pace.take():
            continue
        began = time.monotonic()
        try:
            # What cannot be derived now is reported by the derivation at the end.
            with captured():
                await asyncio.to_thread(derive, logs, told, durable=False)
        finally:
            _pace.give_back(time.monotonic() - began)
        known = size


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
