"""pier's end of a session in the helper, which enters containers on an engine's host where pier itself cannot.

The helper is a container of pier's there, one for each engine (`runtime`). It has the host's processes and network, and
the capabilities to join namespaces. Each pier that uses it has a session: a process in it (`helper_session`) whose
standard streams are the connection. Sessions know nothing of one another. One ends when its connection does, and
everything that it served with it. A container that the helper entered has a channel like that to a local init, with
streams in place of open files.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import socket
import stat
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import aiohttp
from aiodocker.exceptions import DockerError
from aiodocker.stream import Stream

from pier.errors import PolicyError, SandboxError
from pier.files import write
from pier.home import pier_home
from pier.image.engine_address import is_socket, shown
from pier.lease import Lease
from pier.network.policy import Decision, NetworkMode, NetworkPolicy, OnDecision
from pier.sandbox.contract import Change
from pier.sandbox.docker.client import Client, engine_error
from pier.sandbox.docker.container import EVENT, Places
from pier.sandbox.docker.entering import Entered, Entrance
from pier.sandbox.docker.mux import Broken, Mux, MuxStream
from pier.sandbox.docker.runtime import HelperBox, find_runtime
from pier.sandbox.linux.channel import Channel, OnAnswer, close_all
from pier.sandbox.linux.network import Network

_LEAVE_SECONDS = 60
_SETTLE_SECONDS = 5


class HelperChannel(Channel):
    """Requests to something behind the helper: to a container by its `key`, or to the helper itself."""

    def __init__(self, mux: Mux, key: str, gone: str, *, code: str = "sandbox_gone") -> None:
        self.oom = 0
        """How many processes the limit on memory has killed, as far as it was told."""
        self.on_decision: Callable[[Decision], None] | None = None
        self.closed = False
        self._mux = mux
        self._key = key
        self._gone = gone
        self._code = code
        self._loop = asyncio.get_running_loop()
        self._numbers = 0
        self._heard: dict[int, OnAnswer] = {}
        self._waiting: set[asyncio.Task[None]] = set()

    def send(self, message: dict[str, Any], fds: list[int] | None = None) -> None:
        if self.closed:
            raise self.lost()
        files = [(_kind(fd), self._mux.number(), fd) for fd in fds or []]
        streams = [[kind, number] for kind, number, _ in files]
        self._mux.send(message | {"key": self._key} | ({"files": streams} if streams else {}))
        for kind, number, fd in files:
            if kind == "in":
                self._mux.take(number, source=os.dup(fd))
            elif kind == "out":
                sink = os.dup(fd)
                os.set_blocking(sink, False)
                self._mux.take(number, sink=sink)

    def take(self, message: dict[str, Any]) -> None:
        """Something came from the helper. What says that a command ended waits until its output is here."""
        try:
            fds = [self._receive(number) for _, number in message.pop("files", [])]
        except OSError as error:
            message, fds = {"id": message["id"], "error": str(error), "code": "sandbox"}, []
        self.oom = max(self.oom, message.get("oom", 0))
        streams = [stream for number in message.pop("after", []) if (stream := self._mux.stream(number)) is not None]
        busy = [stream for stream in streams if not stream.is_quiet]
        if busy:
            task = self._loop.create_task(self._take_after(busy, message, fds))
            self._waiting.add(task)
            task.add_done_callback(self._waiting.discard)
        else:
            self._pass_on(message, fds)

    async def _take_after(self, streams: list[MuxStream], message: dict[str, Any], fds: list[int]) -> None:
        for stream in streams:
            await stream.quiet()
        self._pass_on(message, fds)

    def _pass_on(self, message: dict[str, Any], fds: list[int]) -> None:
        if message["id"] == EVENT:
            self._note(message)
            return
        callback = self._heard.get(message["id"])
        if callback is None:
            close_all(fds)
        else:
            callback(message, fds)

    def _note(self, message: dict[str, Any]) -> None:
        if "gone" in message:
            self.close(f"the container {self._key} {message['gone']}" if message["gone"] else "")
        elif self.on_decision is not None:
            self.on_decision(Decision(**message["decision"]))

    def _receive(self, number: int) -> int:
        """An open file for a stream that goes both ways."""
        ours = theirs = None
        try:
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            sink = os.dup(ours.fileno())
        except OSError:
            self._mux.refuse(number)
            for end in (ours, theirs):
                if end is not None:
                    end.close()
            raise
        self._mux.take(number, source=ours.detach(), sink=sink)
        return theirs.detach()

    def resize(self, job: int, terminal: int, rows: int, columns: int) -> None:
        self.send({"op": "resize", "id": 0, "job": job, "rows": rows, "columns": columns})

    def close(self, why: str = "") -> None:
        if self.closed:
            return
        self._gone = why or self._gone
        self.closed = True
        for callback in list(self._heard.values()):
            callback({}, [])


def _kind(fd: int) -> str:
    """Which way the bytes of an open file go, seen from the far side."""
    mode = os.fstat(fd).st_mode
    if stat.S_ISCHR(mode):
        return "null"
    flags = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
    return "out" if flags == os.O_WRONLY else "in"


class HelperEntered(Entered):
    """A container that the helper has entered."""

    def __init__(
        self, helper: HelperChannel, channel: HelperChannel, key: str, proof: dict[str, str], left: Callable[[], None]
    ) -> None:
        self.channel = self._far = channel
        self.proof = proof
        self.watching = []
        self._helper = helper
        self._key = key
        self._left = left

    def oom_kills(self) -> int:
        return self._far.oom

    async def changes(self) -> list[Change] | None:
        if self.channel.closed:
            raise self.channel.lost()
        rows = (await self._helper.ask({"op": "changes", "container": self._key}))[0]["changes"]
        return None if rows is None else [Change(*row) for row in rows]

    async def free_disk(self) -> int | None:
        return (await self._helper.ask({"op": "free", "container": self._key}))[0]["bytes"]

    async def used_disk(self, volumes: list[str]) -> int | None:
        asked = {"op": "measure", "container": self._key, "volumes": volumes}
        return (await self._helper.ask(asked))[0]["bytes"]

    def network(self, policy: NetworkPolicy, on_decision: OnDecision | None) -> Network:
        network = HelperNetwork(policy, on_decision)
        self._far.on_decision = network.note
        return network

    async def open_hub(
        self,
        others: list[tuple[Entered, Network, Places]],
        names: Mapping[int, Mapping[str, int]],
    ) -> Callable[[], Awaitable[None]]:
        members = [[one._key, places] for one, _, places in others if isinstance(one, HelperEntered)]
        rows = [[number, dict(each)] for number, each in names.items()]
        request = {"container": self._key, "members": members, "names": rows}
        await self._helper.ask({"op": "open_hub"} | request)

        async def close() -> None:
            with contextlib.suppress(SandboxError, TimeoutError):
                async with asyncio.timeout(_LEAVE_SECONDS):
                    await self._helper.ask({"op": "close_hub", "container": self._key})

        return close

    async def leave(self) -> None:
        self.channel.close()
        with contextlib.suppress(SandboxError, TimeoutError):
            async with asyncio.timeout(_LEAVE_SECONDS):
                await self._helper.ask({"op": "leave", "container": self._key})
        self._left()


class HelperNetwork(Network):
    """A network that the helper serves; what it decides is told here."""

    def note(self, decision: Decision) -> None:
        self._gatekeeper.ledger.note(decision)

    async def settle(self, channel: Channel) -> None:
        if not channel.closed:
            with contextlib.suppress(SandboxError, TimeoutError):
                async with asyncio.timeout(_SETTLE_SECONDS):
                    await channel.ask({"op": "settle"})

    async def enforce(self, channel: Channel, policy: NetworkPolicy) -> None:
        self.policy = policy
        try:
            await channel.ask({"op": "network", "mode": policy.mode, "hosts": list(policy.hosts)})
        except SandboxError as error:
            if error.code != PolicyError.code:
                raise
            raise PolicyError(str(error), hint="pier doctor") from error


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
        self._channels: dict[str, HelperChannel] = {}
        self._mux = Mux(1, self._on_message)
        self._own = HelperChannel(self._mux, "", f"the helper at the engine {where} is gone", code="helper_gone")
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
            report = self._complaints.strip().splitlines()[-1]
            raise SandboxError(f"the helper ended at once: {report}", code="helper_start") from error
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
        report = self._own._gone + (f": {why}" if why else "")
        self._mux.close()
        for channel in (*self._channels.values(), self._own):
            channel.close(report)
        self._channels.clear()

    def _on_message(self, message: dict[str, Any]) -> None:
        if "key" not in message:
            raise Broken("the helper sent a malformed message")
        key = message.pop("key")
        channel = self._channels.get(key) if key else self._own
        if channel is not None:
            channel.take(message)

    async def enter(self, name: str, id: str, pid: int, plan: dict[str, Any]) -> HelperEntered:
        if self.closed:
            raise self._own.lost()
        channel = self._channels[name] = HelperChannel(self._mux, name, f"the container {name} is gone")
        try:
            answer, _ = await self._own.ask({"op": "enter", "container": name, "of": id, "pid": pid, "plan": plan})
        except BaseException:
            channel.close()
            del self._channels[name]
            with contextlib.suppress(SandboxError):
                self._own.send({"op": "leave", "container": name, "id": 0})
            raise
        return HelperEntered(self._own, channel, name, answer["proof"], lambda: self._forget(name))

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
