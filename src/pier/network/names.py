"""Answers the services of one trial that ask for names: one another's, and all others by their own policies."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from pier.network import dns, lan

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
        question = dns.read(data)
        place = lan.asker(source)
        if question is None or place not in self._askers:
            return None
        name = question.name.removesuffix(".")
        own = [where for where in self._askers if where[1] == place[1]]
        for network, _ in own:
            host = self._names.get(network, {}).get(name)
            if host is not None:
                address = ipaddress.IPv4Address(lan.service_address(network, host))
                return dns.answer(question, dns.OK, [address] if question.kind == dns.A else [])
        return await self._askers[place](data)

    def close(self) -> None:
        """Stop serving. Idempotent."""
        if self._sock is not None:
            asyncio.get_running_loop().remove_reader(self._sock)
            self._sock.close()
            self._sock = None
        for task in list(self._tasks):
            task.cancel()
