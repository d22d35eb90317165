"""A running container as a sandbox: everything but its start and end is as in a local sandbox."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from pier.errors import SandboxError
from pier.sandbox import arguments
from pier.sandbox.contract import OUTPUT_LIMIT, OnOutput, ProtocolFactory, SandboxSpec
from pier.sandbox.docker.box import ContainerBox
from pier.sandbox.docker.client import DISK_FULL
from pier.sandbox.docker.far_channel import FarChannel
from pier.sandbox.linux.channel import close_all, failure_of
from pier.sandbox.linux.process import LinuxProcess
from pier.sandbox.linux.sandbox import Home, LinuxListener, LinuxSandbox

DISK_LIMIT = "disk_limit"
"""The code of the error that a container's own quota is used up."""
_LITTLE = 64 << 20
"""Bytes of free space below which an engine's disk counts as full."""


class DockerSandbox(LinuxSandbox[ContainerBox]):
    """A container that was entered."""

    def __init__(self, spec: SandboxSpec, box: ContainerBox, home: Home[ContainerBox]) -> None:
        super().__init__(spec, box, home)
        self.network = box.entered.network(spec.network, spec.on_decision)
        self.free_disk: Callable[[], Awaitable[int | None]] | None = None
        """How much space the engine has left, if it keeps a quota on this container."""

    @asynccontextmanager
    async def _writing(self) -> AsyncIterator[None]:
        """Tell a container at its own quota, which is the doing of what runs in it, from an engine's full disk."""
        try:
            yield
        except SandboxError as error:
            if error.code != DISK_FULL or self.free_disk is None or (await self.free_disk() or 0) < _LITTLE:
                raise
            # Without the cause, which would count as a fault of the machine.
            message = f"the container has reached its own limit on disk: {error.message}"
            raise SandboxError(message, code=DISK_LIMIT, blame="agent", retryable=False) from None

    async def upload(self, *args: Any, **options: Any) -> None:
        async with self._writing():
            await super().upload(*args, **options)

    async def write_file(self, *args: Any, **options: Any) -> None:
        async with self._writing():
            await super().write_file(*args, **options)

    async def put_tar(self, *args: Any, **options: Any) -> None:
        async with self._writing():
            await super().put_tar(*args, **options)

    async def put_packed(self, *args: Any, **options: Any) -> None:
        async with self._writing():
            await super().put_packed(*args, **options)

    async def spawn_first(
        self,
        argv: Sequence[str],
        *,
        user: str | None = None,
        tty: bool = False,
        stdin: bool = False,
        on_output: OnOutput | None = None,
    ) -> LinuxProcess:
        """`spawn` a program as process 1 of a process namespace of its own. Commands that come later join it there,
        until it ends; the sandbox goes on without it. There is one such program at a time."""
        request = self._request(argv, None, None, user) | {"first": True}
        return await self._start(request, on_output, OUTPUT_LIMIT, tty=tty, wants_input=stdin)

    async def listen(self, port: int, factory: ProtocolFactory, *, host: str = "127.0.0.1") -> LinuxListener:
        arguments.check_listener(port, factory, host)
        channel = self.box.channel
        if not isinstance(channel, FarChannel):
            return await super().listen(port, factory, host=host)
        listener = FarListener(host, port, factory, channel)
        await listener.open()
        self._listeners.append(listener)
        return listener

    async def dial(self, port: int) -> socket.socket:
        if isinstance(self.box.channel, FarChannel):
            raise SandboxError(
                "cannot connect to a port inside: the engine is reached through a helper",
                code="cannot_dial",
                blame="user",
                retryable=False,
            )
        return await super().dial(port)

    async def _serve(self, listener: LinuxListener) -> None:
        """Once: a snapshot leaves a container and its sockets as they are."""
        if listener not in self._listeners:
            await super()._serve(listener)


class FarListener(LinuxListener):
    """A socket in a container that the helper accepts connections from; each comes here as a stream."""

    def __init__(self, host: str, port: int, factory: ProtocolFactory, channel: FarChannel) -> None:
        super().__init__(host, port, factory)
        self._channel = channel
        self._number = channel.number()
        self._answered: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._accepting: set[asyncio.Task[Any]] = set()

    async def open(self) -> None:
        """Start to listen."""
        request = {"op": "listen", "id": self._number, "host": self.host, "port": self.port}
        self._channel.hear(self._number, self._on_message)
        self._channel.send(request)
        message = await self._answered
        if not message:
            raise self._channel.lost()
        if "error" in message:
            self._channel.forget(self._number)
            raise failure_of(message)
        self.port = message["port"]

    def _on_message(self, message: dict[str, Any], fds: list[int]) -> None:
        if not self._answered.done():
            self._answered.set_result(message)
        elif fds and not self.closed:
            loop = asyncio.get_running_loop()
            sock = socket.socket(fileno=fds.pop())
            sock.setblocking(False)
            task = loop.create_task(loop.connect_accepted_socket(self._factory, sock))
            self._accepting.add(task)
            task.add_done_callback(self._accepting.discard)
        close_all(fds)

    async def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._channel.forget(self._number)
            if not self._channel.closed:
                self._channel.send({"op": "unlisten", "id": 0, "listener": self._number})
