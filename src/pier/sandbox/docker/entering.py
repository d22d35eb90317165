"""How a container is entered: by this process's own zygotes, where pier is root on the engine's host."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from pier.errors import SandboxError
from pier.network.policy import NetworkPolicy, OnDecision
from pier.sandbox import seccomp
from pier.sandbox.contract import Change
from pier.sandbox.docker.client import maps_users
from pier.sandbox.docker.container import (
    CONTAINER_ENDED,
    ContainerGroup,
    Hub,
    Member,
    Places,
    find_layers,
    until_frozen,
)
from pier.sandbox.linux.channel import Channel, close_all
from pier.sandbox.linux.limits import free_bytes
from pier.sandbox.linux.network import Network
from pier.sandbox.linux.zygotes import Zygotes, kill_and_wait

ENGINE_ELSEWHERE = "far_socket"
"""The code of the error that an engine is at a socket of this machine, but is not on it."""


class Entered(ABC):
    """A container that pier has entered: requests go through `channel`, as to a local sandbox's init."""

    channel: Channel
    proof: dict[str, str]
    """How it was refused a network."""
    watching: list[int]
    """Sockets that tell what is tried without a network, until something takes them."""

    @abstractmethod
    def oom_kills(self) -> int:
        """How many processes the limit on memory has killed."""

    async def changes(self) -> list[Change] | None:
        """What differs from the image, if that can be seen from here without the engine."""
        return None

    async def free_disk(self) -> int | None:
        """How many bytes are free where the container writes, if that can be seen from here."""
        return None

    async def used_disk(self, volumes: list[str]) -> int | None:
        """How many bytes the container has written, and those in `volumes`, directories of the engine's host; None if
        that cannot be seen from here without the engine."""
        return None

    @abstractmethod
    def network(self, policy: NetworkPolicy, on_decision: OnDecision | None) -> Network:
        """What serves its network."""

    @abstractmethod
    async def open_hub(
        self,
        others: list[tuple[Entered, Network, Places]],
        names: Mapping[int, Mapping[str, int]],
    ) -> Callable[[], Awaitable[None]]:
        """Make private networks for containers that were entered the same way; what ends them comes back."""

    @abstractmethod
    async def leave(self) -> None:
        """End what serves it. Of a container that somebody has frozen everything is killed. Idempotent."""


class Entrance(ABC):
    """Enters containers of one engine."""

    @abstractmethod
    async def enter(self, name: str, id: str, pid: int, plan: dict[str, Any]) -> Entered:
        """Enter the container `id` whose first process is `pid` on the engine's host."""


class OwnEntrance(Entrance):
    """Enters containers of this machine, as root."""

    def __init__(self, zygotes: Zygotes) -> None:
        self._zygotes = zygotes

    async def enter(self, name: str, id: str, pid: int, plan: dict[str, Any]) -> OwnEntered:
        entered = OwnEntered(name, id, pid, self._zygotes)
        try:
            await entered.start(plan)
        except BaseException:
            await asyncio.shield(entered.leave())
            raise
        return entered


class OwnEntered(Entered):
    """A container with an attendant of this process's own."""

    def __init__(self, name: str, id: str, pid: int, zygotes: Zygotes) -> None:
        self.proof = {}
        self.watching = []
        self._name = name
        self._id = id
        self._pid = pid
        self._zygotes = zygotes
        self._pidfd = -1
        self._watching: asyncio.Task[None] | None = None
        try:
            self._first = os.pidfd_open(pid)
            self._group = ContainerGroup(pid)
            self._layers = find_layers(pid)
        except OSError as error:
            raise SandboxError(f"the container {name} ended at once: {error}", code=CONTAINER_ENDED) from error
        if not self._group.is_of(id):
            os.close(self._first)
            raise SandboxError(
                f"the engine's process {pid} is not the container {name} here: the engine is on another machine",
                code=ENGINE_ELSEWHERE,
                blame="user",
                retryable=False,
            )
        if self._group.has_users_of_its_own:
            os.close(self._first)
            raise maps_users("the Docker engine")

    async def start(self, plan: dict[str, Any]) -> None:
        """Have an attendant enter."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel = Channel(ours, f"the container {self._name} is gone")
        ready = asyncio.ensure_future(self.channel.wait(0))
        try:
            zygote = await self._zygotes.pick()
            plan = plan | {"container": self._id, "filter": seccomp.program().hex() if seccomp.supported() else ""}
            _, fds = await zygote.ask({"op": "enter", "pid": self._pid, "plan": plan}, [theirs.fileno()])
            self._pidfd = fds[0]
            self._watching = asyncio.create_task(self._watch())
            theirs.close()
            message, self.watching = await ready
            self.proof = message["proof"]
        finally:
            theirs.close()
            if not ready.done():
                ready.cancel()
            await asyncio.wait([ready])
            if not ready.cancelled():
                ready.exception()

    async def _watch(self) -> None:
        if await until_frozen(self._group, self.channel):
            self.channel.close(f"the container {self._name} was paused from outside")
            self._group.kill(self._pidfd, self._first)

    def oom_kills(self) -> int:
        return self._group.oom_kills()

    async def changes(self) -> list[Change] | None:
        if self._layers is None:
            return None
        if self.channel.closed:
            raise self.channel.lost()
        upper, lowers = self._layers
        answer, _ = await self._zygotes.ask_any({"op": "changes", "path": upper, "layers": lowers})
        return [Change(*row) for row in answer["changes"]]

    async def free_disk(self) -> int | None:
        return free_bytes(Path(self._layers[0])) if self._layers else None

    async def used_disk(self, volumes: list[str]) -> int | None:
        if self._layers is None:
            return None
        asked = {"op": "measure", "paths": [self._layers[0], *volumes], "pid": self._pid}
        return (await self._zygotes.ask_any(asked))[0]["bytes"]

    def network(self, policy: NetworkPolicy, on_decision: OnDecision | None) -> Network:
        return Network(policy, on_decision)

    async def open_hub(
        self,
        others: list[tuple[Entered, Network, Places]],
        names: Mapping[int, Mapping[str, int]],
    ) -> Callable[[], Awaitable[None]]:
        hub = Hub()

        async def close() -> None:
            hub.close()

        try:
            await hub.open([Member(one.channel, network.answer, places) for one, network, places in others], names)
        except BaseException:
            hub.close()
            raise
        return close

    async def leave(self) -> None:
        close_all(self.watching)
        self.watching.clear()
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        if hasattr(self, "channel"):
            self.channel.close()
        if self._group.is_frozen():
            self._group.kill(self._pidfd, self._first)
        if self._pidfd >= 0:
            await kill_and_wait(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
            self._watching = None
        if self._first >= 0:
            os.close(self._first)
            self._first = -1
