"""pier's end of a session in the helper, which enters containers on an engine's host where pier itself cannot.

The helper is a container of pier's own there, one for each engine (`helper_box`). It has the host's processes and
network, and the capabilities to join namespaces; what it is made of is in `runtime`. Each pier that uses it has a
session: a process in it (`far`) whose standard streams are the connection. Sessions know nothing of one another. One
ends when its connection does, and everything that it served with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
from aiodocker.exceptions import DockerError
from aiodocker.stream import Stream

from pier.errors import SandboxError
from pier.files import write
from pier.home import pier_home
from pier.image.reach import is_socket, shown
from pier.lease import Lease
from pier.network.policy import NetworkMode
from pier.sandbox.docker.client import Client, engine_error
from pier.sandbox.docker.entering import Entrance
from pier.sandbox.docker.far_channel import FarChannel, FarEntered
from pier.sandbox.docker.helper_box import HelperBox
from pier.sandbox.docker.mux import Broken, Mux
from pier.sandbox.docker.runtime import find_runtime

_START_SECONDS = 120
_AGAIN_SECONDS = 0.1
_PING_SECONDS = 15.0
_SILENCE_SECONDS = 60.0
"""Who does not answer for that long is gone."""


async def open_helper(docker: Client, lease: Lease, machine: str) -> Helper:
    """A session in the helper of an engine, which is made if it is not there. `machine`: the engine's processor."""
    runtime = await asyncio.to_thread(find_runtime, machine)
    box = HelperBox(docker, lease, runtime, await asyncio.to_thread(lambda: runtime.digest))
    try:
        async with asyncio.timeout(_START_SECONDS):
            with _marked(docker.address) as mark:
                while (helper := await _open_session(docker, box, mark)) is None:
                    await box.ensure()
                    await asyncio.sleep(_AGAIN_SECONDS)
                return helper
    except TimeoutError:
        message = f"the helper {box.name} did not start in {_START_SECONDS} s"
        raise SandboxError(message, code="helper_start", hint="pier doctor") from None
    except DockerError as error:
        raise engine_error(error) from error
    except (aiohttp.ClientError, OSError) as error:
        raise SandboxError(f"the helper cannot be reached: {error}", code="helper_start") from error


async def _open_session(docker: Client, box: HelperBox, mark: str) -> Helper | None:
    """None if there is no helper, or one that is ending."""
    stream = await box.attach(mark)
    if stream is None:
        return None
    helper = Helper(stream, box, shown(docker.address))
    try:
        if await helper.greet(mark):
            return helper
    except BaseException:
        await helper.close()
        raise
    await helper.close()
    return None


@contextmanager
def _marked(address: str) -> Iterator[str]:
    """A file that tells whether an engine at a socket of this machine sees the same files; empty for other engines."""
    if not is_socket(address):
        yield ""
        return
    token = secrets.token_hex(6)
    mark = pier_home() / "docker" / f"mark-{token}"
    mark.parent.mkdir(parents=True, exist_ok=True)
    write(mark, token, durable=False)
    try:
        yield str(mark.resolve())
    finally:
        mark.unlink(missing_ok=True)


class Helper(Entrance):
    """A session in the helper on one engine's host. `closed` says that it is gone."""

    def __init__(self, stream: Stream, box: HelperBox, where: str) -> None:
        self.networks: frozenset[NetworkMode] = frozenset()
        self.has_six = False
        self.shares_disk = False
        self.name = box.name
        self.volume = box.volume
        self._channels: dict[str, FarChannel] = {}
        self._mux = Mux(1, self._on_message)
        self._own = FarChannel(self._mux, "", f"the helper at the engine {where} is gone", code="helper_gone")
        self._stream = stream
        self._complaints = ""
        works = (self._read(), self._write(), self._ping(), self._watch(box))
        self._tasks = [asyncio.create_task(work) for work in works]

    @property
    def closed(self) -> bool:
        return self._own.closed

    async def greet(self, mark: str) -> bool:
        """Wait until it answers; False if it found that the helper is ending."""
        try:
            hello = (await self._own.wait(0))[0]["hello"]
        except SandboxError as error:
            if not self._complaints.strip():
                return False
            told = self._complaints.strip().splitlines()[-1]
            raise SandboxError(f"the helper ended at once: {told}", code="helper_start") from error
        self.networks = frozenset(hello["networks"])
        self.has_six = hello["six"]
        self.shares_disk = bool(mark) and mark.endswith(f"mark-{hello['mark']}")
        return True

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

    async def _watch(self, box: HelperBox) -> None:
        await box.ended()
        self._lose("its container has ended")

    def _lose(self, why: str) -> None:
        """The connection is gone: everybody who waits learns it."""
        told = self._own._gone + (f": {why}" if why else "")
        self._mux.close()
        for channel in (*self._channels.values(), self._own):
            channel.close(told)
        self._channels.clear()

    def _on_message(self, message: dict[str, Any]) -> None:
        if "key" not in message:
            raise Broken("the helper sent a malformed message")
        key = message.pop("key")
        channel = self._channels.get(key) if key else self._own
        if channel is not None:
            channel.take(message)

    async def enter(self, name: str, id: str, pid: int, plan: dict[str, Any]) -> FarEntered:
        if self.closed:
            raise self._own.lost()
        channel = self._channels[name] = FarChannel(self._mux, name, f"the container {name} is gone")
        try:
            answer, _ = await self._own.ask({"op": "enter", "container": name, "of": id, "pid": pid, "plan": plan})
        except BaseException:
            channel.close()
            del self._channels[name]
            with contextlib.suppress(SandboxError):
                self._own.send({"op": "leave", "container": name, "id": 0})
            raise
        return FarEntered(self._own, channel, name, answer["proof"], lambda: self._forget(name))

    async def free_disk(self, path: str) -> int:
        """How many bytes are free at a directory of the engine's host."""
        return (await self._own.ask({"op": "free", "path": path}))[0]["bytes"]

    def _forget(self, name: str) -> None:
        self._channels.pop(name, None)

    async def close(self) -> None:
        """End the session; the helper ends itself when nobody has one."""
        self._lose("pier is done with it")
        with contextlib.suppress(aiohttp.ClientError, OSError, AssertionError):
            await self._stream.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._tasks = []
