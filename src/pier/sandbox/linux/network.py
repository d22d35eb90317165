"""The way out of a sandbox: init makes the sockets, pier serves them, a probe inside proves the policy.

Reads what `last_resort` tells of one sandbox, from pier's own process: notes each attempt, answers lookups.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from pier.errors import PolicyError, SandboxError
from pier.network import plumbing, udp
from pier.network.gatekeeper import Gatekeeper
from pier.network.netlink import NETFILTER
from pier.network.plumbing import GATEWAY
from pier.network.policy import Decision, NetworkMode, NetworkPolicy, OnDecision, Rules
from pier.network.udp import ConnectAttempt, read_attempt
from pier.sandbox.linux.channel import Channel

_HEADER, _PAYLOAD, _SEQUENCE = 1, 9, 12
_AT_ONCE = 256
_MOST_HELD = 4096
"""More than a socket holds at once."""
_PAUSE = 0.25
"""Seconds without reading after a flood, so that a sandbox costs pier little more than what it may write down."""
_MOST_LOOKUPS = 64
"""Lookups that are answered at once; of more only the attempt is noted, and the client asks again."""
REASON = "no network"
_MARK = udp.bare(253, "127.0.0.1", GATEWAY)
"""A packet of pier's own, refused like any other: its number tells how many were lost before it."""

Told = tuple[int, int, bytes]
"""A logged packet's number, its protocol, and its beginning."""


class Refusals:
    """What one network namespace tells, from the sockets of `last_resort.listen`, which are this one's from now on.
    `answer` answers a lookup, and notes it by itself; `note` takes everything else."""

    def __init__(
        self, fds: list[int], answer: Callable[[bytes], Awaitable[bytes | None]], note: Callable[[Decision], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._refused, self._answers = (socket.socket(fileno=fd) for fd in fds)
        self._answer = answer
        self._note = note
        self._next = -1
        self._overrun = False
        self._pause: asyncio.TimerHandle | None = None
        self._lookups: set[asyncio.Task[None]] = set()
        self._resume()

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._refused, self._take_some)

    def _take_some(self) -> None:
        for _ in range(_AT_ONCE):
            if not self._take():
                return
        self._loop.remove_reader(self._refused)
        self._pause = self._loop.call_later(_PAUSE, self._resume)

    def take_all(self) -> None:
        """Note every packet logged so far; lookups may still be answered."""
        self._take_held()
        if self._overrun:
            with contextlib.suppress(OSError):
                self._answers.sendto(_MARK, (GATEWAY, 0))
            self._take_held()

    def _take_held(self) -> None:
        """Take the packets that the socket holds, up to a limit: a sandbox may add to them without a pause."""
        for _ in range(_MOST_HELD):
            if not self._take():
                return

    async def settle(self) -> None:
        """Note every packet logged so far."""
        self.take_all()
        if self._lookups:
            await asyncio.wait(self._lookups)

    def _take(self) -> bool:
        data = plumbing.receive_refused(self._refused)
        if data is None:
            return False
        self._overrun = self._overrun or not data
        for number, protocol, packet in _read(data):
            if self._next >= 0 and number > self._next:
                self._lose(number - self._next)
            self._next = number + 1
            self._consider(protocol, packet)
        return True

    def _lose(self, count: int) -> None:
        self._note(Decision("ip", "anywhere", False, reason=f"{REASON}; too many at once to list", count=count))

    def _consider(self, protocol: int, packet: bytes) -> None:
        sent = udp.read(packet, protocol)
        is_lookup = sent is not None and sent.kind == "udp" and sent.port == 53 and str(sent.address) == GATEWAY
        if sent is not None and is_lookup and len(self._lookups) < _MOST_LOOKUPS:
            task = self._loop.create_task(self._look_up(sent))
            self._lookups.add(task)
            task.add_done_callback(self._lookups.discard)
            return
        attempt = read_attempt(packet, protocol)
        if attempt is not None and not _is_ours(packet, attempt):
            self._note(Decision(attempt.kind, str(attempt.address), False, attempt.port, REASON))

    async def _look_up(self, sent: udp.Datagram) -> None:
        reply = await self._answer(sent.payload)
        if reply is not None and self._answers.fileno() >= 0:
            with contextlib.suppress(OSError):
                self._answers.sendto(udp.answer(sent, reply), (str(sent.source), 0))

    def close(self) -> None:
        """Close the sockets; the kernel then logs nothing. Idempotent."""
        if self._pause is not None:
            self._pause.cancel()
        if self._refused.fileno() >= 0:
            self._loop.remove_reader(self._refused)
        for task in self._lookups:
            task.cancel()
        self._refused.close()
        self._answers.close()


def _is_ours(packet: bytes, attempt: ConnectAttempt) -> bool:
    """Whether a packet comes of what pier does: a mark, or the kernel's mark that no process waits for an answer."""
    if str(attempt.address) != GATEWAY:
        return False
    return packet[9] == _MARK[9] or (attempt.kind == "icmp" and packet[4 * (packet[0] & 0x0F) :][:1] == b"\x03")


def _read(data: bytes) -> Iterator[Told]:
    """The packets in what one read gave: netlink messages of the kernel's packet log."""
    while len(data) >= 20:
        size = struct.unpack_from("I", data)[0]
        parts = dict(_attributes(data[20:size]))
        if _PAYLOAD in parts and _HEADER in parts and _SEQUENCE in parts:
            number = int.from_bytes(parts[_SEQUENCE], "big")
            yield number, int.from_bytes(parts[_HEADER][:2], "big"), parts[_PAYLOAD]
        data = data[max((size + 3) & ~3, 20) :]


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= 4:
        size, kind = struct.unpack_from("HH", data)
        yield kind & 0x3FFF, data[4:size]
        data = data[max((size + 3) & ~3, 4) :]


_EVERYTHING = [["0.0.0.0", 0], ["::", 0]]


def offered_modes() -> frozenset[NetworkMode]:
    """The policies that this kernel lets pier enforce: without packet rules there is only `none`."""
    try:
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETFILTER).close()
    except OSError:
        return frozenset({"none"})
    return frozenset({"none", "allowlist", "public"})


