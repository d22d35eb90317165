"""The registry of checks, what each is given to work with, and how one is run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pier.errors import PolicyError, SandboxError
from pier.image.model import Image
from pier.lease import Held
from pier.network.policy import NetworkPolicy
from pier.sandbox.contract import Backend, Capabilities, Limits, Result, Sandbox, SandboxSpec

PATIENCE = 120.0
"""Seconds after which something that should have happened counts as not happening, on however slow a machine."""


@dataclass(frozen=True, slots=True)
class Bench:
    """What a check works with. `scratch` is an empty directory of the host."""

    backend: Backend
    image: Image
    capabilities: Capabilities
    scratch: Path
    held_before: tuple[Held, ...] = ()

    def held(self) -> list[Held]:
        """What the backend has written down since the check began."""
        found = [held for held in self.backend.lease.held() if held.kind in self.backend.kinds]
        return [held for held in found if held not in self.held_before]

    @asynccontextmanager
    async def sandbox(self, **spec: Any) -> AsyncIterator[Sandbox]:
        """A started sandbox, stopped in the end."""
        started = await self.backend.start(SandboxSpec(image=spec.pop("image", self.image), **spec))
        try:
            yield started
        finally:
            await asyncio.shield(started.stop())


Body = Callable[[Bench], Awaitable[None]]
SandboxBody = Callable[[Sandbox], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Check:
    """One promise. `needs` is the capability without which the backend must refuse instead (see `offered`)."""

    name: str
    promise: str
    needs: str
    body: Body


CHECKS: list[Check] = []


def check(promise: str, needs: str = "") -> Callable[[Body], Body]:
    """Register a check under its function's name."""

    def register(body: Body) -> Body:
        CHECKS.append(Check(body.__name__, promise, needs, body))
        return body

    return register


def check_inside(promise: str, needs: str = "", **spec: Any) -> Callable[[SandboxBody], SandboxBody]:
    """Register a check that works in one sandbox, started with `spec`."""

    def register(body: SandboxBody) -> SandboxBody:
        async def run_inside(bench: Bench) -> None:
            async with bench.sandbox(**spec) as sandbox:
                await body(sandbox)

        CHECKS.append(Check(body.__name__, promise, needs, run_inside))
        return body

    return register


def offered(needs: str, capabilities: Capabilities) -> bool:
    """Whether a capability is there: a field of `Capabilities`, `network:<mode>` or `limit:<name>`."""
    kind, _, name = needs.partition(":")
    if kind == "network":
        return name in capabilities.networks
    if kind == "limit":
        return name in capabilities.limits
    return not needs or bool(getattr(capabilities, needs))


async def verify(check: Check, backend: Backend, image: Image, scratch: Path) -> bool:
    """Run one check; AssertionError if the promise is broken. False: the capability is lacking, and was refused."""
    capabilities = await backend.capabilities()
    bench = Bench(backend, image, capabilities, scratch, tuple(backend.lease.held()))
    async with asyncio.timeout(PATIENCE * 2):
        if offered(check.needs, bench.capabilities):
            await check.body(bench)
            return True
        await _verify_refusal(check.needs, bench)
        return False


async def _verify_refusal(needs: str, bench: Bench) -> None:
    kind, _, name = needs.partition(":")
    if kind == "network":
        policy = NetworkPolicy(name, ("example.org",) if name == "allowlist" else ())  # type: ignore[arg-type]
        await refuses(bench.backend.start(SandboxSpec(bench.image, network=policy)), PolicyError)
    elif kind == "limit":
        asked = Limits(**{name: 1 << 30 if name in ("memory", "disk") else 100})
        await refuses(bench.backend.start(SandboxSpec(bench.image, limits=asked)), SandboxError)
    else:
        async with bench.sandbox() as sandbox:
            asked = {
                "snapshot": lambda: sandbox.snapshot(),
                "tty": lambda: sandbox.spawn("true", tty=True),
                "users": lambda: sandbox.exec("true", user="12345"),
                "listen": lambda: sandbox.listen(0, asyncio.Protocol),
                "isolates_verifier": lambda: sandbox.isolate({"/private": 0o755}),
            }
            if needs in asked:
                await refuses(asked[needs](), SandboxError)


async def refuses(awaitable: Awaitable[Any], kind: type[BaseException]) -> Any:
    """Await something that must raise `kind`, and give the error back."""
    try:
        got = await awaitable
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was expected, got {got!r}")


async def until(what: str, holds: Callable[[], Awaitable[bool]], seconds: float = PATIENCE) -> None:
    """Wait until something holds; AssertionError if it never does."""
    deadline = time.monotonic() + seconds
    while not await holds():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        await asyncio.sleep(0.02)


async def run(sandbox: Sandbox, command: Any, **options: Any) -> Result:
    """Run a command that must succeed."""
    options.setdefault("timeout", PATIENCE)
    result = await sandbox.exec(command, **options)
    ending = f"exit {result.exit_code}, timed out: {result.timed_out}, stdout {result.stdout[-500:]!r}, "
    assert result.ok, f"{command!r:.300}: {ending}stderr {result.stderr[-500:]!r}"
    return result


async def is_alive(sandbox: Sandbox, pid: str) -> bool:
    """Whether a process inside runs; a zombie does not."""
    look = await sandbox.exec(f"cat /proc/{int(pid)}/stat 2>/dev/null", timeout=PATIENCE)
    return look.ok and look.text.rpartition(")")[2].split()[0] not in ("Z", "X")


async def gone(sandbox: Sandbox, *pids: str) -> None:
    """Wait until processes inside have ended."""
    for pid in pids:
        await until(f"process {pid} to end", lambda pid=pid: _not(is_alive(sandbox, pid)))


async def _not(value: Awaitable[bool]) -> bool:
    return not await value
