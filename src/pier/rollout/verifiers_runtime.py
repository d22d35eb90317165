"""A runtime for verifiers 0.4: its harnesses and tasksets run in pier's sandboxes (extra `verifiers`).

    from pier.rollout.verifiers_runtime import PierConfig, install
    install()
    agent = Agent(AgentConfig(..., runtime=PierConfig(image="python:3.11-slim")))

`PierConfig` is a `DockerConfig` with a pier backend, so tasks set its image and limits as usual. The host's
interception server and tool servers appear on the sandbox's loopback at their own ports, so runs need no tunnel, no
proxy and, with `allow=[]`, no network at all.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import PurePosixPath
from typing import Any, ClassVar
from urllib.parse import urlsplit

from verifiers.v1 import runtimes
from verifiers.v1.errors import SandboxError as RuntimeFault
from verifiers.v1.runtimes import DockerConfig, DockerRuntimeInfo, ProgramResult, RuntimeProcess
from verifiers.v1.runtimes import Runtime as VerifiersRuntime

from pier.errors import PathError, PierError
from pier.network.gatekeeper import Transfer, relay
from pier.network.policy import PUBLIC, NetworkPolicy
from pier.rollout.sandboxes import SharedServices, limits_for
from pier.sandbox.contract import Process, Sandbox, SandboxSpec
from pier.trial.images import ImageRequest
from pier.trial.spec import open_services

_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


class PierConfig(DockerConfig):
    """A pier sandbox: `image`, `workdir`, `cpu`, `memory`, `disk`, `allow`, and the `backend` that runs it."""

    backend: str = "local"


class PierRuntimeInfo(DockerRuntimeInfo):
    backend: str = "local"


_shared: dict[tuple[int, str], SharedServices] = {}
"""By event loop and backend."""


class PierProcess(RuntimeProcess):
    def __init__(self) -> None:
        self._queues: dict[str, asyncio.Queue[bytes]] = {"stdout": asyncio.Queue(), "stderr": asyncio.Queue()}
        self.stdout, self.stderr = self._lines("stdout"), self._lines("stderr")
        self._process: Process | None = None
        self._ended: asyncio.Task[int] | None = None

    def take(self, stream: str, data: bytes) -> None:
        self._queues[stream].put_nowait(data)

    def started(self, process: Process) -> PierProcess:
        self._process = process
        self._ended = asyncio.get_running_loop().create_task(self._wait(process))
        return self

    async def _wait(self, process: Process) -> int:
        try:
            return (await process.wait()).exit_code
        finally:
            for queue in self._queues.values():
                queue.put_nowait(b"")

    async def _lines(self, stream: str) -> AsyncIterator[bytes]:
        while data := await self._queues[stream].get():
            yield data

    async def write(self, data: bytes) -> None:
        assert self._process is not None
        await self._process.write(data)

    async def wait(self) -> int:
        assert self._ended is not None
        return await asyncio.shield(self._ended)

    async def poll(self) -> int | None:
        return self._ended.result() if self._ended is not None and self._ended.done() else None

    async def terminate(self) -> None:
        assert self._process is not None
        await self._process.signal(15)

    async def kill(self) -> None:
        assert self._process is not None
        await self._process.kill()


class PierRuntime(VerifiersRuntime):
    supports_user: ClassVar[bool] = True

    def __init__(self, config: PierConfig, name: str | None = None) -> None:
        super().__init__(name)
        self.config = config.model_copy(update={"workdir": config.workdir or "/app"})
        self.info = PierRuntimeInfo(**self.config.model_dump())
        self._sandbox: Sandbox | None = None
        self._stack = AsyncExitStack()
        self._ports: set[int] = set()
        self._served: set[int] = set()

    @property
    def sandbox(self) -> Sandbox:
        if self._sandbox is None:
            raise RuntimeFault("the sandbox is not running")
        return self._sandbox

    async def start(self) -> None:
        config = self.config
        key = (id(asyncio.get_running_loop()), config.backend)
        shared = _shared.setdefault(key, SharedServices(lambda: open_services(config.backend, label="verifiers")))
        with _attributed():
            services = await self._stack.enter_async_context(shared.use())
            spec = SandboxSpec(
                image=await services.images.get(ImageRequest(config.image, host=True, chosen=True)),
                network=PUBLIC,
                limits=await limits_for(services.backend, config.cpu, config.memory, config.disk),
                workdir=config.workdir,
                name=self.name,
            )
            self._sandbox = await services.backend.start(spec)
            self._stack.push_async_callback(self._sandbox.stop)
        self.info.id = self._sandbox.id

    async def teardown(self) -> None:
        self._sandbox = None
        await self._stack.aclose()

    async def run(self, argv: list[str], env: dict[str, str]) -> ProgramResult:
        with _attributed():
            await self._serve_ports()
            result = await self.sandbox.exec(argv, env=self.process_env(env), user=self.user)
        return ProgramResult(result.exit_code, result.text, result.error_text)

    async def open_process(self, argv: list[str], env: dict[str, str]) -> RuntimeProcess:
        process = PierProcess()
        with _attributed():
            await self._serve_ports()
            spawned = await self.sandbox.spawn(
                argv, env=self.process_env(env), user=self.user, stdin=True, on_output=process.take
            )
        return process.started(spawned)

    async def run_background(self, argv: list[str], env: dict[str, str], log: str) -> None:
        command = ["/bin/sh", "-c", 'exec "$@" >"$0" 2>&1', self._path(log), *argv]
        with _attributed():
            await self._serve_ports()
            await self.sandbox.spawn(command, env=self.process_env(env), user=self.user)

    def _path(self, path: str) -> str:
        return str(PurePosixPath(self.config.workdir or "/app") / path)

    async def _read(self, path: str, max_bytes: int | None = None) -> bytes:
        more = {} if max_bytes is None else {"max_bytes": max_bytes}
        with _attributed(f"read {path!r}"):
            return await self.sandbox.read_file(self._path(path), user=self.user or "0:0", **more)

    async def write(self, path: str, data: bytes) -> None:
        with _attributed(f"write {path!r}"):
            await self.sandbox.write_file(self._path(path), data, user=self.user or "0:0")

    def host_url(self, url: str) -> str:
        """Return the URL unchanged, since a host port is served at the same port of the sandbox's loopback."""
        parts = urlsplit(url)
        if parts.hostname in _LOOPBACK and parts.port:
            self._ports.add(parts.port)
        return url

    async def _serve_ports(self) -> None:
        for port in self._ports - self._served:
            self._served.add(port)
            await self.sandbox.listen(port, _forwarding(port))

    async def prepare_execution(self, routes: list[str] | None) -> None:
        for url in routes or ():
            self.host_url(url)
        with _attributed():
            await self._serve_ports()
            await self.sandbox.set_network(self._policy(routes))

    def _policy(self, routes: list[str] | None) -> NetworkPolicy:
        if routes is None or not self.network_restricted:
            return PUBLIC
        if self.config.block not in ([], ["*"]):
            raise RuntimeFault("unsupported list of blocked hosts: pier's sandboxes take a list of allowed hosts")
        return NetworkPolicy("allowlist", tuple(self.config.allow)) if self.config.allow else NetworkPolicy("none")

    async def expose(self, port: int) -> str:
        raise RuntimeFault("cannot expose a port of a sandbox: run the tool server on the host")


@contextlib.contextmanager
def _attributed(action: str = "") -> Any:
    """Convert pier's errors to the one that verifiers attributes to the sandbox."""
    try:
        yield
    except (PierError, PathError) as error:
        raise RuntimeFault(f"{action}: {error}" if action else str(error)) from error


def _forwarding(port: int) -> Any:
    """A factory of protocols that forward connections in the sandbox to a port of this machine."""

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError):
            outside = await asyncio.open_connection("127.0.0.1", port)
            with contextlib.closing(outside[1]):
                await relay((reader, writer), outside, None, Transfer())

    return lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader(), connect)


def install() -> None:
    """Register `PierRuntime` in verifiers for `PierConfig`. Idempotent."""
    known = runtimes._runtime_cls
    if getattr(known, "knows_pier", False):
        return

    def runtime_class(config: Any) -> type[VerifiersRuntime]:
        return PierRuntime if isinstance(config, PierConfig) else known(config)

    runtime_class.knows_pier = True  # type: ignore[attr-defined]
    runtimes._runtime_cls = runtime_class
