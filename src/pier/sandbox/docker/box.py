"""One container and the attendant that serves it, from the lease to the last trace."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
from pathlib import Path
from typing import Any

import aiodocker
from aiodocker.exceptions import DockerError

from pier.errors import SandboxError
from pier.lease import Lease
from pier.sandbox.contract import Change
from pier.sandbox.docker.group import ContainerGroup
from pier.sandbox.local.box import kill_and_wait
from pier.sandbox.local.channel import Channel
from pier.sandbox.local.zygotes import Zygotes

KIND = "container"
LABEL = "dev.pier.sandbox"
_START_SECONDS = 120
_STOP_SECONDS = 60
_WATCH_SECONDS = 1.0
_FROZEN_LOOKS = 5
"""A container that was seen frozen that many times in a row is given up. Engines freeze one for a moment for their own
purposes, such as a commit."""
_CHANGES = {0: "changed", 1: "added", 2: "removed"}


class ContainerBox:
    """A container with its attendant. `start` it once, `stop` it at any moment."""

    def __init__(self, lease: Lease, zygotes: Zygotes, docker: aiodocker.Docker, address: str) -> None:
        self.id = secrets.token_hex(6)
        self.name = f"pier-{self.id}"
        self.channel: Channel
        self.proof: dict[str, str] = {}
        self._lease = lease
        self._zygotes = zygotes
        self._docker = docker
        self._address = address
        self._pidfd = -1
        self._running: asyncio.Future[int] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._group: ContainerGroup | None = None
        self._first = -1
        self._watching: asyncio.Task[None] | None = None

    async def start(self, config: dict[str, Any], plan: dict[str, Any]) -> None:
        """Make the container and enter it; when this raises or is cancelled, `stop` removes what was made."""
        self._lease.write(KIND, self.id, {"engine": self._address, "name": self.name})
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel = Channel(ours, f"the container {self.name} is gone")
        ready = asyncio.ensure_future(self.channel.wait(0))
        try:
            async with asyncio.timeout(_START_SECONDS):
                self._running = asyncio.ensure_future(self._run(config))
                await self._enter(await asyncio.shield(self._running), plan, theirs)
                self.proof = (await ready)[0]["proof"]
        except TimeoutError:
            message = f"the container {self.name} did not start in {_START_SECONDS} s"
            raise SandboxError(message, code="start_timeout") from None
        except DockerError as error:
            raise engine_error(error) from error
        finally:
            theirs.close()
            if not ready.done():
                ready.cancel()
            await asyncio.wait([ready])
            if not ready.cancelled():
                ready.exception()

    async def _run(self, config: dict[str, Any]) -> int:
        container = await self._docker.containers.create(config, name=self.name)
        await container.start()
        pid = (await container.show())["State"]["Pid"]
        if not pid:
            raise SandboxError(f"the container {self.name} ended at once", code="container_ended")
        try:
            self._first = os.pidfd_open(pid)
            self._group = ContainerGroup(pid)
        except OSError as error:
            raise SandboxError(f"the container {self.name} ended at once: {error}", code="container_ended") from error
        self._watching = asyncio.create_task(self._watch(self._group))
        return pid

    async def _watch(self, group: ContainerGroup) -> None:
        """What is frozen answers nothing, so that everybody who asks would wait for as long as somebody else likes."""
        looks = 0
        while not self.channel.closed and looks < _FROZEN_LOOKS:
            await asyncio.sleep(_WATCH_SECONDS)
            looks = looks + 1 if group.is_frozen() else 0
        if looks == _FROZEN_LOOKS:
            self.channel.close(f"the container {self.name} was paused from outside")
            self._kill(group)

    def _kill(self, group: ContainerGroup) -> None:
        """Kill everything in the container, whether it is frozen or not."""
        for fd in (self._pidfd, self._first):
            if fd >= 0:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
        group.thaw()

    async def _enter(self, pid: int, plan: dict[str, Any], theirs: socket.socket) -> None:
        zygote = await self._zygotes.pick()
        _, fds = await zygote.ask({"op": "enter", "pid": pid, "plan": plan}, [theirs.fileno()])
        self._pidfd = fds[0]

    def oom_kills(self) -> int:
        """How many processes the limit on memory has killed."""
        return self._group.oom_kills() if self._group is not None else 0

    async def changes(self) -> list[Change]:
        """What differs from the image, as the engine tells it; directories only when they were removed."""
        try:
            rows = await self._docker._query_json(f"containers/{self.name}/changes")
        except DockerError as error:
            raise engine_error(error) from error
        found = [(row["Path"], _CHANGES[row["Kind"]]) for row in rows or []]
        parents = {str(Path(path).parent) for path, _ in found}
        return [Change(path, kind) for path, kind in found if kind == "removed" or path not in parents]  # type: ignore[arg-type]

    async def stop(self) -> None:
        """Kill everything and remove every trace. Callers that come later wait for the first."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        if hasattr(self, "channel"):
            self.channel.close()
        if self._group is not None and self._group.is_frozen():
            self._kill(self._group)
        if self._pidfd >= 0:
            await kill_and_wait(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        if self._running is not None:
            # An engine goes on with what it was asked for, also when nobody waits for the answer.
            await asyncio.wait([self._running], timeout=_STOP_SECONDS)
            if self._running.done() and not self._running.cancelled():
                self._running.exception()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        if self._first >= 0:
            os.close(self._first)
            self._first = -1
        await remove(self._docker, self.name)
        self._lease.strike(KIND, self.id)


async def remove(docker: aiodocker.Docker, name: str) -> None:
    """Kill and remove a container; one that is gone already is fine."""
    container = docker.containers.container(name)
    try:
        async with asyncio.timeout(_STOP_SECONDS):
            await container.delete(force=True, v=True)
    except TimeoutError:
        raise SandboxError(f"the engine did not remove {name} in {_STOP_SECONDS} s", code="stop_timeout") from None
    except DockerError as error:
        if error.status == 409:
            with contextlib.suppress(DockerError, TimeoutError):
                await container.wait(condition="removed", timeout=_STOP_SECONDS)
        elif error.status != 404:
            raise engine_error(error) from error


def engine_error(error: DockerError) -> SandboxError:
    """What an engine said, as an error with blame."""
    text = error.message if isinstance(error.message, str) else str(error)
    if error.status == 900:
        return SandboxError(f"the Docker engine does not answer: {text}", code="engine_down", hint="pier doctor")
    if "no space left" in text.lower():
        return SandboxError(f"the Docker engine's disk is full: {text}", code="disk_full", hint="docker system df")
    if error.status == 404:
        return SandboxError(f"the Docker engine lost it: {text}", code="container_gone")
    return SandboxError(f"the Docker engine refused: {text}", code="engine")
