"""pier's end of a container in the helper's care: a channel as to a local init, with streams in place of open files."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import stat
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from pier.errors import PolicyError, SandboxError
from pier.network.policy import Decision, NetworkPolicy, OnDecision
from pier.sandbox.contract import Change
from pier.sandbox.docker.attended import EVENT
from pier.sandbox.docker.entering import Entered
from pier.sandbox.docker.hub import Places
from pier.sandbox.docker.mux import Mux, Stream
from pier.sandbox.linux.channel import Channel, OnAnswer, close_all
from pier.sandbox.linux.network import Network

_LEAVE_SECONDS = 60
_SETTLE_SECONDS = 5


class FarChannel(Channel):
    """Requests to something behind the helper: to a container by its `key`, or to the helper itself."""

    def __init__(self, mux: Mux, key: str, gone: str, *, code: str = "sandbox_gone") -> None:
        self.oom = 0
        """How many processes the limit on memory has killed, as far as it was told."""
        self.on_decision: Callable[[Decision], None] | None = None
        self.closed = False
        self._mux = mux
        self._key = key
        self._gone = gone
        self._code = code
        self._loop = asyncio.get_running_loop()
        self._numbers = 0
        self._heard: dict[int, OnAnswer] = {}
        self._waiting: set[asyncio.Task[None]] = set()

    def send(self, message: dict[str, Any], fds: list[int] | None = None) -> None:
        if self.closed:
            raise self.lost()
        files = [(_kind(fd), self._mux.number(), fd) for fd in fds or []]
        told = [[kind, number] for kind, number, _ in files]
        self._mux.send(message | {"key": self._key} | ({"files": told} if told else {}))
        for kind, number, fd in files:
            if kind == "in":
                self._mux.take(number, source=os.dup(fd))
            elif kind == "out":
                sink = os.dup(fd)
                os.set_blocking(sink, False)
                self._mux.take(number, sink=sink)

    def take(self, message: dict[str, Any]) -> None:
        """Something came from the helper. What says that a command ended waits until its output is here."""
        try:
            fds = [self._receive(number) for _, number in message.pop("files", [])]
        except OSError as error:
            message, fds = {"id": message["id"], "error": str(error), "code": "sandbox"}, []
        self.oom = max(self.oom, message.get("oom", 0))
        streams = [stream for number in message.pop("after", []) if (stream := self._mux.stream(number)) is not None]
        busy = [stream for stream in streams if not stream.is_quiet]
        if busy:
            task = self._loop.create_task(self._take_after(busy, message, fds))
            self._waiting.add(task)
            task.add_done_callback(self._waiting.discard)
        else:
            self._pass_on(message, fds)

    async def _take_after(self, streams: list[Stream], message: dict[str, Any], fds: list[int]) -> None:
        for stream in streams:
            await stream.quiet()
        self._pass_on(message, fds)

    def _pass_on(self, message: dict[str, Any], fds: list[int]) -> None:
        if message["id"] == EVENT:
            self._note(message)
            return
        callback = self._heard.get(message["id"])
        if callback is None:
            close_all(fds)
        else:
            callback(message, fds)

    def _note(self, message: dict[str, Any]) -> None:
        if "gone" in message:
            self.close(f"the container {self._key} {message['gone']}" if message["gone"] else "")
        elif self.on_decision is not None:
            self.on_decision(Decision(**message["decision"]))

    def _receive(self, number: int) -> int:
        """An open file for a stream that goes both ways."""
        ours = theirs = None
        try:
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            sink = os.dup(ours.fileno())
        except OSError:
            self._mux.refuse(number)
            for end in (ours, theirs):
                if end is not None:
                    end.close()
            raise
        self._mux.take(number, source=ours.detach(), sink=sink)
        return theirs.detach()

    def resize(self, job: int, terminal: int, rows: int, columns: int) -> None:
        self.send({"op": "resize", "id": 0, "job": job, "rows": rows, "columns": columns})

    def close(self, why: str = "") -> None:
        if self.closed:
            return
        self._gone = why or self._gone
        self.closed = True
        for callback in list(self._heard.values()):
            callback({}, [])


def _kind(fd: int) -> str:
    """Which way the bytes of an open file go, seen from the far side."""
    mode = os.fstat(fd).st_mode
    if stat.S_ISCHR(mode):
        return "null"
    flags = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
    return "out" if flags == os.O_WRONLY else "in"


class FarEntered(Entered):
    """A container that the helper has entered."""

    def __init__(
        self, helper: FarChannel, channel: FarChannel, key: str, proof: dict[str, str], left: Callable[[], None]
    ) -> None:
        self.channel = self._far = channel
        self.proof = proof
        self.watching = []
        self._helper = helper
        self._key = key
        self._left = left

    def oom_kills(self) -> int:
        return self._far.oom

    async def changes(self) -> list[Change] | None:
        if self.channel.closed:
            raise self.channel.lost()
        rows = (await self._helper.ask({"op": "changes", "container": self._key}))[0]["changes"]
        return None if rows is None else [Change(*row) for row in rows]

    async def free_disk(self) -> int | None:
        return (await self._helper.ask({"op": "free", "container": self._key}))[0]["bytes"]

    async def used_disk(self, volumes: list[str]) -> int | None:
        asked = {"op": "measure", "container": self._key, "volumes": volumes}
        return (await self._helper.ask(asked))[0]["bytes"]

    def network(self, policy: NetworkPolicy, on_decision: OnDecision | None) -> Network:
        network = FarNetwork(policy, on_decision)
        self._far.on_decision = network.note
        return network

    async def open_hub(
        self,
        others: list[tuple[Entered, Network, Places]],
        names: Mapping[int, Mapping[str, int]],
    ) -> Callable[[], Awaitable[None]]:
        members = [[one._key, places] for one, _, places in others if isinstance(one, FarEntered)]
        told = [[number, dict(each)] for number, each in names.items()]
        request = {"container": self._key, "members": members, "names": told}
        await self._helper.ask({"op": "open_hub"} | request)

        async def close() -> None:
            with contextlib.suppress(SandboxError, TimeoutError):
                async with asyncio.timeout(_LEAVE_SECONDS):
                    await self._helper.ask({"op": "close_hub", "container": self._key})

        return close

    async def leave(self) -> None:
        self.channel.close()
        with contextlib.suppress(SandboxError, TimeoutError):
            async with asyncio.timeout(_LEAVE_SECONDS):
                await self._helper.ask({"op": "leave", "container": self._key})
        self._left()


class FarNetwork(Network):
    """A network that the helper serves; what it decides is told here."""

    def note(self, decision: Decision) -> None:
        self._gatekeeper.ledger.note(decision)

    async def settle(self, channel: Channel) -> None:
        if not channel.closed:
            with contextlib.suppress(SandboxError, TimeoutError):
                async with asyncio.timeout(_SETTLE_SECONDS):
                    await channel.ask({"op": "settle"})

    async def enforce(self, channel: Channel, policy: NetworkPolicy) -> None:
        self.policy = policy
        try:
            await channel.ask({"op": "network", "mode": policy.mode, "hosts": list(policy.hosts)})
        except SandboxError as error:
            if error.code != PolicyError.code:
                raise
            raise PolicyError(str(error), hint="pier doctor") from error
