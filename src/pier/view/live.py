"""Keeps the index current while pages are open, and notifies open pages of changes.

One task refreshes the index about once a second while pages are being requested. Each open page has a stream of
server-sent events: one for each change of its content.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from pier.errors import PierError
from pier.view.index import Index
from pier.view.pages import Pages

_PAUSE, _SHARE = 1.0, 3
"""The pause between two refreshes: at least one second, and three times the duration of the last refresh."""
_IDLE = 30.0
"""Seconds after the last request until refreshing pauses."""
_FIRST = 1.0
"""Seconds that the first page waits for the index."""
_BEAT = 15.0
"""Seconds between keep-alive comments."""


@dataclass(slots=True)
class IndexWatcher:
    """Refreshes the index. `indexing` is the number of trials read so far by the first refresh, 0 afterwards."""

    index: Index
    indexing: int = 0
    _asked: float = 0.0
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _ready: asyncio.Event = field(default_factory=asyncio.Event)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def ready(self) -> None:
        """Register a page request, and wait up to `_FIRST` seconds for the first refresh."""
        self._note()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FIRST):
                await self._ready.wait()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        def progress(count: int) -> None:
            self.indexing = count

        await asyncio.to_thread(self.index.refresh, progress)
        self.indexing, taken = 0, 0.0
        self._ready.set()
        while True:
            async with self._changed:
                self._changed.notify_all()
            await asyncio.sleep(max(_PAUSE, _SHARE * taken))
            if time.monotonic() - self._asked > _IDLE:
                self._wake.clear()
                await self._wake.wait()
            began = time.monotonic()
            await asyncio.to_thread(self.index.refresh)
            taken = time.monotonic() - began

    def _note(self) -> None:
        self._asked = time.monotonic()
        self._wake.set()

    async def tick(self) -> None:
        """Wait for the next refresh."""
        self._note()
        async with self._changed:
            await self._changed.wait()


async def follow(watcher: IndexWatcher, pages: Pages, job: str | None, trial: str | None) -> AsyncIterator[str]:
    """The server-sent events of one page: the list of jobs, a job, or a trial."""
    seen: str | None = None
    beat = time.monotonic()
    yield ": hello\n\n"
    while True:
        try:
            now = await asyncio.to_thread(_state, watcher, pages, job, trial)
        except PierError:
            now = None
        if now is not None and now != seen:
            yield f"data: {now}\n\n"
            seen, beat = now, time.monotonic()
        elif time.monotonic() - beat > _BEAT:
            yield ": still here\n\n"
            beat = time.monotonic()
        await watcher.tick()


def _state(watcher: IndexWatcher, pages: Pages, job: str | None, trial: str | None) -> str:
    """The state of a page; a change makes the browser load the page again."""
    if job is None:
        return json.dumps({"version": watcher.index.version, "indexing": watcher.indexing})
    found = pages.index.job(job)
    state = {"version": found["version"], "state": found["state"]}
    if trial is not None:
        opened = pages.open_trial(job, trial)
        state = {"trial": opened.view.state, "steps": 0, "standing": opened.row["standing"]}
        if opened.view.state == "running" and (part := opened.part({})) is not None:
            with pages.reader.open(part) as trajectory:
                state["steps"] = len(trajectory)
    return json.dumps(state)