class Network:
    """One sandbox's network, through all policies that it has in its life."""

    def __init__(self, policy: NetworkPolicy, on_decision: OnDecision | None) -> None:
        self.policy = policy
        self._gatekeeper = Gatekeeper(policy, on_decision)
        self._refusals: Refusals | None = None

    @property
    def refused(self) -> dict[str, int]:
        """What was refused so far, and how often."""
        return dict(self._gatekeeper.ledger.refused)

    async def answer(self, query: bytes) -> bytes | None:
        """The policy's answer to a question for a name that came another way."""
        return await self._gatekeeper.answer(query)

    def watch(self, fds: list[int]) -> None:
        """Hear of what is tried without a network, from the sockets that init made; `fds` is empty afterwards."""
        if fds:
            if self._refusals is not None:
                self._refusals.close()
            self._refusals = Refusals(fds, self._gatekeeper.answer, self._gatekeeper.ledger.note)
            fds.clear()

    def begin(self, proof: dict[str, str]) -> None:
        """A sandbox begins without a network; init said how it was refused one."""
        self._note(proof)

    async def enforce(self, channel: Channel, policy: NetworkPolicy) -> None:
        """Put a policy in force in the sandbox behind `channel`, and prove it. Connections that were open are closed.
        When it cannot be enforced the sandbox has no network, and this raises `PolicyError`."""
        prefixes = _prefixes(policy)
        await self.settle(channel)
        await self._gatekeeper.close()
        self._gatekeeper.set_policy(policy)
        self.policy = policy
        try:
            with self._unnoted():
                message, fds = await channel.ask({"op": "network", "mode": policy.mode, "prefixes": prefixes})
                if policy.mode != "none":
                    await self._gatekeeper.serve(fds)
                    message, _ = await channel.ask({"op": "probe", "mode": policy.mode})
            if "proof" not in message:
                raise SandboxError("something inside has killed what was to prove it", code="probe_failed")
        except SandboxError as error:
            await self._gatekeeper.close()
            if error.code == "sandbox_gone":
                raise
            raise PolicyError(
                f"the network policy {policy.mode!r} cannot be enforced: {error}", hint="pier doctor"
            ) from error
        self._note(message["proof"])

    @contextlib.contextmanager
    def _unnoted(self) -> Iterator[None]:
        with self._gatekeeper.unnoted():
            yield
            if self._refusals is not None:
                self._refusals.take_all()

    async def settle(self, channel: Channel) -> None:
        """Note what was tried without a network up to now."""
        if self._refusals is not None:
            await self._refusals.settle()

    def _note(self, proof: dict[str, str]) -> None:
        told = ", ".join(f"{name}: {value}" for name, value in proof.items())
        self._gatekeeper.ledger.note(Decision("probe", self.policy.mode, True, reason=told))

    async def close(self) -> None:
        await self._gatekeeper.close()
        if self._refusals is not None:
            self._refusals.close()


def _prefixes(policy: NetworkPolicy) -> list[list[Any]]:
    if policy.mode == "public":
        return _EVERYTHING
    networks = dict.fromkeys(Rules(policy.hosts).networks)
    return [[str(network.network_address), network.prefixlen] for network in networks]
