"""The sandbox that an agent works in, when services run beside it: all but policy and end is that of `main`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pier.image.model import Image
from pier.network.policy import NetworkPolicy
from pier.sandbox.compose.model import MAIN
from pier.sandbox.contract import (
    OUTPUT_LIMIT,
    Change,
    Command,
    Listener,
    Process,
    ProtocolFactory,
    Result,
    Sandbox,
)


class ServicesSandbox(Sandbox):
    """The service `main`; a policy holds for all services, and stopping it ends all of them. When the container of a
    sidecar is lost, what a trial does at its turning points fails as if its own were."""

    def __init__(
        self,
        sandboxes: Mapping[str, Sandbox],
        check: Callable[[], None],
        set_network: Callable[[NetworkPolicy], Awaitable[None]],
        stop: Callable[[], Awaitable[None]],
    ) -> None:
        self._sandboxes = sandboxes
        self._main = sandboxes[MAIN]
        self._check = check
        self._set_network = set_network
        self._stop = stop
        self.id = self._main.id
        self.spec = self._main.spec

    def service(self, name: str) -> Sandbox | None:
        return self if name == MAIN else self._sandboxes.get(name)

    async def set_network(self, policy: NetworkPolicy) -> None:
        await self._set_network(policy)

    async def stop(self) -> None:
        await self._stop()

    async def spawn(self, command: Command, **options: Any) -> Process:
        return await self._main.spawn(command, **options)

    async def exec(self, command: Command, **options: Any) -> Result:
        return await self._main.exec(command, **options)

    async def upload(self, source: Path, target: str, *, owner: str | None = None) -> None:
        await self._main.upload(source, target, owner=owner)

    async def write_file(self, target: str, data: bytes, *, mode: int = 0o644, owner: str | None = None) -> None:
        await self._main.write_file(target, data, mode=mode, owner=owner)

    async def download(
        self,
        source: str,
        target: Path,
        *,
        exclude: Sequence[str] = (),
        max_bytes: int | None = None,
        keep_empty: bool = True,
    ) -> list[str]:
        self._check()
        return await self._main.download(source, target, exclude=exclude, max_bytes=max_bytes, keep_empty=keep_empty)

    async def read_file(self, source: str, *, max_bytes: int = OUTPUT_LIMIT) -> bytes:
        return await self._main.read_file(source, max_bytes=max_bytes)

    async def put_tar(self, stream: AsyncIterator[bytes], target: str) -> None:
        await self._main.put_tar(stream, target)

    def get_tar(self, source: str) -> AsyncIterator[bytes]:
        return self._main.get_tar(source)

    async def remove(self, target: str) -> None:
        await self._main.remove(target)

    async def changes(self) -> list[Change] | None:
        self._check()
        return await self._main.changes()

    async def listen(self, port: int, factory: ProtocolFactory, *, host: str = "127.0.0.1") -> Listener:
        return await self._main.listen(port, factory, host=host)

    async def kill_all(self) -> int:
        self._check()
        return await self._main.kill_all()

    async def snapshot(self) -> Image:
        return await self._main.snapshot()
