"""A running sandbox: commands, files and listeners through its init, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import posixpath
import socket
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, cast

from pier.errors import SandboxError
from pier.image.model import Image
from pier.lease import close_in_turn
from pier.network.policy import NetworkPolicy
from pier.sandbox import arguments
from pier.sandbox.contract import (
    OUTPUT_LIMIT,
    Change,
    Command,
    FileInfo,
    Isolation,
    Listener,
    NewFile,
    OnOutput,
    ProtocolFactory,
    Result,
    Sandbox,
    SandboxSpec,
    Survivor,
)
from pier.sandbox.linux import copying
from pier.sandbox.linux.channel import Channel
from pier.sandbox.linux.network import Network
from pier.sandbox.linux.process import LinuxProcess


class SandboxProcess(Protocol):
    """What runs a sandbox: its namespaces, and the process that serves them."""

    id: str

    @property
    def channel(self) -> Channel: ...

    @property
    def proof(self) -> dict[str, str]:
        """How it was refused a network when it began."""
        ...

    @property
    def watching(self) -> list[int]:
        """Sockets that tell what is tried without a network, until the sandbox's network takes them."""
        ...

    def oom_kills(self) -> int: ...

    def disk_kills(self) -> int: ...

    async def disk_was_full(self) -> bool: ...


BoxT = TypeVar("BoxT", bound=SandboxProcess)


class Home(Protocol[BoxT]):
    """What a sandbox needs of its backend."""

    async def snapshot(self, sandbox: LinuxSandbox[BoxT]) -> Image: ...

    async def changes(self, sandbox: LinuxSandbox[BoxT]) -> list[Change]: ...

    async def end(self, sandbox: LinuxSandbox[BoxT]) -> None: ...


_TERMINAL_SIZE = [24, 80]


class LinuxListener(Listener):
    """A server on a socket that init made."""

    def __init__(self, host: str, port: int, factory: ProtocolFactory) -> None:
        self.host = host
        self.port = port
        self.closed = False
        self._factory = factory
        self._server: asyncio.Server | None = None

    async def serve(self, port: int, sock: socket.socket) -> None:
        """Serve on a socket; one that was served before belonged to a namespace that is gone."""
        if self._server is not None:
            self._server.close()
        self.port = port
        self._server = await asyncio.get_running_loop().create_server(self._factory, sock=sock)

    async def close(self) -> None:
        self.closed = True
        if self._server is not None:
            self._server.close()


