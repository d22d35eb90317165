"""A container that pier entered, from the lease to its removal, and the sandbox that it is.

Everything but its start and end is as in a local sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiodocker
from aiodocker.containers import DockerContainer
from aiodocker.exceptions import DockerError

from pier.errors import SandboxError
from pier.lease import Lease
from pier.sandbox import arguments
from pier.sandbox.contract import OUTPUT_LIMIT, Change, OnOutput, ProtocolFactory, SandboxSpec
from pier.sandbox.docker.client import DISK_FULL, Client, engine_error
from pier.sandbox.docker.container import CONTAINER_ENDED
from pier.sandbox.docker.entering import Entered, Entrance
from pier.sandbox.docker.helper import HelperChannel
from pier.sandbox.docker.runtime import PLACE
from pier.sandbox.linux.channel import Channel, close_all, failure_of
from pier.sandbox.linux.limits import DiskWatch
from pier.sandbox.linux.process import LinuxProcess
from pier.sandbox.linux.sandbox import Home, LinuxListener, LinuxSandbox

__all__ = ["IMAGE_MISSING", "KIND", "LABEL", "ContainerBox", "engine_error", "remove"]

IMAGE_MISSING = "image_missing"
KIND = "container"
LABEL = "dev.pier.sandbox"
_START_SECONDS = 120
_STOP_SECONDS = 60
_AGAIN_SECONDS = 0.5
_CHANGES = {0: "changed", 1: "added", 2: "removed"}


class ContainerBox:
    """A container that is entered. `start` it once, `stop` it at any moment."""

    def __init__(
        self, lease: Lease, entrance: Entrance, docker: aiodocker.Docker, address: str, reopened: str = ""
    ) -> None:
        self.id = reopened or secrets.token_hex(6)
        self._stays = bool(reopened)
        self.name = f"pier-{self.id}"
        self.entered: Entered
        self._lease = lease
        self._entrance = entrance
        self._docker = docker
        self._address = address
        self.volumes: list[str] = []
        """Where the engine keeps what is written to volumes, which are not part of the container's layer."""
        self._disk: DiskWatch | None = None
        self._running: asyncio.Future[tuple[str, int]] | None = None
        self._stopping: asyncio.Task[None] | None = None

    @property
    def channel(self) -> Channel:
        return self.entered.channel

    @property
    def proof(self) -> dict[str, str]:
        return self.entered.proof

    @property
    def watching(self) -> list[int]:
        return self.entered.watching

    async def start(self, config: dict[str, Any], plan: dict[str, Any], keep: Path | None = None) -> None:
        """Make the container and enter it; when this raises or is cancelled, `stop` removes what was made. One that is
        opened again is only entered, and stays."""
        if not self._stays:
            kept = {"keep": str(keep)} if keep else {}
            self._lease.write(KIND, self.id, {"engine": self._address, "name": self.name, **kept})
        try:
            async with asyncio.timeout(_START_SECONDS):
                self._running = asyncio.ensure_future(self._run(config))
                id, pid = await asyncio.shield(self._running)
                self.entered = await self._entrance.enter(self.name, id, pid, plan)
        except TimeoutError:
            message = f"the container {self.name} did not start in {_START_SECONDS} s"
            raise SandboxError(message, code="start_timeout") from None
        except DockerError as error:
            raise engine_error(error) from error

    async def _run(self, config: dict[str, Any]) -> tuple[str, int]:
        if self._stays:
            container = self._docker.containers.container(self.name)
            await container.restart(timeout=0)
        else:
            container = await self._create(config)
            await container.start()
        found = await container.show()
        if not found["State"]["Pid"]:
            raise SandboxError(f"the container {self.name} ended at once", code=CONTAINER_ENDED)
        mounts = found.get("Mounts") or []
        self.volumes = [mount["Source"] for mount in mounts if mount.get("Type") == "volume" and mount.get("RW")]
        return found["Id"], found["State"]["Pid"]

    async def _create(self, config: dict[str, Any]) -> DockerContainer:
        try:
            return await self._docker.containers.create(config, name=self.name)
        except DockerError as error:
            if error.status != 404:
                raise
            raise SandboxError(f"the engine has no image {config['Image']}", code=IMAGE_MISSING) from error

    def oom_kills(self) -> int:
        """How many processes the limit on memory has killed."""
        return self.entered.oom_kills()

    def disk_kills(self) -> int:
        """How often everything was killed because of the limit on disk. An engine with quotas keeps it itself."""
        return self._disk.kills if self._disk else 0

    async def disk_was_full(self) -> bool:
        """Whether the watched disk was full at some time."""
        return self._disk is not None and await self._disk.was_full()

    def watch_disk(self, limit: int) -> None:
        """From now on kill everything inside whenever what it wrote takes more than `limit` bytes."""
        self._disk = DiskWatch(self.channel, limit, self.entered.free_disk, self._measure)

    async def _measure(self) -> int:
        """What the container's layer and volumes hold, also by files without a name; the engine counts those of the
        layer with one."""
        used = await self.entered.used_disk(self.volumes)
        if used is not None:
            return used
        try:
            found = await self._docker._query_json(f"containers/{self.name}/json", params={"size": "1"})
        except DockerError as error:
            raise engine_error(error) from error
        return int(found.get("SizeRw") or 0)

    async def changes(self) -> list[Change]:
        """What differs from the image, read from the container's layer or as the engine tells it; directories only when
        they were removed. Where pier's own program is mounted does not count."""
        seen = await self.entered.changes()
        if seen is None:
            seen = await self._ask_changes()
        return [change for change in seen if change.path != PLACE]

    async def _ask_changes(self) -> list[Change]:
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
        if self._disk is not None:
            await self._disk.stop()
        if hasattr(self, "entered"):
            await self.entered.leave()
        if self._running is not None:
            # An engine goes on with what it was asked for, also when nobody waits for the answer.
            await asyncio.wait([self._running], timeout=_STOP_SECONDS)
            if self._running.done() and not self._running.cancelled():
                self._running.exception()
        if not self._stays:
            await remove(self._docker, self.name)
            self._lease.strike(KIND, self.id)


