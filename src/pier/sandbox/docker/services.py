"""Runs the services of a task: containers on private networks of the trial, each under the trial's policy.

pier starts a service's program in its container after the network is in place: as process 1 of a process namespace, or
below an init if the service asks for one. So no service runs without its policy or before its neighbours have
addresses, and what it wrote is still there when it has ended. A program is started when its dependencies are ready,
watched, and restarted as its compose file says. The agent's sandbox ends together with its services.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pier.errors import SandboxError, TaskError
from pier.image.model import Image
from pier.lease import close_all, close_in_turn
from pier.network import plumbing
from pier.network.policy import NONE, Decision, NetworkPolicy, OnDecision
from pier.sandbox.compose import MAIN, Compose, Composition, Health, Service
from pier.sandbox.contract import Change, Limits, Result, Sandbox, SandboxSpec, Stream
from pier.sandbox.docker.sandbox import DockerSandbox
from pier.sandbox.docker.volumes import TrialVolumes
from pier.sandbox.linux.process import LinuxProcess

if TYPE_CHECKING:
    from pier.sandbox.docker.backend import DockerBackend


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
                report = (result.stdout + result.stderr).decode(errors="replace").strip()[-400:]
                how = "took too long" if result.timed_out else f"ended with exit code {result.exit_code}"
                raise self.failure(f"is not healthy: {' '.join(health.test)!r} {how}: {report}")
            await asyncio.sleep(health.start_interval if starting else health.interval)

    def failure(self, what: str) -> TaskError:
        report = self._tail.decode(errors="replace").strip()
        own = self.service.name == MAIN and self.service.entrypoint is None
        return TaskError(
            f"the service {self.service.name!r} {what}" + (f"\n{report}" if report else ""),
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


_KEEPERS = 3
"""Who keeps a program that is process 1, which the limit on processes does not count either."""
_MOST_PROCESSES = 4096
"""What a sidecar may have of them, if nobody says how many."""


async def start_services(backend: DockerBackend, spec: SandboxSpec) -> DockerSandbox:
    """Start all services and wait until they are up; when this raises or is cancelled nothing is left."""
    assert spec.compose is not None
    group = ServiceGroup(backend, spec, spec.compose)
    try:
        await group.start()
    except BaseException:
        await asyncio.shield(group.stop())
        raise
    return group.sandboxes[MAIN]


class ServiceGroup:
    """The services of one trial, from the first container to the last volume."""

    def __init__(self, backend: DockerBackend, spec: SandboxSpec, wanted: Composition) -> None:
        self.sandboxes: dict[str, DockerSandbox] = {}
        self._backend = backend
        self._spec = spec
        self._wanted = wanted
        self._compose: Compose = wanted.compose
        self._networks = {name: number for number, name in enumerate(self._compose.networks)}
        self._hosts = {name: number for number, name in enumerate(self._compose.services, plumbing.FIRST)}
        self._processes: dict[str, ServiceProcess] = {}
        self._volumes: TrialVolumes | None = None
        self._close_hub: Callable[[], Awaitable[None]] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._most_memory = 0
        if len(self._networks) > plumbing.MOST or len(self._hosts) > plumbing.LAST - plumbing.FIRST:
            raise TaskError(f"{self._compose.path}: too many services or networks", code="compose")

    async def start(self) -> None:
        self._check_conditions()
        self._volumes = volumes = await self._backend.volumes(self._wanted.images[MAIN])
        self._most_memory = await self._backend.memory() // 2
        services = self._compose.services.values()
        binds = {service.name: await self._binds(service, volumes) for service in services}
        await _all(self._start_container(service, binds[service.name]) for service in services)
        await self._connect()
        await self.set_network(self._spec.network)
        await _all(self._bring_files(service) for service in services)
        for service in services:
            image, sandbox = self._wanted.images[service.name], self.sandboxes[service.name]
            self._processes[service.name] = ServiceProcess(service, sandbox, image, self._wanted.on_output)
        await _all(self._bring_up(process) for process in self._processes.values())
        for process in self._processes.values():
            process.check()

    def _check_conditions(self) -> None:
        """Refuse to wait for the health of a service of which nobody says what that is."""
        for service in self._compose.services.values():
            for name, condition in service.depends_on.items():
                other = self._compose.services[name]
                if condition != "service_healthy" or health_of(other, self._wanted.images[name]) is not None:
                    continue
                why = "is disabled" if other.ignore_health else "is neither in the file nor in its image"
                raise TaskError(
                    f"{self._compose.path}: services.{service.name}.depends_on.{name}: waits for service_healthy, but "
                    f"the healthcheck of {name!r} {why}",
                    hint=f"give {name} a healthcheck, or wait for service_started",
                    code="compose",
                )

    async def _binds(self, service: Service, volumes: TrialVolumes) -> list[str]:
        found: list[str] = []
        for volume in service.volumes:
            if volume.source is not None and not volume.source.is_dir():
                continue
            if volume.source is not None:
                name = await volumes.filled(volume.source)
            else:
                name = await volumes.get(f"{service.name}{volume.name}" if volume.name[0] == "/" else volume.name)
            found.append(f"{name}:{volume.target}:{'ro' if volume.read_only else 'rw'}")
        return found

    async def _start_container(self, service: Service, binds: list[str]) -> None:
        hostname = service.hostname or service.name
        places = self._places(service)
        own = [f"{hostname}:{plumbing.service_address(*place)}" for place in places[:1]]
        more: dict[str, Any] = {
            "Dns": [plumbing.hub_address(place[0]) for place in places[:1]],
            "ExtraHosts": [*own, *(f"{name}:{address}" for name, address in service.extra_hosts.items())],
            "Binds": binds,
            "Tmpfs": dict(service.tmpfs),
        }
        if service.shm_size:
            more["ShmSize"] = service.shm_size
        kind = MainSandbox if service.name == MAIN else DockerSandbox
        sandbox = await self._backend.start_container(self._service_spec(service, hostname), more, kind)
        if isinstance(sandbox, MainSandbox):
            sandbox.group = self
        self.sandboxes[service.name] = sandbox

    def _service_spec(self, service: Service, hostname: str) -> SandboxSpec:
        spec = self._spec
        common = {
            "network": NONE,
            "hostname": hostname,
            "compose": None,
            "on_decision": self._on_decision(service),
            "limits": self._limits(service),
        }
        if service.name != MAIN:
            return replace(
                spec,
                **common,
                image=self._wanted.images[service.name],
                mounts=(),
                env=dict(service.env),
                user=service.user,
                workdir=service.workdir,
                gpus=service.gpus,
            )
        return replace(
            spec,
            **common,
            env={**service.env, **spec.env},
            user=spec.user or service.user,
            workdir=spec.workdir or service.workdir,
            gpus=spec.gpus or service.gpus,
        )

    def _limits(self, service: Service) -> Limits:
        """What the file says of a service, else what the task and the run say. A sidecar of which nobody says anything
        gets no more than leaves room for others."""
        said = {"cpus": service.cpus, "memory": service.memory, "processes": service.processes}
        limits = replace(self._spec.limits, **{name: value for name, value in said.items() if value is not None})
        if service.name != MAIN:
            memory, processes = limits.memory or self._most_memory, limits.processes or _MOST_PROCESSES
            limits = replace(limits, memory=memory, processes=processes)
        return limits if limits.processes is None else replace(limits, processes=limits.processes + _KEEPERS)

    def _on_decision(self, service: Service) -> OnDecision | None:
        tell = self._spec.on_decision
        if tell is None or service.name == MAIN:
            return tell

        def tell_of_service(decision: Decision) -> None:
            tell(replace(decision, service=service.name))

        return tell_of_service

    def _places(self, service: Service) -> list[tuple[int, int]]:
        return [(self._networks[name], self._hosts[service.name]) for name in service.networks]

    async def _connect(self) -> None:
        """Make the private networks, link every service to its own, and answer for names there."""
        names: dict[int, dict[str, int]] = {number: {} for number in self._networks.values()}
        for service in self._compose.services.values():
            own = (service.name, *([service.hostname] if service.hostname else []))
            for network, aliases in service.networks.items():
                for name in (*own, *aliases):
                    names[self._networks[network]].setdefault(name.lower(), self._hosts[service.name])
        members = [
            (sandbox.box.entered, sandbox.network, self._places(self._compose.services[name]))
            for name, sandbox in self.sandboxes.items()
        ]
        self._close_hub = await self.sandboxes[MAIN].box.entered.open_hub(members, names)

    def check(self) -> None:
        """Raise if the container of a service is gone: what the agent did then says nothing about it."""
        for name, sandbox in self.sandboxes.items():
            if sandbox.box.channel.closed:
                raise SandboxError(f"the service {name!r} is lost: {sandbox.box.channel.lost()}", code="sandbox_gone")

    async def set_network(self, policy: NetworkPolicy) -> None:
        """Put a policy in force in every service, and prove it in every one."""
        await _all(
            DockerSandbox.set_network(self.sandboxes[service.name], NONE if self._is_internal(service) else policy)
            for service in self._compose.services.values()
        )

    def _is_internal(self, service: Service) -> bool:
        return all(self._compose.networks[name] for name in service.networks)

    async def _bring_files(self, service: Service) -> None:
        sandbox = self.sandboxes[service.name]
        for volume in service.volumes:
            if volume.source is not None and not volume.source.is_dir():
                await sandbox.upload(volume.source.resolve(), volume.target)
                if volume.read_only:
                    await sandbox.box.channel.ask({"op": "seal", "path": volume.target})

    async def _bring_up(self, process: ServiceProcess) -> None:
        for name, condition in process.service.depends_on.items():
            other = self._processes[name]
            await other.started.wait()
            if condition == "service_healthy":
                await other.becomes_healthy()
            elif condition == "service_completed_successfully":
                await other.completed()
        await process.start()
        await process.ready()

    async def stop(self) -> None:
        """End everything. Callers that come later wait for the first."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        steps: list[Callable[[], Awaitable[None]]] = [
            lambda: close_all(process.stop() for process in self._processes.values()),
            lambda: close_all(DockerSandbox.stop(one) for one in self.sandboxes.values()),
        ]
        if self._close_hub is not None:
            steps.append(self._close_hub)
        if self._volumes is not None:
            steps.append(self._volumes.remove)
        await close_in_turn(*steps)


async def _all(works: Any) -> None:
    """Do all at once; at the first failure the others are given up, and it is what is raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
