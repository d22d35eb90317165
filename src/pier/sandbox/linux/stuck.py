"""Frees pier from commands that keep their own output from being read.

A program that splices a stalled socket into its output holds the lock of that pipe while it waits, and a read by pier
waits for the lock in the kernel, even if the pipe is non-blocking. The event loop stands still then, with everything
that pier runs. A thread watches how long such a call takes, and has the command killed, which frees the lock.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pier.sandbox.linux import wire

if TYPE_CHECKING:
    from pier.sandbox.linux.channel import Channel

_PATIENCE = 2.0
"""Seconds that one read or write may take before its command is killed; after twice as long, all commands are."""


class Watch:
    """Watches the calls of one thread, the event loop's. Its own thread starts with the first call."""

    def __init__(self) -> None:
        self._since = 0.0
        self._channel: Channel | None = None
        self._job = 0
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def over(self, channel: Channel, job: int) -> Iterator[None]:
        """Watch a read or write of a pipe that the command `job` of a sandbox has the other end of."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pier-stuck", daemon=True)
            self._thread.start()
        self._channel, self._job, self._since = channel, job, time.monotonic()
        try:
            yield
        finally:
            self._since = 0.0

    def _run(self) -> None:
        while True:
            time.sleep(_PATIENCE / 4)
            since, channel, job = self._since, self._channel, self._job
            if channel is not None and since and time.monotonic() > since + _PATIENCE:
                patient = time.monotonic() < since + 2 * _PATIENCE
                order = {"op": "kill", "id": 0, "job": job} if patient else {"op": "kill_all", "id": 0}
                with contextlib.suppress(OSError):
                    channel.send_now(*wire.encode(order, []))


WATCH = Watch()
