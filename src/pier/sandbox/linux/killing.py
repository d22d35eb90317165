"""The end of a process that pier holds a descriptor of."""

from __future__ import annotations

import asyncio
import contextlib
import signal

from pier.errors import SandboxError

STOP_SECONDS = 60


async def kill_and_wait(pidfd: int) -> None:
    """Kill a process by its descriptor and wait for its end."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    loop.add_reader(pidfd, lambda: ended.done() or ended.set_result(None))
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await ended
    except TimeoutError:
        raise SandboxError(f"a sandbox's processes did not end in {STOP_SECONDS} s", code="stop_timeout") from None
    finally:
        loop.remove_reader(pidfd)
