"""The program of one service: started when what it depends on is there, watched, and started again if it asks for it.

pier runs it in the service's container after the network is in place: as process 1 of a process namespace of its own,
or below an init if it asks for one. So there is no moment in which a service runs without its policy, or asks for a
neighbour that has no address yet; and what it wrote is still there when it has ended.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pier.errors import SandboxError, TaskError
from pier.image.model import Image
from pier.sandbox.compose.model import MAIN, Health, Service
from pier.sandbox.contract import Result, Stream
from pier.sandbox.docker.sandbox import DockerSandbox
from pier.sandbox.linux.process import LinuxProcess

_IDLE = re.compile(r"(exec )?(sleep (infinity|inf|\d+[smhd]?)|tail -f /dev/null)")
_WAIT = ("sh", "-c", "sleep infinity")
_TAIL = 2000
_LOST = 137
_SLOWEST = 60.0


class ServiceProcess:
    """What runs in a service. `start` it once; `ready` returns when it is healthy, or is over and well."""

    def __init__(
        self, service: Service, sandbox: DockerSandbox, image: Image, on_output: Callable[[str, bytes], None] | None
    ) -> None:
        self.service = service
        self.started = asyncio.Event()
        self.healthy = asyncio.Event()
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._sandbox = sandbox
        self._argv = command_of(service, image)
        self._health = health_of(service, image)
        self._on_output = on_output
        self._tail = b""
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        if self._argv:
            self._watching = asyncio.create_task(self._watch(await self._spawn()))
        self.started.set()

    async def _spawn(self) -> LinuxProcess:
        service = self.service
        begin = self._sandbox.spawn if service.init else self._sandbox.spawn_first
        try:
            process = await begin(
                self._argv, user=service.user, tty=service.tty, stdin=service.stdin_open, on_output=self._hear
            )
        except SandboxError as error:
            raise self.failure(f"cannot be started: {error}") from error
        if not process.has_begun:
            raise self.failure(f"cannot be started: exit code {(await process.wait()).exit_code}")
        return process

    def _hear(self, _: Stream, data: bytes) -> None:
        self._tail = (self._tail + data)[-_TAIL:]
        if self._on_output is not None:
            self._on_output(self.service.name, data)

    async def _watch(self, process: LinuxProcess) -> None:
        """Wait for the end, and start it again as `restart` says. What the agent works in is never started again: what
        it ran would then run beside the tests."""
        pause, code, tries = 0.1, _LOST, self.service.restart_tries
        wanted = "no" if self.service.name == MAIN else self.service.restart
        try:
            code = self._note(await process.wait())
            while tries != 0 and (wanted == "always" or (wanted == "on-failure" and code)):
                await asyncio.sleep(pause)
                pause, tries = min(2 * pause, _SLOWEST), None if tries is None else tries - 1
                code = self._note(await (await self._spawn()).wait())
        except (SandboxError, TaskError) as error:
            self._hear("stdout", f"[{error}]\n".encode())
        self.ended.set_result(code)

    def _note(self, result: Result) -> int:
        why = ", since all memory of its limit was in use" if result.out_of_memory else ""
        self._hear("stdout", f"[ended with exit code {result.exit_code}{why}]\n".encode())
        return result.exit_code

    async def ready(self) -> None:
        """Return when it is healthy, or at once if nobody says what that is. `TaskError` if it ended in failure."""
        if self._health is None:
            self.check()
            return
        checking = asyncio.ensure_future(self._check(self._health))
        try:
            await asyncio.wait([checking, self.ended], return_when=asyncio.FIRST_COMPLETED)
            if checking.done():
                checking.result()
            elif self.ended.result():
                raise self.failure(f"ended with exit code {self.ended.result()} before it was healthy")
        finally:
            checking.cancel()

    def check(self) -> None:
        """`TaskError` if it has ended in failure."""
        if self.ended.done() and self.ended.result():
            raise self.failure(f"ended with exit code {self.ended.result()}")

    async def becomes_healthy(self) -> None:
        """Return when it is healthy. `TaskError` if it has ended, also if it ended well: it never will be."""
        healthy = asyncio.ensure_future(self.healthy.wait())
        try:
            await asyncio.wait([healthy, self.ended], return_when=asyncio.FIRST_COMPLETED)
            if not healthy.done():
                raise self.failure(f"ended with exit code {self.ended.result()} before it was healthy")
        finally:
            healthy.cancel()

    async def completed(self) -> None:
        """Return when it ended well."""
        if code := await asyncio.shield(self.ended):
            raise self.failure(f"ended with exit code {code}")

    async def _check(self, health: Health) -> None:
        begun, failures = time.monotonic(), 0
        while True:
            starting = time.monotonic() < begun + health.start_period
            result = await self._sandbox.exec(health.test, user=self.service.user, timeout=health.timeout or None)
            if result.ok:
                self.healthy.set()
                return
            failures += not starting
            if failures >= health.retries:
                told = (result.stdout + result.stderr).decode(errors="replace").strip()[-400:]
                how = "took too long" if result.timed_out else f"ended with exit code {result.exit_code}"
                raise self.failure(f"is not healthy: {' '.join(health.test)!r} {how}: {told}")
            await asyncio.sleep(health.start_interval if starting else health.interval)

    def failure(self, what: str) -> TaskError:
        told = self._tail.decode(errors="replace").strip()
        own = self.service.name == MAIN and self.service.entrypoint is None
        return TaskError(
            f"the service {self.service.name!r} {what}" + (f"\n{told}" if told else ""),
            hint="entrypoint: [] in the compose file keeps the image's ENTRYPOINT from running" if own else None,
            code="service",
        )

    async def stop(self) -> None:
        """Stop watching; the sandbox's end ends the program. Idempotent."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])


def command_of(service: Service, image: Image) -> tuple[str, ...]:
    """What a service runs, as engines put it together. What the agent works in waits, as with Harbor, if the file says
    nothing else; a mere wait needs no program."""
    config = image.config
    command = _WAIT if service.name == MAIN and service.command is None else service.command
    entrypoint = config.entrypoint if service.entrypoint is None else service.entrypoint
    argv = (*entrypoint, *(command or (() if service.entrypoint else config.cmd)))
    if service.name == MAIN and _IDLE.fullmatch(argv[-1] if argv[:2] in _SHELLS else " ".join(argv)):
        return ()
    if not argv and service.name != MAIN:
        raise TaskError(f"the service {service.name!r} has no command, and neither has its image", code="compose")
    return argv


_SHELLS = {(shell, option) for shell in ("sh", "bash", "/bin/sh", "/bin/bash") for option in ("-c", "-lc")}


def health_of(service: Service, image: Image) -> Health | None:
    """When a service counts as healthy: as the file says, or else its image; None if neither does."""
    own = image_health(image)
    if service.ignore_health or service.health is None:
        return None if service.ignore_health else own
    if service.health.test:
        return service.health
    return None if own is None else replace(service.health, test=own.test)


def image_health(image: Image) -> Health | None:
    """The health check of an image's own."""
    own: dict[str, Any] = image.config.healthcheck or {}
    test = own.get("Test") or []
    if test[:1] == ["CMD-SHELL"]:
        usual = Health((*image.config.shell, test[1]))
    elif test[:1] == ["CMD"]:
        usual = Health(tuple(test[1:]))
    else:
        return None
    times = {
        "Interval": "interval",
        "Timeout": "timeout",
        "StartPeriod": "start_period",
        "StartInterval": "start_interval",
    }
    said = {field: own[key] / 1e9 for key, field in times.items() if own.get(key)}
    return replace(usual, **said, retries=own.get("Retries") or usual.retries)