class LinuxSandbox(Sandbox, Generic[BoxT]):
    """A sandbox that is served from inside. What runs it is in `box`, which a snapshot may replace."""

    def __init__(self, spec: SandboxSpec, box: BoxT, home: Home[BoxT]) -> None:
        self.id = box.id
        self.spec = spec
        self.box = box
        self.network = Network(spec.network, spec.on_decision)
        self.frozen: tuple[Path, ...] = ()
        self._home = home
        self._lock = asyncio.Lock()
        self._processes: set[LinuxProcess] = set()
        self._listeners: list[LinuxListener] = []

    async def disk_was_full(self) -> bool:
        return await self.box.disk_was_full()

    async def spawn(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        tty: bool = False,
        stdin: bool = False,
        on_output: OnOutput | None = None,
        output_limit: int = OUTPUT_LIMIT,
    ) -> LinuxProcess:
        arguments.check_streams(tty, on_output, output_limit)
        arguments.check_flag("stdin", stdin)
        request = self._request(command, cwd, env, user)
        return await self._start(request, on_output, output_limit, tty=tty, wants_input=stdin)

    async def _start(
        self, request: dict[str, Any], on_output: OnOutput | None, limit: int, *, tty: bool, wants_input: bool
    ) -> LinuxProcess:
        request["tell"] = True
        if tty:
            request["tty"] = _TERMINAL_SIZE
        process = self._launch(request, on_output, limit, wants_input=wants_input)
        try:
            await process.started()
        except BaseException:
            await asyncio.shield(process.kill())
            process.discard()
            raise
        return process

    async def exec(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        tty: bool = False,
        stdin: bytes | None = None,
        timeout: float | None = None,
        on_output: OnOutput | None = None,
        output_limit: int = OUTPUT_LIMIT,
    ) -> Result:
        arguments.check_streams(tty, on_output, output_limit)
        arguments.check_timeout(timeout)
        if stdin is not None:
            arguments.check_bytes("stdin", stdin)
        request = self._request(command, cwd, env, user) | {"tell": tty}
        if tty:
            request["tty"] = _TERMINAL_SIZE
        process = self._launch(request, on_output, output_limit, wants_input=stdin is not None)
        feeding: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(timeout):
                if tty:
                    await process.started()
                if stdin is not None:
                    feeding = asyncio.create_task(_feed(process, stdin))
                return await process.wait()
        except TimeoutError:
            await asyncio.shield(process.kill())
            if process.failure is not None:
                raise process.failure from None
            return process.result(137, timed_out=True)
        except asyncio.CancelledError:
            await asyncio.shield(process.kill())
            raise
        finally:
            if feeding is not None and not feeding.done():
                feeding.cancel()

    def _request(
        self, command: Command, cwd: str | None, env: Mapping[str, str] | None, user: str | None
    ) -> dict[str, Any]:
        arguments.check_command(command, cwd, env, user)
        config = self.spec.image.config
        argv = [*config.shell, command] if isinstance(command, str) else list(command)
        return {
            "op": "exec",
            "argv": argv,
            "env": config.env | dict(self.spec.env) | dict(env or {}),
            "cwd": self._place(cwd or "."),
            "user": user if user is not None else self.spec.user or config.user or "",
        }

    def _launch(
        self, request: dict[str, Any], on_output: OnOutput | None, limit: int, *, wants_input: bool
    ) -> LinuxProcess:
        channel = self.box.channel
        if channel.closed:
            raise channel.lost()
        process = LinuxProcess(channel, self.box.oom_kills, self.box.disk_kills, limit, on_output)
        theirs = [] if "tty" in request else process.open_pipes(wants_input=wants_input)
        self._processes.add(process)
        try:
            channel.send(request | {"id": process.number}, theirs)
        except SandboxError:
            process.discard()
            raise
        finally:
            for fd in theirs:
                os.close(fd)
        self._forget_finished()
        return process

    def _forget_finished(self) -> None:
        for process in [process for process in self._processes if process.finished]:
            self._processes.discard(process)

    def _place(self, path: str) -> str:
        """A path from the root."""
        workdir = self.spec.workdir or self.spec.image.config.workdir or "/"
        return posixpath.join("/", workdir, path) if path != "." else posixpath.join("/", workdir)

    def _as(self, user: str | None, owner: str | None = None) -> dict[str, Any]:
        """On whose behalf a call about files is made: the part of its request that says so."""
        arguments.check_user(user, owner)
        if user is None and owner is None:
            user = self.spec.files_as
        return {"owner": owner or [0, 0]} if user is None else {"owner": None, "user": user}

    async def upload(
        self,
        source: Path,
        target: str,
        *,
        owner: str | None = None,
        user: str | None = None,
        leave_out: Collection[str] = (),
    ) -> None:
        arguments.check_source(source)
        arguments.check_path("target", target)
        await copying.upload(self.box.channel, source, self._place(target), self._as(user, owner), leave_out)

    async def write_file(
        self,
        target: str,
        data: bytes | str,
        *,
        mode: int | None = None,
        owner: str | None = None,
        user: str | None = None,
    ) -> None:
        arguments.check_path("target", target)
        data = arguments.as_bytes("data", data)
        arguments.check_mode(mode)
        request = {"op": "write", "target": self._place(target), "mode": mode} | self._as(user, owner)
        await copying.put(self.box.channel, request, data)

    async def mkdir(
        self, target: str, *, mode: int | None = None, owner: str | None = None, user: str | None = None
    ) -> None:
        arguments.check_path("target", target)
        arguments.check_mode(mode)
        request = {"op": "mkdir", "target": self._place(target), "mode": mode} | self._as(user, owner)
        await copying.put(self.box.channel, request, b"")

    async def stat(self, path: str, *, user: str | None = None) -> FileInfo:
        return (await self._look("stat", path, user))[0]

    async def list_dir(self, path: str = ".", *, user: str | None = None) -> list[FileInfo]:
        return sorted(await self._look("list", path, user), key=lambda entry: entry.name)

    async def _look(self, op: str, path: str, user: str | None) -> list[FileInfo]:
        arguments.check_path("path", path)
        request = {"op": op, "source": self._place(path)} | self._as(user)
        rows = (await copying.take(self.box.channel, request, lambda stream: stream.read()))[1]
        return [FileInfo(*json.loads(row)) for row in rows.splitlines()]

    async def download(
        self,
        source: str,
        target: Path,
        *,
        exclude: Sequence[str] = (),
        max_bytes: int | None = None,
        keep_empty: bool = True,
        user: str | None = None,
    ) -> list[str]:
        arguments.check_path("source", source)
        arguments.check_host_path("target", target)
        arguments.check_texts("exclude", exclude)
        arguments.check_size("max_bytes", max_bytes, optional=True)
        arguments.check_flag("keep_empty", keep_empty)
        request = {"op": "pack", "source": self._place(source), "exclude": list(exclude), "max_bytes": max_bytes}
        request |= {"keep_empty": keep_empty} | self._as(user)
        far, near = await copying.take(
            self.box.channel, request, lambda stream: copying.unpack(stream, target, max_bytes, keep_empty)
        )
        return [*far, *near]

    async def read_file(self, source: str, *, max_bytes: int = OUTPUT_LIMIT, user: str | None = None) -> bytes:
        arguments.check_path("source", source)
        arguments.check_size("max_bytes", max_bytes)
        request = {"op": "read", "source": self._place(source), "max_bytes": max_bytes} | self._as(user)
        return (await copying.take(self.box.channel, request, lambda stream: stream.read()))[1]

    async def put_tar(self, stream: AsyncIterator[bytes], target: str) -> None:
        arguments.check_stream(stream)
        arguments.check_path("target", target)
        request = {"op": "unpack", "target": self._place(target), "owner": None}
        await copying.copy(
            self.box.channel,
            request,
            inward=True,
            work=lambda fd: copying.feed_stream(fd, stream),
            cancellable=True,
        )

    async def put_files(self, files: Sequence[NewFile], target: str, *, clear: Sequence[str] = ()) -> None:
        arguments.check_files("files", files)
        arguments.check_path("target", target)
        arguments.check_paths("clear", clear)
        rows = [(file.path, file.mode, file.mtime, None if file.data is None else len(file.data)) for file in files]
        request = {"op": "unpack", "target": self._place(target), "owner": None, "files": rows}
        request["clear"] = [self._place(path) for path in clear]
        await copying.put(self.box.channel, request, b"".join(file.data or b"" for file in files))

    def get_tar(self, source: str) -> AsyncIterator[bytes]:
        arguments.check_path("source", source)
        request = {"op": "pack", "source": self._place(source), "exclude": [], "max_bytes": None}
        return copying.stream(self.box.channel, request)

    async def remove(self, target: str, *, user: str | None = None) -> None:
        arguments.check_path("target", target)
        request = {"op": "remove", "target": self._place(target)} | self._as(user)
        await copying.put(self.box.channel, request, b"")

    async def changes(self) -> list[Change]:
        """Layers that a snapshot froze since the start count too: the image is the one that the sandbox began with."""
        if self.box.channel.closed:
            raise self.box.channel.lost()
        return await self._home.changes(self)

    async def begin(self) -> None:
        """Put the policy in force that the sandbox begins with, and make its working directory. When that fails, the
        sandbox is stopped."""
        self.network.watch(self.box.watching)
        try:
            if self.spec.network.mode == "none":
                self.network.begin(self.box.proof)
            else:
                await self.network.enforce(self.box.channel, self.spec.network)
            if self.spec.workdir:
                await self.mkdir(self.spec.workdir, owner=self.spec.user or self.spec.image.config.user or "0:0")
        except BaseException:
            await asyncio.shield(self.stop())
            raise

    async def set_network(self, policy: NetworkPolicy) -> None:
        arguments.check_policy(policy)
        async with self._lock:
            await self.network.enforce(self.box.channel, policy)

    async def listen(self, port: int, factory: ProtocolFactory, *, host: str = "127.0.0.1") -> LinuxListener:
        arguments.check_listener(port, factory, host)
        listener = LinuxListener(host, port, factory)
        await self._serve(listener)
        self._listeners.append(listener)
        return listener

    async def _serve(self, listener: LinuxListener) -> None:
        if listener.closed:
            return
        message, fds = await self.box.channel.ask({"op": "listen", "host": listener.host, "port": listener.port})
        await listener.serve(message["port"], socket.socket(fileno=fds[0]))

    async def dial(self, port: int) -> socket.socket:
        arguments.check_number("port", port, 1, 0xFFFF)
        _, fds = await self.box.channel.ask({"op": "socket"})
        sock = socket.socket(fileno=fds[0])
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        except BaseException:
            sock.close()
            raise
        return sock

    async def kill_all(self) -> int:
        message, _ = await self.box.channel.ask({"op": "kill_all"})
        return message["killed"]

    async def isolate(self, folders: Mapping[str, int]) -> Isolation:
        arguments.check_folders("folders", folders)
        message, _ = await self.box.channel.ask({"op": "enclose", "folders": dict(folders)})
        if not message["count"]:
            return Isolation()
        survivors = tuple(Survivor(*row) for row in message["survivors"])
        return Isolation(IsolatedSandbox(self), survivors, message["count"])

    def _check(self) -> None:
        """Fail if something that the sandbox needs is gone."""

    async def snapshot(self) -> Image:
        async with self._lock:
            self._discard_processes()
            await self.network.settle(self.box.channel)
            image = await self._home.snapshot(self)
            self.network.watch(self.box.watching)
            await self.network.enforce(self.box.channel, self.network.policy)
            for listener in self._listeners:
                await self._serve(listener)
        return image

    def _discard_processes(self) -> None:
        for process in self._processes:
            process.discard()
        self._processes.clear()

    async def stop(self) -> None:
        """Whatever fails on the way, the sandbox ends; what failed is raised then."""
        async with self._lock:
            try:
                await close_in_turn(
                    *(listener.close for listener in self._listeners),
                    lambda: self.network.settle(self.box.channel),
                    self.network.close,
                    lambda: self._home.end(self),
                )
            finally:
                self._discard_processes()


