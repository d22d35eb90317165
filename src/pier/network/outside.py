"""The machine's own network, as the gatekeeper uses it: names are resolved and connections made here, never inside."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time

from pier.network.rules import Address

_FRESH_SECONDS = 30.0
_DIAL_SECONDS = 20.0
_ASK_SECONDS = 5.0
_CUT_OFF = 0x02
_KEPT = 4096
_AT_ONCE = 16

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class NoSuchName(Exception):
    """The name does not exist."""


class Unreachable(Exception):
    """The name or the host cannot be reached now."""


class Outside:
    """Resolves and dials. Answers are kept for half a minute, so a lookup and the connection after it agree."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, list[Address]]] = {}
        self._turns = asyncio.Semaphore(_AT_ONCE)

    async def resolve(self, name: str) -> list[Address]:
        """The addresses of a name, by the machine's own rules. `NoSuchName` or `Unreachable` if it has none."""
        known = self._known.get(name)
        if known is not None and known[0] > time.monotonic():
            return known[1]
        async with self._turns:
            addresses = await self._look_up(name)
        if len(self._known) >= _KEPT:
            self._known.clear()
        self._known[name] = (time.monotonic() + _FRESH_SECONDS, addresses)
        return addresses

    async def _look_up(self, name: str) -> list[Address]:
        loop = asyncio.get_running_loop()
        try:
            rows = await loop.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            if error.errno in (socket.EAI_NONAME, socket.EAI_NODATA):
                raise NoSuchName(name) from None
            raise Unreachable(f"{name}: {error.strerror}") from None
        except UnicodeError:
            raise NoSuchName(name) from None
        texts = dict.fromkeys(str(row[4][0]).partition("%")[0] for row in rows)
        return [ipaddress.ip_address(text) for text in texts]

    async def ask(self, query: bytes) -> bytes:
        """What the machine's name servers answer to a DNS query of any kind; `Unreachable` if none does."""
        for server in _name_servers():
            for exchange in (_ask_by_datagram, _ask_by_stream):
                try:
                    async with self._turns, asyncio.timeout(_ASK_SECONDS):
                        reply = await exchange(server, query)
                except (OSError, TimeoutError, asyncio.IncompleteReadError):
                    break
                if len(reply) > 12 and reply[:2] == query[:2] and not reply[2] & _CUT_OFF:
                    return reply
        raise Unreachable("no name server answers")

    async def dial(self, addresses: list[Address], port: int) -> Streams:
        """A connection to the first of these addresses that takes it."""
        failure = "it has no usable address"
        for address in addresses:
            try:
                async with asyncio.timeout(_DIAL_SECONDS):
                    return await asyncio.open_connection(str(address), port, limit=1 << 18)
            except TimeoutError:
                failure = "no answer"
            except OSError as error:
                failure = error.strerror or str(error)
        raise Unreachable(failure)


def _name_servers() -> list[str]:
    try:
        with open("/etc/resolv.conf", encoding="utf-8", errors="replace") as stream:
            rows = [row.split() for row in stream]
    except OSError:
        rows = []
    found = [row[1] for row in rows if len(row) > 1 and row[0] == "nameserver"]
    return found[:3] or ["127.0.0.1"]


async def _ask_by_datagram(server: str, query: bytes) -> bytes:
    loop = asyncio.get_running_loop()
    family = socket.AF_INET6 if ":" in server else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
        sock.connect((server, 53))
        await loop.sock_sendall(sock, query)
        return await loop.sock_recv(sock, 4096)


async def _ask_by_stream(server: str, query: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(server, 53)
    try:
        writer.write(len(query).to_bytes(2, "big") + query)
        return await reader.readexactly(int.from_bytes(await reader.readexactly(2), "big"))
    finally:
        writer.close()
