"""Resolvers: the little of DNS that one sandbox needs, and the names of the services of one trial.

A service's name is answered from the trial's own table, any other by the policy of the service that asks.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pier.network import plumbing
from pier.network.policy import Address

A, AAAA = 1, 28
OK, SERVER_FAILURE, NO_SUCH_NAME, REFUSED = 0, 2, 3, 5
TRANSFERS = (251, 252)
"""Questions for a whole zone."""
TTL = 60


@dataclass(frozen=True, slots=True)
class Question:
    """A question as it came: `raw` is its wire form, to be repeated in the answer."""

    id: int
    flags: int
    name: str
    kind: int
    raw: bytes


def read(data: bytes) -> Question | None:
    """The question of a query; None if this is no query that can be answered."""
    if len(data) < 17:
        return None
    id, flags, questions = struct.unpack_from(">HHH", data)
    if flags & 0xF800 or questions != 1:  # an answer, or something else than a query, such as an update of a zone
        return None
    labels: list[bytes] = []
    at = 12
    while at < len(data) and (size := data[at]):
        if size > 63 or at + 1 + size > len(data):
            return None
        labels.append(data[at + 1 : at + 1 + size])
        at += size + 1
    if at + 5 > len(data):
        return None
    kind, group = struct.unpack_from(">HH", data, at + 1)
    if group != 1:
        return None
    name = b".".join(labels).decode("ascii", "replace").lower()
    return Question(id, flags, name, kind, data[12 : at + 5])


def answer(question: Question, code: int, addresses: Sequence[Address] = ()) -> bytes:
    """The answer to a question: a response code, and the addresses of the kind that was asked for."""
    opcode_and_wish = question.flags & 0x7900
    header = struct.pack(">HHHHHH", question.id, 0x8480 | opcode_and_wish | code, 1, len(addresses), 0, 0)
    records = [
        struct.pack(">HHHIH", 0xC00C, A if address.version == 4 else AAAA, 1, TTL, len(address.packed)) + address.packed
        for address in addresses
    ]
    return header + question.raw + b"".join(records)


Places = list[tuple[int, int]]
"""Where a service is: pairs of a network's number and the service's own number there."""
Answer = Callable[[bytes], Awaitable[bytes | None]]


class Names:
    """Serves the socket that `lan.make_hub` made. `names` has for each network its names; `askers` whom to ask for all
    other names, by the place that a question came from."""

    def __init__(self, names: Mapping[int, Mapping[str, int]], askers: Mapping[tuple[int, int], Answer]) -> None:
        self._names = names
        self._askers = askers
        self._sock: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def serve(self, fd: int) -> None:
        self._sock = socket.socket(fileno=fd)
        asyncio.get_running_loop().add_reader(self._sock, self._take, self._sock)

    def _take(self, sock: socket.socket) -> None:
        for _ in range(64):
            try:
                data, source = sock.recvfrom(4096)
            except OSError:
                return
            if len(self._tasks) < 512:
                task = asyncio.get_running_loop().create_task(self._reply(sock, data, source))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _reply(self, sock: socket.socket, data: bytes, source: Any) -> None:
        reply = await self.answer(data, source[0])
        if reply is not None and sock.fileno() >= 0:
            try:
                sock.sendto(reply, source)
            except OSError:
                return  # the client is gone, or its socket is full: it will ask again

    async def answer(self, data: bytes, source: str) -> bytes | None:
        """The answer to what the service at `source` asks; None if that is no question, or none of the services."""
        question = read(data)
        place = plumbing.asker(source)
        if question is None or place not in self._askers:
            return None
        name = question.name.removesuffix(".")
        own = [where for where in self._askers if where[1] == place[1]]
        for network, _ in own:
            host = self._names.get(network, {}).get(name)
            if host is not None:
                address = ipaddress.IPv4Address(plumbing.service_address(network, host))
                return answer(question, OK, [address] if question.kind == A else [])
        return await self._askers[place](data)

    def close(self) -> None:
        """Stop serving. Idempotent."""
        if self._sock is not None:
            asyncio.get_running_loop().remove_reader(self._sock)
            self._sock.close()
            self._sock = None
        for task in list(self._tasks):
            task.cancel()
