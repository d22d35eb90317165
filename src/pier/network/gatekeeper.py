"""Serves the gateway end of a sandbox's network from pier's own process, and decides what passes.

A name is looked up outside only if the policy allows it, and is answered with a synthetic address. A connection to
such an address is for that name: the name is resolved again outside, the real address is checked, and it is dialled
from here. What the client then says (TLS server name, HTTP host) must agree with the name. Connections to plain
addresses pass only if a rule names the address, or if the network is public. Everything else is reset at once.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import struct
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pier.network import dns, plumbing
from pier.network.outside import NoSuchName, Outside, Refused, Streams, Targets, Unreachable
from pier.network.policy import Address, Decision, DecisionLog, NetworkPolicy, OnDecision, Synthetic, normal_name
from pier.network.sniff import Disagreement, Sniffer
from pier.network.udp import Datagrams, read_attempt

_CHUNK = 1 << 18


@dataclass(slots=True)
class Transfer:
    """What went through a connection, whether the policy let it, and whether nothing answered."""

    allowed: bool = False
    peer: str = ""
    sent: int = 0
    received: int = 0
    outage: bool = False


async def relay(client: Streams, server: Streams, watch: Sniffer | None, transfer: Transfer) -> None:
    """Pass bytes until both sides have ended. Raises `Disagreement` before what disagrees was passed on."""
    outward = asyncio.ensure_future(_outward(client[0], server[1], watch, transfer))
    inward = asyncio.ensure_future(_inward(server, client[1], watch, transfer))
    try:
        done, _ = await asyncio.wait([outward, inward], return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
        client[1].close()
    finally:
        outward.cancel()
        inward.cancel()
        await asyncio.gather(outward, inward, return_exceptions=True)


async def _outward(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, watch: Sniffer | None, transfer: Transfer
) -> None:
    while data := await reader.read(_CHUNK):
        passed = watch.feed(data) if watch else data
        transfer.sent += len(passed)
        writer.write(passed)
        await writer.drain()
    if watch and (rest := watch.end()):
        writer.write(rest)
    if writer.can_write_eof():
        writer.write_eof()


async def _inward(server: Streams, writer: asyncio.StreamWriter, watch: Sniffer | None, transfer: Transfer) -> None:
    while data := await server[0].read(_CHUNK):
        if watch and (freed := watch.heard(data)):
            transfer.sent += len(freed)
            server[1].write(freed)
        transfer.received += len(data)
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


def reset(writer: asyncio.StreamWriter) -> None:
    """End a connection that is not closing already, so that the other side learns it at once."""
    sock = writer.get_extra_info("socket")
    if sock is not None and not writer.transport.is_closing():
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        except OSError:
            pass
        writer.transport.abort()


_ORIGINAL_DESTINATION = 80
_GATEWAYS = (ipaddress.ip_address(plumbing.GATEWAY), ipaddress.ip_address(plumbing.GATEWAY6))
_MOST_AT_ONCE = 256
"""Connections of one sandbox, so that it cannot use up the files that pier may have open."""


class Gatekeeper:
    """One sandbox's way out. `serve` takes the sockets that `plumbing.connect` made; `close` ends everything."""

    def __init__(
        self, policy: NetworkPolicy, on_decision: OnDecision | None = None, outside: Outside | None = None
    ) -> None:
        self.ledger = DecisionLog(on_decision)
        self._outside = outside or Outside()
        self._synthetic = Synthetic()
        self._sockets: list[socket.socket] = []
        self._watches: list[socket.socket] = []
        self._servers: list[asyncio.Server] = []
        self._datagrams = Datagrams(self._datagram_target, self._name_at, self.ledger.note)
        self._tasks: set[asyncio.Task[None]] = set()
        self.set_policy(policy)

    def set_policy(self, policy: NetworkPolicy) -> None:
        """What passes from now on. Connections that are open stay open; `close` ends those."""
        self._targets = Targets(policy, self._outside)

    async def serve(self, fds: list[int]) -> None:
        """Serve the descriptors of `plumbing.connect`, which are the gatekeeper's from now on."""
        sockets = [socket.socket(fileno=fd) for fd in fds]
        taps = [sock for sock in sockets if sock.family == socket.AF_PACKET]
        served = [sock for sock in sockets if sock not in taps]
        self._watches = taps[:1]
        self._datagrams = Datagrams(self._datagram_target, self._name_at, self.ledger.note)
        takers = [(sock, self._take_queries) for sock in served[1::2]]
        takers += [(sock, self._take_attempts) for sock in taps[:1]]
        takers += [(sock, self._datagrams.take) for sock in taps[1:]]
        for sock, take in takers:
            self._sockets.append(sock)
            asyncio.get_running_loop().add_reader(sock, take, sock)
        for sock in served[::2]:
            self._servers.append(await asyncio.start_server(self._take_connection, sock=sock, limit=1 << 18))

    @contextmanager
    def unnoted(self) -> Iterator[None]:
        """While pier itself tries what must fail, so that its attempts are not taken for the agent's."""
        self.ledger.muted = True
        try:
            yield
        finally:
            for sock in self._watches:
                self._take_attempts(sock)
            self.ledger.muted = False

    async def close(self) -> None:
        """Close every socket and connection. The kernel then takes the gateway's namespace away. Idempotent."""
        loop = asyncio.get_running_loop()
        for sock in self._sockets:
            loop.remove_reader(sock)
            sock.close()
        for server in self._servers:
            server.close()
        self._sockets, self._servers, self._watches = [], [], []
        await self._datagrams.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Names ----------------------------------------------------------------------------------------------------

    def _take_queries(self, sock: socket.socket) -> None:
        for _ in range(64):
            try:
                data, extra, _, source = sock.recvmsg(4096, 128)
            except OSError:
                return
            if len(self._tasks) < 2 * _MOST_AT_ONCE:
                self._start(self._answer_datagram(sock, data, extra, source))

    async def _answer_datagram(self, sock: socket.socket, data: bytes, extra: list[Any], source: Any) -> None:
        reply = await self.answer(data)
        if reply is not None and sock.fileno() >= 0:
            try:
                sock.sendmsg([reply], _from_same_address(extra), 0, source)
            except OSError:
                return  # the client is gone, or its socket is full: it will ask again

    async def answer(self, data: bytes) -> bytes | None:
        """The answer to a DNS query, or None if it is none."""
        question = dns.read(data)
        if question is None:
            return None
        name = normal_name(question.name)
        if name is None or not self._targets.may_look_up(name):
            self.ledger.note(Decision("dns", question.name[:255], False, reason="not allowed"))
            return dns.answer(question, dns.NO_SUCH_NAME)
        if question.kind in dns.TRANSFERS:
            self.ledger.note(Decision("dns", name, False, reason="not allowed"))
            return dns.answer(question, dns.REFUSED)
        if self._targets.mode == "public" and question.kind not in (dns.A, dns.AAAA):
            return await self._answer_other(question, data, name)
        try:
            await self._outside.resolve(name)
        except NoSuchName:
            self.ledger.note(Decision("dns", name, True, reason="no such name", outage=True))
            return dns.answer(question, dns.NO_SUCH_NAME)
        except Unreachable as error:
            self.ledger.note(Decision("dns", name, True, reason=str(error), outage=True))
            return dns.answer(question, dns.SERVER_FAILURE)
        four, six = self._synthetic.addresses(name)
        self.ledger.note(Decision("dns", name, True, address=str(four)))
        wanted = {dns.A: [four], dns.AAAA: [six] if self._has_six else []}
        return dns.answer(question, dns.OK, wanted.get(question.kind, []))

    async def _answer_other(self, question: dns.Question, data: bytes, name: str) -> bytes:
        """What this machine's own name servers say to a question that is not about addresses."""
        try:
            reply = await self._outside.ask(data)
        except Unreachable as error:
            self.ledger.note(Decision("dns", name, True, reason=str(error)))
            return dns.answer(question, dns.SERVER_FAILURE)
        self.ledger.note(Decision("dns", name, True))
        return reply

    @property
    def _has_six(self) -> bool:
        return len(self._servers) > 1

    async def _serve_names(self, streams: Streams) -> None:
        reader, writer = streams
        try:
            while True:
                size = int.from_bytes(await reader.readexactly(2), "big")
                reply = await self.answer(await reader.readexactly(size))
                if reply is None:
                    return
                writer.write(struct.pack(">H", len(reply)) + reply)
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            return
        finally:
            reset(writer)

    # Connections ----------------------------------------------------------------------------------------------

    def _take_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= _MOST_AT_ONCE:
            reset(writer)
            return
        self._start(self._serve_connection((reader, writer)))

    async def _serve_connection(self, client: Streams) -> None:
        writer = client[1]
        transfer = Transfer()
        address, port = None, 0
        name = reason = ""
        try:
            address, port = _destination(writer)
            name = self._name_at(address)
            if address in _GATEWAYS and port == 53:
                await self._serve_names(client)
                return
            await self._pass(client, address, port, transfer)
        except Unreachable as error:
            reason, transfer.outage = str(error), transfer.allowed
        except (Refused, Disagreement) as error:
            reason, transfer.allowed = str(error), False
        except OSError as error:
            reason = error.strerror or str(error)
        finally:
            reset(writer)
            if address not in _GATEWAYS or port != 53:
                self._note(name, address, port, reason, transfer)

    def _note(self, name: str, address: Address | None, port: int, reason: str, transfer: Transfer) -> None:
        decision = Decision(
            "tcp",
            name,
            transfer.allowed,
            port,
            reason,
            address=transfer.peer or str(address or ""),
            sent=transfer.sent,
            received=transfer.received,
            outage=transfer.outage,
        )
        self.ledger.note(decision)

    async def _pass(self, client: Streams, address: Address, port: int, transfer: Transfer) -> None:
        name = self._synthetic.name(address)
        if name is None:
            targets, watch = self._targets.of_address(address, port), None
        else:
            targets = await self._targets.of_name(name, port)
            watch = self._watch(name, targets, port)
        transfer.allowed = True
        server = await self._outside.dial(targets, port)
        try:
            transfer.peer = str(server[1].get_extra_info("peername")[0])
            await relay(client, server, watch, transfer)
        finally:
            server[1].close()

    def _watch(self, name: str, targets: list[Address], port: int) -> Sniffer | None:
        """Compares what the client says with the name. Where rules name all addresses, TLS may name no server."""
        if self._targets.mode != "allowlist":
            return None
        return Sniffer(name, nameless_tls=all(self._targets.allows_address(target, port) for target in targets))

    def _name_at(self, address: Address) -> str:
        return self._synthetic.name(address) or str(address)

    async def _datagram_target(self, address: Address, port: int) -> Address:
        """Where a datagram to an address really goes: under the same rules as a connection."""
        name = self._synthetic.name(address)
        if name is None:
            return self._targets.of_address(address, port)[0]
        usable = await self._targets.of_name(name, port)
        return next((one for one in usable if one.version == address.version), usable[0])

    # What the kernel refused ----------------------------------------------------------------------------------

    def _take_attempts(self, sock: socket.socket) -> None:
        for _ in range(256):
            try:
                data, source = sock.recvfrom(256)
            except OSError:
                return
            attempt = read_attempt(data, source[1])
            if attempt is None or self._is_served(attempt.address, attempt.kind, attempt.port):
                continue
            decision = Decision(attempt.kind, str(attempt.address), False, attempt.port, "not allowed")
            self.ledger.note(decision)

    def _is_served(self, address: Address, kind: str, port: int) -> bool:
        """Whether the attempt reaches the gatekeeper itself, which then says what became of it."""
        if self._targets.mode == "public":
            return kind != "ip"
        local = address in _GATEWAYS or self._synthetic.holds(address)
        if kind == "tcp":
            return local or self._targets.allows_address(address, None)
        return (kind == "icmp" and local) or (kind == "udp" and port == 53 and local)


def _destination(writer: asyncio.StreamWriter) -> tuple[Address, int]:
    """Where the client wanted to go, before the packet rules turned the connection here."""
    sock = writer.get_extra_info("socket")
    if sock.family == socket.AF_INET6:
        data = sock.getsockopt(socket.IPPROTO_IPV6, _ORIGINAL_DESTINATION, 28)
        return ipaddress.IPv6Address(data[8:24]), int.from_bytes(data[2:4], "big")
    data = sock.getsockopt(socket.IPPROTO_IP, _ORIGINAL_DESTINATION, 16)
    return ipaddress.IPv4Address(data[4:8]), int.from_bytes(data[2:4], "big")


def _from_same_address(extra: list[Any]) -> list[tuple[int, int, bytes]]:
    """Control data that makes an answer come from the address that was asked."""
    for level, kind, data in extra:
        if level == socket.IPPROTO_IP and kind == 8:
            return [(level, kind, struct.pack("I4s4s", 0, data[8:12], bytes(4)))]
        if level == socket.IPPROTO_IPV6 and kind == socket.IPV6_PKTINFO:
            return [(level, kind, data[:16] + bytes(4))]
    return []