class _PrivateChannel:
    """A sandbox's channel, whose commands and copies go to a verifier's namespace."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def send(self, message: dict[str, Any], fds: list[int] | None = None) -> None:
        private = {"private": True} if message["op"] in ("exec", "copy") else {}
        self._channel.send(message | private, fds)


class _PrivateBox:
    """A sandbox's box with that channel."""

    def __init__(self, box: SandboxProcess) -> None:
        self._box = box

    def __getattr__(self, name: str) -> Any:
        return getattr(self._box, name)

    @property
    def channel(self) -> Any:
        return _PrivateChannel(self._box.channel)


class IsolatedSandbox(LinuxSandbox[BoxT]):
    """A view of a sandbox for a verifier (`Sandbox.isolate`)."""

    def __init__(self, whole: LinuxSandbox[BoxT]) -> None:
        vars(self).update(vars(whole))
        self.box = cast(BoxT, _PrivateBox(whole.box))
        self._whole = whole

    def service(self, name: str) -> Sandbox | None:
        return self._whole.service(name)

    def services(self) -> tuple[str, ...]:
        return self._whole.services()

    async def changes(self) -> list[Change]:
        return await self._whole.changes()

    async def set_network(self, policy: NetworkPolicy) -> None:
        await self._whole.set_network(policy)

    async def kill_all(self) -> int:
        self._whole._check()
        message, _ = await self._whole.box.channel.ask({"op": "kill_all", "private": True})
        return message["killed"]

    async def snapshot(self) -> Image:
        raise SandboxError("a verifier's view of a sandbox cannot be frozen", code="no_snapshot", retryable=False)

    async def stop(self) -> None:
        with contextlib.suppress(SandboxError):
            await self._whole.box.channel.ask({"op": "release"})


async def _feed(process: LinuxProcess, data: bytes) -> None:
    with contextlib.suppress(SandboxError):
        await process.write(data)
        await process.close_stdin()
