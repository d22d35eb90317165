"""A container as its engine's host sees it: control group, layers, private networks, and its attendant.

pier uses the first three where it is root on that host. In the helper `AttendedContainer` passes pier's requests to the
container's attendant, with streams in place of open files. Standard library only: the helper runs this too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pier.errors import SandboxError
from pier.network.dns import Answer, Names
from pier.network.policy import Decision, NetworkPolicy
from pier.sandbox.docker.mux import Mux, Watched
from pier.sandbox.linux.channel import WATCH, Channel, close_all
from pier.sandbox.linux.limits import free_bytes
from pier.sandbox.linux.network import Network

CONTAINER_ENDED = "container_ended"
"""The code of the error that a container's first process is not to be found."""
_ROOT = Path("/sys/fs/cgroup")
_ALL = ["0", "0", "4294967295"]
_WATCH_SECONDS = 1.0
_FROZEN_LOOKS = 5
"""A container that was seen frozen that many times in a row is given up. Engines freeze one for a moment for their own
purposes, such as a commit."""


class ContainerGroup:
    """The control group of the container whose first process is `pid`, in either version of the kernel's interface."""

    def __init__(self, pid: int) -> None:
        self._memory = self._freezer = Path("/nonexistent")
        self._cgroups = Path(f"/proc/{pid}/cgroup").read_text()
        for line in self._cgroups.splitlines():
            _, controllers, path = line.split(":", 2)
            below = _ROOT / controllers / path.lstrip("/")
            if "memory" in controllers.split(","):
                self._memory = below / "memory.oom_control"
            elif "freezer" in controllers.split(","):
                self._freezer = below / "freezer.state"
            elif not controllers and (below / "cgroup.freeze").exists():
                self._memory, self._freezer = below / "memory.events", below / "cgroup.freeze"

        self._users = (_ids(pid), _ids("self"))

    @property
    def has_users_of_its_own(self) -> bool:
        """Whether its root is another user than root here, though that one is the machine's."""
        theirs, ours = self._users
        return theirs != ours and ours == _ALL

    def is_of(self, id: str) -> bool:
        """Whether it is that of the container `id`: engines name groups after it."""
        return id in self._cgroups

    def oom_kills(self) -> int:
        """How many processes the limit on memory has killed."""
        try:
            rows = dict(line.split() for line in self._memory.read_text().splitlines())
        except (OSError, ValueError):
            return 0
        return int(rows.get("oom_kill", 0))

    def kill(self, *pidfds: int) -> None:
        """Kill everything in the container, whether it is frozen or not; a number below 0 stands for no process."""
        for fd in pidfds:
            if fd >= 0:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
        self.thaw()

    def is_frozen(self) -> bool:
        try:
            return self._freezer.read_text().strip() in ("FROZEN", "FREEZING", "1")
        except OSError:
            return False

    def thaw(self) -> None:
        """Let the processes run on; the older interface does not deliver even SIGKILL before that."""
        with contextlib.suppress(OSError):
            self._freezer.write_text("THAWED" if self._freezer.name == "freezer.state" else "0")


def _ids(pid: int | str) -> list[str]:
    return Path(f"/proc/{pid}/uid_map").read_text().split()


async def until_frozen(group: ContainerGroup, channel: Channel) -> bool:
    """Watch a container: True once somebody has frozen it, False when its channel is closed. What is frozen answers
    nothing, so that everybody who asks would wait for as long as somebody else likes."""
    looks = 0
    while not channel.closed and looks < _FROZEN_LOOKS:
        await asyncio.sleep(_WATCH_SECONDS)
        looks = looks + 1 if group.is_frozen() else 0
    return looks == _FROZEN_LOOKS


def find_layers(pid: int) -> tuple[str, list[str]] | None:
    """The directory that the container of the process `pid` writes to, and those below it, lowest first."""
    for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[4] == "/":
            kind, _, options = after.split(" ", 2)
            return _layers(kind, options)
    return None


def _layers(kind: str, options: str) -> tuple[str, list[str]] | None:
    said = {name: value for name, _, value in (option.partition("=") for option in options.split(","))}
    upper, lowers = said.get("upperdir", ""), said.get("lowerdir", "").split(":")
    # Engines mount by relative names what has many layers; names with odd letters are escaped in more than one way.
    if kind != "overlay" or "\\" in options or not all(path.startswith("/") for path in (upper, *lowers)):
        return None
    return upper, lowers[::-1]


Places = list[tuple[int, int]]
"""Where a container is: pairs of a network's number and its own number there."""


@dataclass(frozen=True, slots=True)
class Member:
    """A container that joins: the way to its attendant, who answers it for names outside, and its places."""

    channel: Channel
    answer: Answer
    places: Places


