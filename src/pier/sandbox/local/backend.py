"""The local backend: what it can do here, and the start and end of its sandboxes."""

from __future__ import annotations

import asyncio
from pathlib import Path

from pier.errors import PolicyError, SandboxError
from pier.home import pier_home
from pier.idmap import IdMap
from pier.image.model import Image
from pier.lease import Held, Lease
from pier.sandbox import cgroup
from pier.sandbox.contract import Backend, Capabilities, Finding, SandboxSpec
from pier.sandbox.host import HostRoot, prepare
from pier.sandbox.local.box import KIND, Box
from pier.sandbox.local.plan import layers_of, make_plan
from pier.sandbox.local.sandbox import LocalSandbox
from pier.sandbox.local.zygotes import Zygotes


class LocalBackend(Backend):
    """Sandboxes of this machine's own kernel."""

    name = "local"

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._ids = IdMap.detect()
        self._zygotes: Zygotes | None = None
        self._sandboxes: set[LocalSandbox] = set()
        self._host: HostRoot | None = None
        self._host_lock = asyncio.Lock()
        self._base = pier_home() / "sandboxes"
        self._groups = cgroup.find()

    @property
    def lease(self) -> Lease:
        return self._lease

    @property
    def kinds(self) -> frozenset[str]:
        return frozenset({KIND})

    @property
    def zygotes(self) -> Zygotes:
        if self._zygotes is None:
            self._zygotes = Zygotes(self._ids)
        return self._zygotes

    async def capabilities(self) -> Capabilities:
        return Capabilities(users=self._ids.mode != "single", limits=self._enforced_by())

    def _enforced_by(self) -> dict[str, str]:
        found = {"processes": "rlimit", "open_files": "rlimit"}
        if self._groups is not None:
            found |= dict.fromkeys(self._groups.limits, "cgroup")
        return found

    async def start(self, spec: SandboxSpec) -> LocalSandbox:
        if spec.network.mode != "none":
            raise PolicyError(f"the local backend cannot enforce the network policy {spec.network.mode!r} here")
        host = await self._prepare_host() if spec.image.is_host else None
        enforced = self._enforced_by()
        plan = make_plan(spec, self._ids, host, enforced_by=enforced)
        layers = layers_of(spec, host)
        box = Box(self._lease, self.zygotes, self._base)
        limits = spec.limits
        wants_group = limits.memory is not None or limits.processes is not None or limits.cpus is not None
        cage = (self._groups, limits) if self._groups is not None and wants_group else None
        try:
            await box.start(plan, layers, cage)
        except BaseException:
            await asyncio.shield(box.stop())
            raise
        sandbox = LocalSandbox(spec, box)
        self._sandboxes.add(sandbox)
        return sandbox

    async def _prepare_host(self) -> HostRoot:
        async with self._host_lock:
            if self._host is None:
                id = f"host-{self._lease.owner}"
                directory = self._base / id
                self._lease.write(KIND, id, {"directory": str(directory), "groups": []})
                directory.mkdir(parents=True)
                self._host = await asyncio.to_thread(prepare, directory, whole=self._ids.mode == "root")
            return self._host

    async def remove_snapshot(self, image: Image) -> None:
        raise SandboxError("snapshots are not there yet")

    async def doctor(self) -> list[Finding]:
        return []

    async def destroy(self, held: Held) -> None:
        directory = Path(held.data["directory"])
        if directory.exists():
            await self.zygotes.ask_any({"op": "remove", "path": str(directory)})

    async def close(self) -> None:
        await asyncio.gather(*(sandbox.stop() for sandbox in list(self._sandboxes)))
        self._sandboxes.clear()
        if self._host is not None:
            id = f"host-{self._lease.owner}"
            await self.zygotes.ask_any({"op": "remove", "path": str(self._base / id)})
            self._lease.strike(KIND, id)
            self._host = None
        if self._zygotes is not None:
            self._zygotes.close()
            self._zygotes = None
