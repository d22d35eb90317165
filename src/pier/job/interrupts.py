"""Ctrl-C for a running job: the first stops it in good order, the second bounds the clean-up, the third leaves at once.

Handlers are in place from before the event loop starts until after it ended, so that no keystroke in a storm of them
finds the process without one.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
HURRY_SECONDS = 5.0
"""How long clean-up may still take after the second one."""

EXIT_CODE = 130


class Interrupts:
    """Catches signals while the context lasts. `connect` says what the first and second one do."""

    def __init__(self) -> None:
        self.count = 0
        self._before: dict[int, Any] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: Callable[[], None] = lambda: None

    def __enter__(self) -> Interrupts:
        for number in CAUGHT:
            self._before[number] = signal.signal(number, self._notice)
        return self

    def __exit__(self, *_: object) -> None:
        """Give the signals back; after an interrupt they are ignored, since the process is on its way out."""
        for number, before in self._before.items():
            signal.signal(number, signal.SIG_IGN if self.count else before)

    def connect(self, stop: Callable[[], None]) -> None:
        """Call `stop` in this event loop on the first and second signal, at once if there was one already."""
        self._loop = asyncio.get_running_loop()
        self._stop = stop
        if self.count:
            self._loop.call_soon(stop)

    def _notice(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 2:
            os._exit(EXIT_CODE)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._act)

    def _act(self) -> None:
        self._stop()
        if self.count > 1 and self._loop is not None:
            self._loop.call_later(HURRY_SECONDS, os._exit, EXIT_CODE)