class Hub:
    """Private networks and the containers in them. `open` it once, `close` it at any moment."""

    def __init__(self) -> None:
        self._fd = -1
        self._names: Names | None = None

    async def open(self, members: list[Member], names: Mapping[int, Mapping[str, int]]) -> None:
        """Make the networks in `names`, which has for each its names, and link every member to its own."""
        _, (self._fd, resolver) = await members[0].channel.ask({"op": "hub", "networks": len(names)})
        askers = {place: member.answer for member in members for place in member.places}
        self._names = Names(names, askers)
        self._names.serve(resolver)
        await asyncio.gather(
            *(member.channel.ask({"op": "join", "places": member.places}, [self._fd]) for member in members)
        )

    def close(self) -> None:
        """Stop serving; the networks are gone. Idempotent."""
        if self._names is not None:
            self._names.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


EVENT = -2
"""The number of messages that answer nothing: a decision of the network policy, the end of the container."""
_OWN = 1 << 40
"""Requests of the helper's own have numbers from here on, so that they are not taken for pier's."""

_AGAIN_SECONDS = 0.25
_MOST_CONNECTIONS = 640
"""Connections from one container: some more than the gateway takes from one, so that it is the one to refuse."""


class AttendedContainer:
    """A container that was entered. `enter` it once, `leave` it at any moment."""

    def __init__(self, mux: Mux, key: str, id: str, pid: int) -> None:
        self.key = key
        self._mux = mux
        self._id = id
        self._pid = pid
        self._first = os.pidfd_open(pid)
        try:
            self._group = ContainerGroup(pid)
            self._layers = find_layers(pid)
            if not self._group.is_of(id):
                raise SandboxError(f"the process {pid} is not of the container {key}", code=CONTAINER_ENDED)
            if self._group.has_users_of_its_own:
                raise SandboxError(f"the container {key} uses a user namespace", code="engine_userns")
        except BaseException:
            os.close(self._first)
            raise
        self._pidfd = -1
        self._channel: Channel | None = None
        self._network = Network(NetworkPolicy(), self._decide)
        self._outputs: dict[int, list[int]] = {}
        self._terminals: dict[int, int] = {}
        self._listeners: dict[int, socket.socket] = {}
        self._connections: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()

    async def enter(self, fork_server: Channel, plan: dict[str, Any]) -> dict[str, str]:
        """Have an attendant enter the container; how it was refused a network."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel = Channel(ours, "the container is gone", self._gone)
        self._channel._numbers = _OWN
        try:
            ready = asyncio.ensure_future(self._channel.wait(0))
            request = {"op": "enter", "pid": self._pid, "plan": plan | {"container": self._id}}
            _, fds = await fork_server.ask(request, [theirs.fileno()])
            self._pidfd = fds[0]
        finally:
            theirs.close()
        self._start(self._watch())
        message, fds = await ready
        self._network.watch(fds)
        return message["proof"]

    def _start(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _tell(self, id: int, answer: dict[str, Any]) -> None:
        self._mux.send({"key": self.key, "id": id} | answer)

    def _gone(self) -> None:
        self._tell(EVENT, {"gone": ""})

    def _decide(self, decision: Decision) -> None:
        self._tell(EVENT, {"decision": asdict(decision)})

    async def _watch(self) -> None:
        assert self._channel is not None
        if await until_frozen(self._group, self._channel):
            self._tell(EVENT, {"gone": "was paused from outside"})
            self._channel.close()
            self._group.kill(self._pidfd, self._first)

    def take(self, message: dict[str, Any]) -> None:
        """Pass a request on. Its files are made here: pipes, with streams to pier at their other ends."""
        channel, id = self._channel, message["id"]
        if message["op"] == "unlisten":
            self._unlisten(message["listener"])
            return
        if message["op"] == "resize":
            stream = self._mux.stream(self._terminals.get(message["job"], -1))
            if stream is not None:
                stream.resize(message["rows"], message["columns"])
            return
        fds: list[int] = []
        try:
            for kind, number in message.pop("files", []):
                fds.append(self._open(kind, number, self._watched(id)))
                if kind == "out":
                    self._outputs.setdefault(id, []).append(number)
            assert channel is not None
            if channel.closed:
                return
            if id > 0:
                channel.hear(id, lambda answer, files: self._pass_back(id, answer, files))
            # Whoever is gone just now is told of as gone.
            with contextlib.suppress(SandboxError):
                channel.send(message, fds)
        finally:
            close_all(fds)

    def _watched(self, job: int) -> Watched:
        """Watches calls that the command `job` could hold up, and with them all containers of this session."""
        assert self._channel is not None
        return partial(WATCH.over, self._channel, job)

    def _open(self, kind: str, number: int, watched: Watched) -> int:
        if kind == "null":
            return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        read, write = os.pipe2(os.O_CLOEXEC)
        inside = read if kind == "in" else write
        os.fchmod(inside, 0o666)
        if kind == "in":
            os.set_blocking(write, False)
            self._mux.take(number, sink=write, watched=watched)
        else:
            self._mux.take(number, source=read, watched=watched)
        return inside

    def _pass_back(self, id: int, answer: dict[str, Any], fds: list[int]) -> None:
        assert self._channel is not None
        if not answer:
            return
        if answer.get("started"):
            self._tell_started(id, answer, fds)
            return
        close_all(fds)
        self._channel.forget(id)
        outputs = self._outputs.pop(id, [])
        if (terminal := self._terminals.pop(id, 0)) > 0:
            outputs.append(terminal)
        answer = {"oom": self._group.oom_kills()} | answer
        streams = [stream for number in outputs if (stream := self._mux.stream(number)) is not None]
        if streams:
            self._start(self._pass_back_after(id, answer, streams))
        else:
            self._tell(id, answer | {"after": outputs})

    async def _pass_back_after(self, id: int, answer: dict[str, Any], streams: list[Any]) -> None:
        """What a command wrote goes before the news that it ended."""
        for stream in streams:
            await stream.sent()
        self._tell(id, answer | {"after": [stream.number for stream in streams]})

    def _tell_started(self, id: int, answer: dict[str, Any], fds: list[int]) -> None:
        if not fds:
            self._tell(id, answer)
            return
        self._terminals[id] = self._hand_over(id, answer, fds[0])

    def _hand_over(self, id: int, answer: dict[str, Any], fd: int, over: Callable[[int], None] | None = None) -> int:
        """Tell of an open file that bytes go into and come from; `over` is called when it is closed."""
        number = self._mux.number()
        sink = os.dup(fd)
        self._tell(id, answer | {"files": [["both", number]]})
        os.set_blocking(fd, False)
        self._mux.take(number, source=fd, sink=sink, over=over)
        return number

    async def listen(self, message: dict[str, Any]) -> dict[str, Any]:
        """Listen inside; connections are handed over as they come."""
        assert self._channel is not None
        answer, fds = await self._channel.ask({"op": "listen", "host": message["host"], "port": message["port"]})
        sock = socket.socket(fileno=fds[0])
        sock.setblocking(False)
        self._listeners[message["id"]] = sock
        self._loop.add_reader(sock, self._accept, message["id"], sock)
        return {"port": answer["port"]}

    def _accept(self, id: int, sock: socket.socket) -> None:
        """Take connections, as many as one container may have: whoever comes then waits, and nobody else is harmed."""
        while len(self._connections) < _MOST_CONNECTIONS:
            try:
                connection = sock.accept()[0]
            except BlockingIOError:
                return
            except OSError:
                break
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            fd = connection.detach()
            try:
                self._connections.add(self._hand_over(id, {"connection": True}, fd, self._connections.discard))
            except OSError:
                os.close(fd)
                break
        self._loop.remove_reader(sock)
        self._loop.call_later(_AGAIN_SECONDS, self._accept_again, id)

    def _accept_again(self, id: int) -> None:
        if (sock := self._listeners.get(id)) is not None:
            self._loop.add_reader(sock, self._accept, id, sock)

    def _unlisten(self, id: int) -> None:
        sock = self._listeners.pop(id, None)
        if sock is not None:
            self._loop.remove_reader(sock)
            sock.close()

    async def set_network(self, policy: NetworkPolicy) -> dict[str, Any]:
        """Put a policy in force and prove it; the proof is the first decision under it."""
        assert self._channel is not None
        await self._network.enforce(self._channel, policy)
        return {}

    async def changes(self, fork_server: Channel, root: str) -> dict[str, Any]:
        """What differs from the image, if the container's layers can be found below `root`."""
        if self._layers is None:
            return {"changes": None}
        upper, lowers = self._layers
        request = {"op": "changes", "path": root + upper, "layers": [root + path for path in lowers]}
        return {"changes": (await fork_server.ask(request))[0]["changes"]}

    def free_disk(self, root: str) -> dict[str, Any]:
        """How much space is free where the container writes, if that can be found below `root`."""
        return {"bytes": free_bytes(Path(root + self._layers[0])) if self._layers else None}

    async def used_disk(self, fork_server: Channel, root: str, volumes: list[str]) -> dict[str, Any]:
        """How much the container has written, and its volumes hold."""
        if self._layers is None:
            return {"bytes": None}
        paths = [root + path for path in (self._layers[0], *volumes)]
        request = {"op": "measure", "paths": paths, "pid": self._pid}
        return {"bytes": (await fork_server.ask(request))[0]["bytes"]}

    async def settle(self) -> dict[str, Any]:
        """Tell of what was tried without a network."""
        assert self._channel is not None
        await self._network.settle(self._channel)
        return {}

    def member(self, places: Places) -> Member:
        """The container as one that joins private networks."""
        assert self._channel is not None
        return Member(self._channel, self._network.answer, [(network, host) for network, host in places])

    async def leave(self) -> None:
        """End the attendant and everything that is served for it. Of a frozen container everything is killed."""
        for id in list(self._listeners):
            self._unlisten(id)
        await self._network.close()
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        if self._channel is not None:
            self._channel.close()
        if self._group.is_frozen():
            self._group.kill(self._pidfd, self._first)
        if self._pidfd >= 0:
            ended = self._loop.create_future()
            self._loop.add_reader(self._pidfd, lambda: ended.done() or ended.set_result(None))
            await ended
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        for task in self._tasks:
            task.cancel()
        if self._first >= 0:
            os.close(self._first)
            self._first = -1
