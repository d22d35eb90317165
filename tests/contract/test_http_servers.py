"""What real servers make of what the gatekeeper passes on: none of them ever sees a Host that is not allowed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pier.network.gatekeeper import Transfer, relay, reset
from pier.network.outside import Streams
from pier.network.sniff import Disagreement, Sniffer
from tests import vhosts
from tests.attacks import ALLOWED, ATTACKS, REFUSED, WORKS


@dataclass(frozen=True)
class Server:
    name: str
    port: int
    directory: Path

    def refused_hosts(self) -> list[str]:
        seen = vhosts.hosts(self.name, self.directory)
        return [host for host in seen if host.lower().split(":")[0] != "allowed.test"]


@pytest.fixture(scope="module", params=vhosts.SERVERS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if why := vhosts.missing(request.param):
        pytest.skip(why)
    directory = tmp_path_factory.mktemp(request.param)
    with vhosts.running(request.param, directory) as port:
        yield Server(request.param, port, directory)


@asynccontextmanager
async def between(server: Server) -> AsyncIterator[int]:
    """The gatekeeper's relay in front of a server, for connections to `allowed.test`."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(client: Streams) -> None:
        upstream = await asyncio.open_connection("127.0.0.1", server.port)
        try:
            await relay(client, upstream, Sniffer("allowed.test"), Transfer())
        except (Disagreement, OSError):
            pass
        finally:
            reset(client[1])
            upstream[1].close()

    def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(serve((reader, writer)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    listening = await asyncio.start_server(take, "127.0.0.1", 0)
    try:
        yield listening.sockets[0].getsockname()[1]
    finally:
        listening.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def say(port: int, parts: list[bytes]) -> bytes:
    """Send the parts, then stop sending; everything that came back until the other side closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    heard = b""
    try:
        async with asyncio.timeout(60):
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)
            writer.write_eof()
            while data := await reader.read(1 << 16):
                heard += data
    except OSError:
        pass
    finally:
        writer.close()
    return heard


async def test_without_the_gatekeeper_the_other_host_answers(server: Server) -> None:
    answers = {name: await say(server.port, [data]) for name, data in ATTACKS.items()}
    assert {name for name, answer in answers.items() if vhosts.SECRET in answer} >= WORKS[server.name]
    (server.directory / f"{server.name}.hosts").write_text("")


async def test_what_is_allowed_is_answered(server: Server) -> None:
    chunked = b"POST / HTTP/1.1\r\nHost: allowed.test\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    posted = b"POST / HTTP/1.1\r\nHost: Allowed.TEST:80\r\nContent-Length: 38\r\n\r\n" + REFUSED
    assert len(REFUSED) == 38
    async with between(server) as port:
        answer = await say(port, [b"\r\n" + ALLOWED + posted, chunked + ALLOWED])
    assert answer.count(b"HTTP/1.1 200") == 4 and answer.count(b"allowed.test") == 4, answer
    assert vhosts.SECRET not in answer and server.refused_hosts() == []


@pytest.mark.parametrize("step", [0, 1, 13])
async def test_no_server_sees_another_host(server: Server, step: int) -> None:
    async with between(server) as port:
        for name, data in ATTACKS.items():
            parts = [data[at : at + step] for at in range(0, len(data), step)] if step else [data]
            assert vhosts.SECRET not in await say(port, parts), name
            assert server.refused_hosts() == [], name


async def test_a_websocket_passes_unread_after_its_answer(server: Server) -> None:
    if server.name != "node":
        pytest.skip("only the Node server switches protocols")
    async with between(server) as port, asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(ALLOWED)
        assert b"200 OK" in await reader.readuntil(b"allowed.test\r\n0\r\n\r\n")
        writer.write(ALLOWED[:-2] + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n" + REFUSED)
        assert b"101 Switching Protocols" in await reader.readuntil(b"allowed.test" + REFUSED)
        writer.write(REFUSED)
        await reader.readuntil(REFUSED)
        writer.close()
    assert server.refused_hosts() == []


_PIECES = [
    b"GET", b"POST", b"get", b"G3T", b"CONNECT", b"OPTIONS", b"PRI", b" ", b"  ", b"\t", b"/", b"*",
    b"http://refused.test/", b"http://allowed.test/", b"//refused.test/", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/0.9",
    b"http/1.1", b"\r\n", b"\n", b"\r", b"\r\n\r\n", b"\n\n", b"\x00", b"\x0b", b"\x1f", b"\xa0",
    b"Host: allowed.test\r\n", b"Host: refused.test\r\n", b"host:refused.test\r\n", b"Host : refused.test\r\n",
    b" Host: refused.test\r\n", b"X: y\r\n", b"Content-Length: 0\r\n", b"Content-Length: 38\r\n",
    b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: x\r\n",
    b"Connection: Upgrade\r\n", b"Upgrade: websocket\r\n", b"Upgrade: h2c\r\n", b"Expect: 100-continue\r\n",
    b"0\r\n\r\n", b"5\r\nhello\r\n", b"26\r\n", b"hello", b"\x16\x03\x01", ALLOWED, REFUSED, ALLOWED[:-2],
    REFUSED[:-2],
]  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.sampled_from(_PIECES), min_size=1, max_size=14), min_size=8, max_size=8), st.integers(0))
def test_whatever_is_sent_no_server_sees_another_host(server: Server, streams: list[list[bytes]], seed: int) -> None:
    chance = random.Random(seed)

    async def run() -> None:
        async with between(server) as port:
            sent = [[b"".join(group) for group in _split(pieces, chance)] for pieces in streams]
            answers = await asyncio.gather(*(say(port, parts) for parts in sent))
        assert not [parts for parts, answer in zip(sent, answers, strict=True) if vhosts.SECRET in answer]
        assert server.refused_hosts() == [], sent

    asyncio.run(run())


def _split(pieces: list[bytes], chance: random.Random) -> Iterator[list[bytes]]:
    while pieces:
        count = chance.randint(1, len(pieces))
        yield pieces[:count]
        pieces = pieces[count:]
