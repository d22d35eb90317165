"""Writes what recorders hold back, and sees to it that it is on disk soon after.

Lines of a call that is still running wait for each other for `HOLD` seconds at most, so that a quick call is one write
and a long stream is a few each second. All that was written is on disk within `SYNC` seconds, and no call waits for it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

HOLD = 0.05
SYNC = 0.5

log = logging.getLogger(__name__)


class Held(Protocol):
    """What holds lines back."""

    def flush(self) -> None: ...

    def sync(self) -> None:
        """Wait for the disk; called in a thread."""
        ...

    def rest(self) -> None:
        """Hold nothing open that is not in use."""
        ...


class Flusher:
    """One for all recorders of a gateway."""

    def __init__(self) -> None:
        self._held: set[Held] = set()
        self._written: set[Held] = set()
        self._flushing: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._syncing: asyncio.Task[None] | None = None

    def flush_soon(self, held: Held) -> None:
        self._held.add(held)
        if self._flushing is None:
            self._flushing = asyncio.get_running_loop().call_later(HOLD, self._flush)

    def sync_soon(self, held: Held) -> None:
        self._written.add(held)
        if self._timer is None and self._syncing is None:
            self._timer = asyncio.get_running_loop().call_later(SYNC, self._start)

    async def close(self) -> None:
        """All is written and on disk."""
        if self._flushing:
            self._flush()
        while self._written or self._syncing:
            if self._timer:
                self._start()
            if self._syncing:
                await asyncio.wait({self._syncing})

    def _flush(self) -> None:
        if self._flushing:
            self._flushing.cancel()
            self._flushing = None
        held, self._held = self._held, set()
        for each in held:
            each.flush()
            self.sync_soon(each)

    def _start(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if self._syncing is None:
            self._syncing = asyncio.get_running_loop().create_task(self._sync())

    async def _sync(self) -> None:
        written, self._written = self._written, set()
        try:
            await asyncio.to_thread(_sync_all, written)
        finally:
            self._syncing = None
            for each in written:
                if each not in self._written:
                    each.rest()
            if self._written and self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(SYNC, self._start)


def _sync_all(written: set[Held]) -> None:
    for each in written:
        try:
            each.sync()
        except OSError as error:
            log.warning("a recording may not survive a loss of power: %s", error)
