"""A name server that does not answer."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from pier.network import outside
from pier.network.outside import Outside, Unreachable
from tests.redteam import route

pytestmark = pytest.mark.plain


class Resolver:
    """The system's resolver, which holds lookups of `slow.test` until it is released."""

    def __init__(self) -> None:
        self.held = 0
        self.released = threading.Event()
        self._real = socket.getaddrinfo

    def __call__(self, host: str, *rest: Any, **options: Any) -> Any:
        if host != "slow.test":
            return self._real(host, *rest, **options)
        self.held += 1
        self.released.wait()
        raise socket.gaierror(socket.EAI_AGAIN, "no answer")


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Resolver]:
    slow = Resolver()
    monkeypatch.setattr(socket, "getaddrinfo", slow)
    yield slow
    slow.released.set()


@route("faults", "lookups of one sandbox that a name server never answers", "other sandboxes and pier's own work go on")
async def test_a_slow_name_server_starves_nothing_else(resolver: Resolver) -> None:
    slow = Outside()
    waiting = [asyncio.create_task(slow.resolve("slow.test")) for _ in range(100)]
    async with asyncio.timeout(60):
        while resolver.held < 16:
            await asyncio.sleep(0.001)
        assert [str(address) for address in await Outside().resolve("192.0.2.1")] == ["192.0.2.1"]
        await asyncio.gather(*(asyncio.to_thread(int) for _ in range(64)))
        assert resolver.held == 16, "one sandbox has a bounded number of lookups under way"
        assert not any(task.done() for task in waiting)
        resolver.released.set()
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {Unreachable}


@route("faults", "a lookup that takes longer than ten seconds", "fails; its thread counts until it has ended")
async def test_a_lookup_that_never_ends_is_given_up(resolver: Resolver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside, "_LOOK_UP_SECONDS", 0.01)
    slow = Outside()
    outcomes = await asyncio.gather(*(slow.resolve("slow.test") for _ in range(100)), return_exceptions=True)
    assert {str(outcome) for outcome in outcomes} == {"slow.test: the name servers do not answer"}
    assert resolver.held <= 16
