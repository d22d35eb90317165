"""Carries datagrams (UDP) and echo requests (ping) of one sandbox with a public network to the world and back.

The packets that a sandbox sends are read at the gateway's end of its link. Each pair of ends is a flow: a socket of
this machine's own, connected to the other side, whose answers go back as packets that seem to come from there. Like
connections, flows are checked first, counted, noted and closed when the policy changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from pier.network import packets
from pier.network.decision import Decision
from pier.network.outside import Refused, Unreachable
from pier.network.packets import Datagram
from pier.network.rules import Address

_IDLE_SECONDS = 120.0
_MOST_FLOWS = 256
_MOST_WAITING = 32
_LARGEST = 1 << 16

Target = Callable[[Address, int], Awaitable[Address]]
"""Where a datagram to an address and port really goes; `Refused` if it may not, `Unreachable` if it cannot."""


class Datagrams:
    """The flows of one sandbox. `find` says where they lead, `name` what an address stands for, and `note` takes what
    became of each."""

    def __init__(self, find: Target, name: Callable[[Address], str], note: Callable[[Decision], None]) -> None:
        self._find = find
        self._name = name
        self._note = note
        self._flows: dict[tuple[object, ...], _Flow] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, sock: socket.socket) -> None:
        """Read what lies ready at the gateway's packet socket."""
        for _ in range(64):
            try:
                data, source = sock.recvfrom(_LARGEST)
            except OSError:
                return
            sent = packets.read(data, source[1])
            if sent is not None:
                self._pass(sock, source, sent)

    def _pass(self, sock: socket.socket, source: Any, sent: Datagram) -> None:
        key = (sent.kind, sent.source, sent.source_port, sent.address, sent.port)
        flow = self._flows.get(key)
        if flow is None:
            while len(self._flows) >= _MOST_FLOWS:
                self._flows.pop(next(iter(self._flows))).close()
            flow = self._flows[key] = _Flow(sock, source, sent)
            self._start(self._carry(key, flow))
        flow.send(sent)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, key: tuple[object, ...], flow: _Flow) -> None:
        sent, target, allowed, reason = flow.first, None, False, ""
        try:
            target = await self._find(sent.address, sent.port)
            allowed = True
            await flow.run(target, sent.port)
        except Refused as error:
            reason = str(error)
            flow.refuse(prohibited=True)
        except PermissionError:
            reason = "this machine lets its users send no echo requests"
            flow.refuse(prohibited=True)
        except (OSError, Unreachable) as error:
            reason = (isinstance(error, OSError) and error.strerror) or str(error)
            flow.refuse(prohibited=False)
        finally:
            if self._flows.get(key) is flow:
                del self._flows[key]
            place = str(target or sent.address)
            name = self._name(sent.address)
            self._note(Decision(sent.kind, name, allowed, sent.port, reason, place, flow.sent, flow.received))

    async def close(self) -> None:
        """End all flows."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Flow:
    """The datagrams between one port inside and one place outside."""

    def __init__(self, sock: socket.socket, source: Any, first: Datagram) -> None:
        self.first = first
        self.sent = self.received = 0
        self._sock = sock
        self._back = (source[0], source[1], 0, 0, source[4])
        self._waiting: list[bytes] = []
        self._outside: socket.socket | None = None
        self._used = 0.0
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def send(self, datagram: Datagram) -> None:
        """Pass a datagram on, or keep it until it is known where to."""
        self._used = asyncio.get_running_loop().time()
        if self._outside is not None:
            self._send(self._outside, datagram.payload)
        elif len(self._waiting) < _MOST_WAITING:
            self._waiting.append(datagram.payload)

    def _send(self, outside: socket.socket, payload: bytes) -> None:
        try:
            if self.first.kind == "icmp":
                outside.send(packets.echo_head(outside.family == socket.AF_INET6) + payload)
            else:
                outside.send(payload)
            self.sent += len(payload)
        except BlockingIOError:
            return  # as on any network, what is too much is lost
        except OSError as error:
            self._fail(error)

    async def run(self, target: Address, port: int) -> None:
        """Carry datagrams until none came for a while, or the other side refuses them."""
        loop = asyncio.get_running_loop()
        family = socket.AF_INET if target.version == 4 else socket.AF_INET6
        protocol = 0
        if self.first.kind == "icmp":
            protocol = socket.IPPROTO_ICMP if target.version == 4 else socket.IPPROTO_ICMPV6
        with socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC, protocol) as outside:
            outside.connect((str(target), port))
            self._outside = outside
            loop.add_reader(outside, self._take, outside)
            try:
                for data in self._waiting:
                    self._send(outside, data)
                while (left := self._used + _IDLE_SECONDS - loop.time()) > 0:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(asyncio.shield(self._end), left)
                        return
            finally:
                loop.remove_reader(outside)

    def _take(self, outside: socket.socket) -> None:
        for _ in range(64):
            try:
                data = outside.recv(_LARGEST)
            except BlockingIOError:
                return
            except OSError as error:
                self._fail(error)
                return
            self._used = asyncio.get_running_loop().time()
            if self.first.kind == "icmp":
                data = data[packets.ECHO_HEAD :]
            self.received += len(data)
            if len(data) <= packets.LARGEST:
                self._give(packets.answer(self.first, data))

    def _give(self, packet: bytes) -> None:
        if self._sock.fileno() >= 0:
            with contextlib.suppress(OSError):
                self._sock.sendto(packet, self._back)

    def _fail(self, error: OSError) -> None:
        if not self._end.done():
            self._end.set_exception(error)

    def refuse(self, *, prohibited: bool) -> None:
        """Tell the sandbox that its datagrams do not arrive."""
        self._give(packets.refusal(self.first, prohibited=prohibited))

    def close(self) -> None:
        if not self._end.done():
            self._end.set_result(None)
