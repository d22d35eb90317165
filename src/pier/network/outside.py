"""The machine's own network: names are resolved and connections made here, never inside a sandbox.

One function decides which addresses may be dialled under a policy, for sandboxes and for what this machine fetches on
a task's behalf.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from pier.network.policy import Address, NetworkPolicy, Rules, is_loopback, normal_name, objection

_FRESH_SECONDS = 30.0
_DIAL_SECONDS = 20.0
_ASK_SECONDS = 5.0
_LOOK_UP_SECONDS = 10.0
_CUT_OFF = 0x02
_KEPT = 4096
_AT_ONCE = 16

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Refused(Exception):
    """What was asked for is not allowed; the text says why."""


class NoSuchName(Refused):
    """The name does not exist."""


class Unreachable(Exception):
    """The name or the host cannot be reached now."""


class Outside:
    """Resolves and dials. Answers are kept for half a minute, so a lookup and the connection after it agree.

    The resolver's calls block, so each runs in a thread that nothing else uses: a slow name server delays neither other
    sandboxes nor other work of this process. An `Outside` has at most 16 such threads.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, list[Address]]] = {}
        self._turns = asyncio.Semaphore(_AT_ONCE)

    async def resolve(self, name: str) -> list[Address]:
        """The addresses of a name, by the machine's own rules. `NoSuchName` or `Unreachable` if it has none."""
        known = self._known.get(name)
        if known is not None and known[0] > time.monotonic():
            return known[1]
        addresses = await self._look_up(name)
        if len(self._known) >= _KEPT:
            self._known.clear()
        self._known[name] = (time.monotonic() + _FRESH_SECONDS, addresses)
        return addresses

    async def _look_up(self, name: str) -> list[Address]:
        try:
            async with asyncio.timeout(_LOOK_UP_SECONDS):
                await self._turns.acquire()
                rows = await _in_thread(name, self._turns.release)
        except TimeoutError:
            raise Unreachable(f"{name}: the name servers do not answer") from None
        except socket.gaierror as error:
            if error.errno in (socket.EAI_NONAME, socket.EAI_NODATA):
                raise NoSuchName("no such name") from None
            raise Unreachable(f"{name}: {error.strerror}") from None
        except UnicodeError:
            raise NoSuchName("no such name") from None
        texts = dict.fromkeys(str(row[4][0]).partition("%")[0] for row in rows)
        return [ipaddress.ip_address(text) for text in texts]

    async def ask(self, query: bytes) -> bytes:
        """What the machine's name servers answer to a DNS query of any kind; `Unreachable` if none does."""
        for server in _name_servers():
            for exchange in (_ask_by_datagram, _ask_by_stream):
                try:
                    async with asyncio.timeout(_ASK_SECONDS), self._turns:
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


async def _in_thread(name: str, done: Callable[[], None]) -> list[Any]:
    """Look a name up in a thread that does not hold up the end of the process. `done` is called when the thread has
    ended, which may be long after the caller gave up."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[list[Any]] = loop.create_future()

    def settle(rows: list[Any], error: Exception | None) -> None:
        done()
        if not answer.done():
            answer.set_result(rows) if error is None else answer.set_exception(error)

    def work() -> None:
        rows: list[Any] = []
        failure = None
        try:
            rows = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop was closed while this thread waited
            loop.call_soon_threadsafe(settle, rows, failure)

    threading.Thread(target=work, name="pier-lookup", daemon=True).start()
    return await answer


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


_NEVER_NAMES = ("invalid", "localhost", "arpa")
"""Last labels that no resolver outside is asked for."""


class Targets:
    """Finds addresses to dial, all of them checked. Raises `Refused`, or `Unreachable` if no resolver answers."""

    def __init__(self, policy: NetworkPolicy, outside: Outside) -> None:
        self.mode = policy.mode
        self._rules = Rules(policy.hosts)
        self._outside = outside

    def may_look_up(self, name: str) -> bool:
        if name.rpartition(".")[2] in _NEVER_NAMES:
            return False
        return self.mode == "public" or (self.mode == "allowlist" and self._rules.allows_name(name, None))

    def allows_address(self, address: Address, port: int | None) -> bool:
        """Whether a rule names this address. No rule leads to this machine's loopback."""
        return self.mode == "allowlist" and self._rules.allows_address(address, port) and not is_loopback(address)

    async def of_host(self, host: str, port: int) -> list[Address]:
        """Where the host of a URL is: a name or an address."""
        try:
            return self.of_address(ipaddress.ip_address(host), port)
        except ValueError:
            pass
        name = normal_name(host)
        if name is None or not self.may_look_up(name):
            raise Refused("not allowed")
        return await self.of_name(name, port)

    async def of_name(self, name: str, port: int) -> list[Address]:
        """Those of a name's addresses that may be dialled: a name cannot lead to what only an address rule may."""
        if self.mode == "none" or (self.mode == "allowlist" and not self._rules.allows_name(name, port)):
            raise Refused("not allowed")
        objections = ""
        usable = []
        for address in await self._outside.resolve(name):
            objections = objection(address, private_too=self.mode == "allowlist")
            if not objections or self.allows_address(address, port):
                usable.append(address)
        if not usable:
            raise Refused(f"resolves to a {objections}" if objections else "has no address")
        return usable

    def of_address(self, address: Address, port: int) -> list[Address]:
        why = "not allowed"
        if self.allows_address(address, port):
            return [address]
        if self.mode == "public" and not (why := objection(address, private_too=False)):
            return [address]
        raise Refused(why)