@asynccontextmanager
async def temporary_container(docker: Client, lease: Lease, config: dict[str, Any]) -> AsyncIterator[DockerContainer]:
    """A container that serves a purpose of pier's own and is no sandbox: made, and gone at the end."""
    id = secrets.token_hex(6)
    lease.write(KIND, id, {"engine": docker.address, "name": f"pier-{id}"})
    try:
        yield await docker.containers.create({**config, "Labels": {LABEL: lease.owner}}, name=f"pier-{id}")
    finally:
        await asyncio.shield(remove(docker, f"pier-{id}"))
        lease.strike(KIND, id)


async def remove(docker: aiodocker.Docker, name: str) -> None:
    """Kill and remove a container; one that is gone already is fine."""
    container = docker.containers.container(name)
    try:
        async with asyncio.timeout(_STOP_SECONDS):
            try:
                await container.delete(force=True, v=True)
            except DockerError as error:
                if error.status != 500:
                    raise
                # Some engines fail to kill what is just ending.
                await asyncio.sleep(_AGAIN_SECONDS)
                await container.delete(force=True, v=True)
    except TimeoutError:
        raise SandboxError(f"the engine did not remove {name} in {_STOP_SECONDS} s", code="stop_timeout") from None
    except DockerError as error:
        if error.status == 409:
            with contextlib.suppress(DockerError, TimeoutError):
                await container.wait(condition="removed", timeout=_STOP_SECONDS)
        elif error.status != 404:
            raise engine_error(error) from error


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

    async def put_files(self, *args: Any, **options: Any) -> None:
        async with self._writing():
            await super().put_files(*args, **options)

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
        if not isinstance(channel, HelperChannel):
            return await super().listen(port, factory, host=host)
        listener = HelperListener(host, port, factory, channel)
        await listener.open()
        self._listeners.append(listener)
        return listener

    async def dial(self, port: int) -> socket.socket:
        arguments.check_number("port", port, 1, 0xFFFF)
        if isinstance(self.box.channel, HelperChannel):
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


class HelperListener(LinuxListener):
    """A socket in a container that the helper accepts connections from; each comes here as a stream."""

    def __init__(self, host: str, port: int, factory: ProtocolFactory, channel: HelperChannel) -> None:
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
