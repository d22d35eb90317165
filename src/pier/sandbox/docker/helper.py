"""A container of pier's own on an engine's host, which enters the others where pier itself cannot.

One for each engine and backend. It has the host's processes and network, and the capabilities to join namespaces; what
it is made of is in `runtime`, what it does in `far`. Its standard streams are the connection. It goes when that does,
or with its owner's lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from pathlib import Path
from typing import Any

import aiohttp
from aiodocker.exceptions import DockerError

from pier.errors import SandboxError
from pier.files import write
from pier.home import pier_home
from pier.image.reach import is_socket, shown
from pier.lease import Lease
from pier.network.policy import NetworkMode
from pier.sandbox.docker.box import KIND, LABEL, remove
from pier.sandbox.docker.client import Client, engine_error
from pier.sandbox.docker.entering import Entrance
from pier.sandbox.docker.far_channel import FarChannel, FarEntered
from pier.sandbox.docker.mux import Broken, Mux
from pier.sandbox.docker.runtime import IDLE, Runtime, find_runtime

REPOSITORY = "pier/helper"
_START_SECONDS = 120
_PING_SECONDS = 15.0
_SILENCE_SECONDS = 60.0
"""Who does not answer for that long is gone."""
_CAPABILITIES = ["SYS_ADMIN", "SYS_PTRACE", "NET_ADMIN"]
_UNCONFINED = ["seccomp=unconfined", "apparmor=unconfined", "label=disable"]


class Helper(Entrance):
    """The helper on one engine's host. `start` it once; `closed` says that it is gone."""

    def __init__(self, docker: Client, lease: Lease) -> None:
        self.id = secrets.token_hex(6)
        self.name = f"pier-helper-{self.id}"
        self.networks: frozenset[NetworkMode] = frozenset()
        self.has_six = False
        self.shares_disk = False
        self.volume = ""
        """The volume that has the program which keeps containers alive."""
        self._docker = docker
        self._lease = lease
        self._channels: dict[str, FarChannel] = {}
        self._mux = Mux(1, self._on_message)
        gone = f"the helper at the engine {shown(docker.address)} is gone"
        self._own = FarChannel(self._mux, "", gone, code="helper_gone")
        self._stream: Any = None
        self._tasks: list[asyncio.Task[None]] = []
        self._complaints = ""

    @property
    def closed(self) -> bool:
        return self._own.closed

    async def start(self, machine: str) -> None:
        """Make and reach it; when this raises or is cancelled, `close` removes what was made."""
        runtime = await asyncio.to_thread(find_runtime, machine)
        digest = await asyncio.to_thread(lambda: runtime.digest)
        self.volume = f"pier-pack-{digest}"
        self._lease.write(KIND, self.id, {"engine": self._docker.address, "name": self.name})
        try:
            async with asyncio.timeout(_START_SECONDS):
                image = await self._bring(runtime, digest)
                hello = await self._run(runtime, image)
        except TimeoutError:
            why = f": {self._complaints.splitlines()[-1]}" if self._complaints else ""
            raise SandboxError(
                f"the helper did not start in {_START_SECONDS} s{why}", code="helper_start", hint="pier doctor"
            ) from None
        except DockerError as error:
            raise engine_error(error) from error
        except (aiohttp.ClientError, OSError) as error:
            raise SandboxError(f"the helper cannot be reached: {error}", code="helper_start") from error
        self.networks = frozenset(hello["networks"])
        self.has_six = hello["six"]
        self.shares_disk = bool(hello["shared"]) and hello["shared"] == self.id

    async def _bring(self, runtime: Runtime, digest: str) -> str:
        name = f"{REPOSITORY}:{digest}"
        try:
            await self._docker.images.inspect(name)
        except DockerError as error:
            if error.status != 404:
                raise
            data = await asyncio.to_thread(runtime.archive)
            query = {"fromSrc": "-", "repo": name, "message": "pier's helper"}
            async with self._docker._query("images/create", "POST", params=query, data=data) as answer:
                told = await answer.text()
            if '"error"' in told:
                raise SandboxError(
                    f"the engine did not take the helper's image: {told[-300:]}", code="helper_image"
                ) from None
        return name

    async def _run(self, runtime: Runtime, image: str) -> dict[str, Any]:
        mark = pier_home() / "docker" / f"mark-{self.id}"
        shared = is_socket(self._docker.address)
        try:
            if shared:
                mark.mkdir(parents=True)
                write(mark / "mark", self.id.encode())
            container = await self._create(runtime, image, mark if shared else None)
            self._stream = container.attach(stdin=True, stdout=True, stderr=True)
            await self._stream._init()
            await container.start()
            self._tasks = [asyncio.create_task(work) for work in (self._read(), self._write(), self._ping())]
            return (await self._own.wait(0))[0]["hello"]
        except SandboxError as error:
            if self._complaints:
                raise SandboxError(
                    f"the helper ended at once: {self._complaints.strip().splitlines()[-1]}", code="helper_start"
                ) from error
            raise
        finally:
            with contextlib.suppress(OSError):
                (mark / "mark").unlink(missing_ok=True)
                mark.rmdir()

    async def _create(self, runtime: Runtime, image: str, mark: Path | None) -> Any:
        config = self._config(runtime, image)
        if mark is not None:
            bound = {"Type": "bind", "Source": str(mark), "Target": "/shared", "ReadOnly": True}
            try:
                mounts = [*config["HostConfig"]["Mounts"], bound]
                host = config["HostConfig"] | {"Mounts": mounts}
                return await self._docker.containers.create(config | {"HostConfig": host}, name=self.name)
            except DockerError as error:
                if error.status != 400:
                    raise
        return await self._docker.containers.create(config, name=self.name)

    def _config(self, runtime: Runtime, image: str) -> dict[str, Any]:
        return {
            "Image": image,
            "Entrypoint": list(runtime.argv),
            "Cmd": [],
            "Env": list(runtime.env),
            "User": "0:0",
            "WorkingDir": "/",
            "OpenStdin": True,
            "StdinOnce": True,
            "AttachStdin": True,
            "AttachStdout": True,
            "AttachStderr": True,
            "Labels": {LABEL: self._lease.owner, "dev.pier.helper": self.id},
            "HostConfig": {
                "AutoRemove": True,
                "NetworkMode": "host",
                "PidMode": "host",
                "CgroupnsMode": "host",
                "CapAdd": _CAPABILITIES,
                "SecurityOpt": _UNCONFINED,
                "LogConfig": {"Type": "none"},
                "Binds": ["/sys/fs/cgroup:/sys/fs/cgroup:rw"],
                "Mounts": [{"Type": "volume", "Source": self.volume, "Target": f"/{IDLE}"}],
            },
        }

    async def _read(self) -> None:
        why = ""
        try:
            while (message := await self._stream.read_out()) is not None:
                if message.stream == 1:
                    self._mux.feed(message.data)
                else:
                    self._complaints = (self._complaints + message.data.decode(errors="replace"))[-4000:]
        except (aiohttp.ClientError, OSError, Broken) as error:
            why = str(error)
        finally:
            self._lose(why)

    async def _write(self) -> None:
        try:
            await self._mux.run(self._stream.write_in)
        except (aiohttp.ClientError, OSError, RuntimeError, AssertionError) as error:
            self._lose(str(error))

    async def _ping(self) -> None:
        while not self.closed:
            await asyncio.sleep(_PING_SECONDS)
            try:
                async with asyncio.timeout(_SILENCE_SECONDS):
                    await self._own.ask({"op": "ping"})
            except TimeoutError:
                self._lose(f"it did not answer in {_SILENCE_SECONDS:.0f} s")
            except SandboxError:
                return

    def _lose(self, why: str) -> None:
        """The connection is gone: everybody who waits learns it."""
        told = self._own._gone + (f": {why}" if why else "")
        self._mux.close()
        for channel in (*self._channels.values(), self._own):
            channel.close(told)
        self._channels.clear()

    def _on_message(self, message: dict[str, Any]) -> None:
        key = message.pop("key")
        channel = self._channels.get(key) if key else self._own
        if channel is not None:
            channel.take(message)

    async def enter(self, name: str, id: str, pid: int, plan: dict[str, Any]) -> FarEntered:
        if self.closed:
            raise self._own.lost()
        channel = self._channels[name] = FarChannel(self._mux, name, f"the container {name} is gone")
        try:
            answer, _ = await self._own.ask({"op": "enter", "container": name, "pid": pid, "plan": plan})
        except BaseException:
            channel.close()
            del self._channels[name]
            with contextlib.suppress(SandboxError):
                self._own.send({"op": "leave", "container": name, "id": 0})
            raise
        return FarEntered(self._own, channel, name, answer["proof"], lambda: self._forget(name))

    def _forget(self, name: str) -> None:
        self._channels.pop(name, None)

    async def close(self) -> None:
        """End it and remove its container."""
        self._lose("pier is done with it")
        if self._stream is not None:
            with contextlib.suppress(aiohttp.ClientError, OSError, AssertionError):
                await self._stream.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._tasks = []
        await remove(self._docker, self.name)
        self._lease.strike(KIND, self.id)
