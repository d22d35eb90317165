"""The sandbox that an agent works in, when services run beside it: policy and end are those of all of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from pier.network.policy import NetworkPolicy
from pier.sandbox.contract import Change, Sandbox
from pier.sandbox.docker.sandbox import DockerSandbox


class RunningServices(Protocol):
    """All services of a trial."""

    @property
    def sandboxes(self) -> Mapping[str, Sandbox]: ...

    def check(self) -> None: ...

    async def set_network(self, policy: NetworkPolicy) -> None: ...

    async def stop(self) -> None: ...


class MainSandbox(DockerSandbox):
    """The service `main`; a policy holds for all services, and stopping it ends all of them. When the container of a
    sidecar is lost, what a trial does at its turning points fails as if its own were."""

    group: RunningServices | None = None
    """None until the container has started."""

    def service(self, name: str) -> Sandbox | None:
        return self.group.sandboxes.get(name) if self.group else super().service(name)

    def services(self) -> tuple[str, ...]:
        return tuple(self.group.sandboxes) if self.group else super().services()

    async def set_network(self, policy: NetworkPolicy) -> None:
        await (self.group.set_network(policy) if self.group else super().set_network(policy))

    async def stop(self) -> None:
        await (self.group.stop() if self.group else super().stop())

    async def download(self, source: str, target: Path, **options: Any) -> list[str]:
        self._check()
        return await super().download(source, target, **options)

    async def changes(self) -> list[Change]:
        self._check()
        return await super().changes()

    async def kill_all(self) -> int:
        self._check()
        return await super().kill_all()

    def _check(self) -> None:
        if self.group is not None:
            self.group.check()
