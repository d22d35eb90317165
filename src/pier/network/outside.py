"""The machine's own network, as the gatekeeper uses it: names are resolved and connections made here, never inside."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time

from pier.network.rules import Address

_FRESH_SECONDS = 30.0
_DIAL_SECONDS = 20.0
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
