"""One life of a sandbox: its directory, its init and what limits it, from the lease to the last trace."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import socket
from pathlib import Path
from typing import Any

from pier.beneath import remove_some
from pier.errors import SandboxError
from pier.lease import Lease
from pier.sandbox.cgroup import ControlGroup, Hierarchies
from pier.sandbox.contract import Limits
from pier.sandbox.linux.channel import Answer, Channel, close_all
from pier.sandbox.linux.disk import DiskWatch, free_bytes
from pier.sandbox.linux.killing import STOP_SECONDS, kill_and_wait
from pier.sandbox.linux.wire import OUT_OF_MEMORY
from pier.sandbox.linux.zygotes import Zygotes

KIND = "sandbox"
_START_SECONDS = 120
_PAUSE = 0.02
_FEW = 32
"""Files and directories that are removed without asking anybody."""
_TRIES = 3000
_OWN_PROCESSES = 3
"""The threads of init and a worker, which the limit on processes does not count."""


class LocalBox:
    """A process tree in its namespaces. `start` it once, `stop` it at any moment."""

    def __init__(self, lease: Lease, zygotes: Zygotes, base: Path, id: str | None = None) -> None:
        self.id = id or secrets.token_hex(6)
        self.directory = base / self.id
        self.channel: Channel
        self._lease = lease
        self._zygotes = zygotes
        self._asked: asyncio.Future[Answer] | None = None
        self._pidfd = -1
        self._group: ControlGroup | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._oom_kills = 0
        self._disk: DiskWatch | None = None
        self.proof: dict[str, str] = {}
        self.watching: list[int] = []
        self.pid = 0
        self.shifted = True
        """Whether ids inside are others outside; root's are not where a file system cannot be mounted so."""

    async def start(self, plan: dict[str, Any], layers: list[str], cage: tuple[Hierarchies, Limits] | None) -> None:
        """Make everything; when this raises or is cancelled, `stop` removes what was made. `cage`: where to make a
        control group, and with which limits."""
        groups = cage[0].place(self.id) if cage else ()
        self._lease.write(KIND, self.id, {"directory": str(self.directory), "groups": groups})
        make_private(self.directory)
        if cage is not None:
            self._group = cage[0].make(self.id, cage[1], own_processes=_OWN_PROCESSES)
        message = {"op": "start", "directory": str(self.directory), "plan": plan, "layers": layers}
        message["groups"] = self._group.files if self._group is not None else ()
        zygote = await self._zygotes.pick()
        self._asked = zygote.ask(message)
        try:
            async with asyncio.timeout(_START_SECONDS):
                self._meet(await asyncio.shield(self._asked))
                answer, self.watching = await self.channel.wait(0)
                self.proof = answer["proof"]
        except TimeoutError:
            problem = f"the sandbox {self.id} did not start in {_START_SECONDS} s"
            raise SandboxError(problem, code="start_timeout") from None

    def _meet(self, answer: Answer) -> None:
        """Take over the init that a zygote gave."""
        message, (self._pidfd, control) = answer
        self.pid, self.shifted = message["pid"], message["shifted"]
        self.channel = Channel(socket.socket(fileno=control), f"the sandbox {self.id} is gone")
        self.channel.hear(OUT_OF_MEMORY, self._on_out_of_memory)

    def _on_out_of_memory(self, message: dict[str, Any], _: list[int]) -> None:
        self._oom_kills += 1 if message else 0

    def oom_kills(self) -> int:
        """How many processes were killed because of the limit on memory."""
        return self._oom_kills + (self._group.oom_kills() if self._group else 0)

    def disk_kills(self) -> int:
        """How often everything was killed because of the limit on disk."""
        return self._disk.kills if self._disk else 0

    def watch_disk(self, limit: int) -> None:
        """From now on kill everything inside whenever what it wrote takes more than `limit` bytes."""
        self._disk = DiskWatch(self.channel, limit, self._free, self._measure)

    async def _free(self) -> int:
        return free_bytes(self.directory)

    async def _measure(self) -> int:
        asked = {"op": "measure", "path": str(self.directory / "u"), "pid": self.pid}
        return (await self._zygotes.ask_any(asked))[0]["bytes"]

    async def stop(self) -> None:
        """Kill everything and remove every trace. Callers that come later wait for the first."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        await self.end()
        await self.remove()

    async def end(self) -> None:
        """Kill init, and so everything inside, and wait until the kernel is done with it."""
        close_all(self.watching)
        self.watching.clear()
        if self._asked is not None and self.pid == 0:
            with contextlib.suppress(SandboxError, TimeoutError):
                self._meet(await asyncio.wait_for(asyncio.shield(self._asked), STOP_SECONDS))
        if self._disk is not None:
            await self._disk.stop()
        if self._pidfd >= 0:
            await kill_and_wait(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        elif self._asked is not None and self.pid == 0:
            await wait_for_end(self.directory)
        if hasattr(self, "channel"):
            self.channel.close()
        if self._group is not None and not self._group.remove(0):
            await asyncio.to_thread(self._group.remove)

    async def remove(self) -> None:
        """Remove the directory and strike out the lease. A zygote is asked for what is much or belongs to others."""
        if not _is_removed(str(self.directory)):
            await self._zygotes.remove(self.directory)
        self._lease.strike(KIND, self.id)


def _is_removed(directory: str) -> bool:
    """Remove a directory at once if there is little in it; whether that is done."""
    try:
        return remove_some(directory, _FEW)
    except OSError:
        return False


def make_private(directory: Path) -> None:
    """Make a directory that nobody else on this machine can come to: what is inside has owners and set-id bits."""
    directory.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    directory.mkdir(mode=0o755)


async def wait_for_end(directory: Path) -> None:
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
