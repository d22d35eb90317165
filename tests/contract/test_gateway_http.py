"""HTTP as agents send it: what two readers could read differently is refused, all else is served in order."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from pier.gateway import Gateway, Session
from pier.gateway import call as caller_module
from pier.gateway.http import Server
from pier.gateway.request import BadMessage, HttpRequest
from pier.record import reader
from pier.wire.dialects import DIALECTS
from pier.wire.turn import Request, Turn
from tests.gateway_fakes import HELLO, PATHS, fake_provider, request_body, streams

LIMIT = 60


async def hello(request: Request) -> Turn:
    return HELLO


@dataclass
class Wire:
    """A raw connection to a gateway with one session."""

    gateway: Gateway
    session: Session
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def head(self, *fields: str, method: str = "POST", path: str = PATHS["chat"], version: str = "1.1") -> bytes:
        lines = [f"{method} {path} HTTP/{version}", "Host: x", f"Authorization: Bearer {self.session.key}", *fields]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    def send(self, *parts: bytes) -> None:
        for part in parts:
            self.writer.write(part)

    def ask(self, text: str = "hi", *, stream: bool = False) -> bytes:
        body = json.dumps(request_body("chat", text, stream=stream)).encode()
        return self.head(f"Content-Length: {len(body)}") + body

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        head = (await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), LIMIT)).decode()
        first, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        if "content-length" in headers:
            body = await self.reader.readexactly(int(headers["content-length"]))
        elif headers.get("transfer-encoding") == "chunked":
            body = b""
            while size := int(await self.reader.readuntil(b"\r\n"), 16):
                body += (await self.reader.readexactly(size + 2))[:-2]
            assert await self.reader.readexactly(2) == b"\r\n"
        else:
            body = await asyncio.wait_for(self.reader.read(), LIMIT)
        return int(first.split()[1]), headers, body

    async def rest(self) -> bytes:
        return await asyncio.wait_for(self.reader.read(), LIMIT)


@asynccontextmanager
async def wired(upstream: object = hello, **options: object) -> AsyncIterator[Wire]:
    async with Gateway() as gateway:
        url = await gateway.serve()
        session = gateway.session("m", upstream=upstream, **options)  # type: ignore[arg-type]
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]), limit=2**22)
        try:
            yield Wire(gateway, session, reader, writer)
        finally:
            writer.close()


BODY = json.dumps(request_body("chat")).encode()
SIZE = len(BODY)
CHUNK = b"%x\r\n%b\r\n0\r\n\r\n" % (SIZE, BODY)
FRAMINGS = [
    (f"Content-Length: {SIZE}", "Transfer-Encoding: chunked"),
    ("Transfer-Encoding: chunked", f"Content-Length: {SIZE}"),
    (f"Content-Length: {SIZE}", f"Content-Length: {SIZE}"),
    (f"Content-Length: {SIZE}", "Content-Length: 0"),
    (f"Content-Length: {SIZE}, {SIZE}",),
    (f"Content-Length: +{SIZE}",),
    ("Content-Length: -1",),
    (f"Content-Length: {SIZE:#x}",),
    ("Content-Length: 1_0",),
    ("Content-Length: ٣",),
    ("Content-Length:",),
    ("Content-Length: 9999999999999999999999",),
    ("Transfer-Encoding: identity",),
    ("Transfer-Encoding: gzip, chunked",),
    ("Transfer-Encoding: chunked, chunked",),
    ("Transfer-Encoding: xchunked",),
    ("Transfer-Encoding: chunked", "Transfer-Encoding: chunked"),
    ("Transfer-Encoding:\x0bchunked",),
    ("Transfer-Encoding : chunked",),
    ("X: 1\r\n Content-Length: 5",),
    ("X: 1\nContent-Length: 5",),
    ("X: 1\rContent-Length: 5",),
    ("X: \x00",),
    (": nameless",),
    ("no colon",),
    (" X: 1",),
    ("Host: other",),
    ("X(Y): 1",),
]


@pytest.mark.parametrize("fields", FRAMINGS, ids=[repr(fields)[:60] for fields in FRAMINGS])
async def test_what_can_be_read_in_two_ways_is_refused(fields: tuple[str, ...]) -> None:
    async with wired() as wire:
        wire.send(wire.head(*fields), CHUNK, wire.ask("smuggled"))
        status, headers, body = await wire.answer()
        assert status in (400, 501)
        assert headers["connection"] == "close"
        assert json.loads(body)["error"]["message"]
        assert await wire.rest() == b""
        assert wire.session.meter.turns == 0


LINES = [
    b"POST /v1/chat/completions\tHTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /v1/chat completions HTTP/1.1\r\nHost: x\r\n\r\n",
    b"PO(ST / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1 \r\nHost: x\r\n\r\n",
    b"GET / http/1.1\r\nHost: x\r\n\r\n",
    b"GET http://[x/ HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET / HTTP/2.0\r\nHost: x\r\n\r\n",
    b"GET /\r\n\r\n",
    b"GET / HTTP/1.1\nHost: x\n\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
]


@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
async def test_what_is_no_request_is_refused(line: bytes) -> None:
    async with wired() as wire:
        wire.send(line)
        status, _, body = await wire.answer()
        assert status in (400, 505)
        assert json.loads(body)["error"]
        assert await wire.rest() == b""


CHUNKS = [
    b"5\nhello\r\n0\r\n\r\n",
    b"5\r\nhello\n0\r\n\r\n",
    b"5\r\nhello!\r\n0\r\n\r\n",
    b"6\r\nhello\r\n0\r\n\r\n",
    b"0x5\r\nhello\r\n0\r\n\r\n",
    b"+5\r\nhello\r\n0\r\n\r\n",
    b"-5\r\nhello\r\n0\r\n\r\n",
    b" 5\r\nhello\r\n0\r\n\r\n",
    b"5 \r\nhello\r\n0\r\n\r\n",
    b"\r\nhello\r\n0\r\n\r\n",
    b"fffffffffffffffff\r\nhello",
    b"5;a\x00b\r\nhello\r\n0\r\n\r\n",
    b"5;a\nb\r\nhello\r\n0\r\n\r\n",
    b"5;" + b"x" * 5000,
    b"5\r\nhello\r\n0\r\nno colon\r\n\r\n",
    b"5\r\nhello\r\n0\r\n folded: 1\r\n\r\n",
    b"5\r\nhello\r\n0\r\n" + b"a: b\r\n" * 500 + b"\r\n",
]


@pytest.mark.parametrize("chunks", CHUNKS, ids=[repr(chunks[:25]) for chunks in CHUNKS])
async def test_chunks_that_lie_are_refused(chunks: bytes, tmp_path: Path) -> None:
    async with wired(recording=tmp_path / "calls.jsonl") as wire:
        wire.send(wire.head("Transfer-Encoding: chunked"), chunks, wire.ask("smuggled"))
        status, headers, body = await wire.answer()
        assert (status, headers["connection"]) == (400, "close")
        assert DIALECTS["chat"].parse_error(400, json.loads(body))[1] == "invalid_request"
        assert await wire.rest() == b""
        assert wire.session.meter.turns == 0
        assert [call.outcome for call in reader.read(tmp_path).calls] == ["error"]


async def test_chunks_of_every_cut_arrive_whole() -> None:
    asked: list[Request] = []

    async def remember(request: Request) -> Turn:
        asked.append(request)
        return HELLO

    middle = SIZE // 2
    chunked = b"%x;ext=1\r\n%b\r\n%X\r\n%b\r\n0\r\nTrailer: 1\r\n\r\n" % (
        *(middle, BODY[:middle]),
        *(SIZE - middle, BODY[middle:]),
    )
    async with wired(remember) as wire:
        whole = wire.head("Transfer-Encoding: Chunked") + chunked
        for cut in range(1, len(whole), 5):
            wire.send(whole[:cut])
            await wire.writer.drain()
            await asyncio.sleep(0)
            wire.send(whole[cut:])
            assert (await wire.answer())[0] == 200
        for byte in whole:
            wire.send(bytes([byte]))
            await asyncio.sleep(0)
        assert (await wire.answer())[0] == 200
    assert {request.messages[0].text for request in asked} == {"hi"}


async def test_requests_in_one_go_are_answered_in_order() -> None:
    async def echo(request: Request) -> str:
        return f"<{request.messages[0].text}>"

    async with wired(echo) as wire:
        wire.send(b"".join(wire.ask(str(number), stream=number % 2 == 0) for number in range(5)) + b"\r\n")
        wire.send(wire.head(method="HEAD", path="/"), wire.ask("last"))
        for number in range(5):
            status, _, body = await wire.answer()
            assert (status, b"<%d>" % number in body) == (200, True)
        head = await asyncio.wait_for(wire.reader.readuntil(b"\r\n\r\n"), LIMIT)
        assert head.startswith(b"HTTP/1.1 200")
        assert b"Content-Length: 2\r\n" in head
        assert b"<last>" in (await wire.answer())[2]


async def test_requests_that_pile_up_on_a_connection_are_refused() -> None:
    async with wired() as wire:
        wire.send(wire.head(method="GET", path="/v1/models") * 300)
        statuses = [(await wire.answer())[0]]
        while statuses[-1] == 200:
            statuses.append((await wire.answer())[0])
        assert len(statuses) > 100 and statuses[-1] == 429
        assert await wire.rest() == b""


async def test_a_flood_behind_a_call_waits_outside() -> None:
    go_on, asked = asyncio.Event(), asyncio.Event()

    async def slow(request: Request) -> Turn:
        asked.set()
        await go_on.wait()
        return HELLO

    async with wired(slow) as wire:
        wire.send(wire.ask())
        await asked.wait()
        flood = wire.ask("x" * 1_000_000)
        wire.writer.transport.set_write_buffer_limits(high=0)
        for _ in range(20):
            wire.send(flood)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(wire.writer.drain(), 0.3)
        go_on.set()
        for _ in range(21):
            assert (await wire.answer())[0] == 200


async def test_who_asks_on_and_never_reads_is_not_answered_on() -> None:
    async def answer(request: HttpRequest) -> None:
        nonlocal answered
        answered += 1
        request.reply(200, [], b"x" * 1_000_000)

    answered, loop = 0, asyncio.get_running_loop()
    server = Server(answer, lambda status, message: b"")
    listening = await loop.create_server(server, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*listening.sockets[0].getsockname(), limit=2**16)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 100)
    async with asyncio.timeout(LIMIT):
        while not any(connection.full for connection in server.connections):
            await asyncio.sleep(0.01)
        for _ in range(1000):
            await asyncio.sleep(0)
        assert answered < 100
        for _ in range(100):
            await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(1_000_000)
    assert answered == 100
    writer.close()
    listening.close()
    await server.shutdown(1)


async def test_connections_past_the_limit_are_turned_away() -> None:
    async def answer(request: HttpRequest) -> None:
        request.reply(200, [], b"hi")

    server = Server(answer, lambda status, message: message.encode(), most=2)
    listening = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    address = listening.sockets[0].getsockname()
    async with asyncio.timeout(LIMIT):
        kept = []
        for _ in range(2):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await reader.readuntil(b"hi")).startswith(b"HTTP/1.1 200")
            kept.append(writer)
        reader, writer = await asyncio.open_connection(*address)
        told = await reader.read()
        assert told.startswith(b"HTTP/1.1 503") and told.endswith(b"there are more than 2 connections")
        writer.close()
        kept.pop().close()
        while len(server.connections) > 1:
            await asyncio.sleep(0.01)
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        for each in (writer, *kept):
            each.close()
    listening.close()
    await server.shutdown(1)


async def test_an_old_client_gets_its_stream_without_chunks() -> None:
    async with wired() as wire:
        body = json.dumps(request_body("chat", stream=True)).encode()
        wire.send(wire.head(f"Content-Length: {len(body)}", version="1.0"), body)
        status, headers, raw = await wire.answer()
        assert (status, headers["connection"]) == (200, "close")
        assert "transfer-encoding" not in headers
        assert raw.startswith(b"data: {")
        assert raw.endswith(b"data: [DONE]\n\n")


async def test_heads_have_a_limit() -> None:
    for fields in ([f"X: {'y' * 70_000}"], [f"X-{number}: y" for number in range(300)]):
        async with wired() as wire:
            wire.send(wire.head(*fields, method="GET", path="/v1/models"))
            assert (await wire.answer())[0] == 431
            assert await wire.rest() == b""


@pytest.mark.parametrize("client", ["chat", "responses", "anthropic", "gemini"])
async def test_coded_bodies_are_read_or_refused_in_the_dialect(client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caller_module, "MAX_BODY", 1_000_000)
    body = json.dumps(request_body(client)).encode()
    bomb = json.dumps(request_body(client, "x" * 2_000_000)).encode()
    cases = [
        ("gzip", gzip.compress(body), 200),
        ("gzip", gzip.compress(bomb), 413),
        ("gzip", gzip.compress(body)[:-9], 415),
        ("gzip", gzip.compress(body) + gzip.compress(b"more"), 415),
        ("gzip", body, 415),
        ("zstd", body, 415),
    ]
    for coding, data, expected in cases:
        async with wired() as wire:
            wire.send(
                wire.head(f"Content-Encoding: {coding}", f"Content-Length: {len(data)}", path=PATHS[client]), data
            )
            status, _, raw = await wire.answer()
            assert status == expected
            if status != 200:
                assert DIALECTS[client].parse_error(status, json.loads(raw))[0]


@pytest.mark.parametrize("client", ["chat", "responses", "anthropic", "gemini"])
async def test_chunks_without_end_are_too_large(client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caller_module, "MAX_BODY", 1_000_000)
    async with wired() as wire:
        wire.send(wire.head("Transfer-Encoding: chunked", path=PATHS[client]))
        for _ in range(30):
            wire.send(b"%x\r\n%b\r\n" % (100_000, b"x" * 100_000))
        status, _, raw = await wire.answer()
        assert status == 413
        assert DIALECTS[client].parse_error(413, json.loads(raw))[1] == "too_large"


async def test_expectations_are_met_or_refused() -> None:
    async with wired() as wire:
        wire.send(wire.head("Content-Length: 5", "Expect: the-unexpected"))
        assert (await wire.answer())[0] == 417
    async with wired() as wire:
        wire.send(wire.head(f"Content-Length: {2**40}", "Expect: 100-continue"))
        assert (await wire.answer())[0] == 413
    async with wired() as wire:
        wire.send(wire.head(f"Content-Length: {SIZE}", "Expect: 100-continue"), BODY)
        assert (await wire.answer())[0] == 200


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_ends_the_generation(half: bool, stream: bool, tmp_path: Path) -> None:
    never = asyncio.Event()

    async def hang(request: object, raw: bytes) -> object:
        if stream:
            return await streams(b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n', wait=never)(request, raw)  # type: ignore[arg-type]
        return await never.wait()

    async with fake_provider(hang) as fake, wired(fake.provider(), recording=tmp_path / "calls.jsonl") as wire:  # type: ignore[arg-type]
        wire.send(wire.ask(stream=stream))
        while not fake.asked:
            await asyncio.sleep(0.01)
        if stream:
            await asyncio.wait_for(wire.reader.readuntil(b'"a"'), LIMIT)
        if half:
            wire.writer.write_eof()
        else:
            wire.writer.transport.abort()
        await asyncio.wait_for(fake.cancelled.wait(), LIMIT)
        while [call.outcome for call in reader.read(tmp_path).generations()] != ["cancelled"]:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("part", [0, 40, -10])
async def test_a_client_that_leaves_in_the_middle_asks_nothing(part: int) -> None:
    async with wired() as wire:
        whole = wire.ask()
        wire.send(whole[:part] if part else whole[: whole.index(b"\r\n\r\n") + 4])
        await wire.writer.drain()
        wire.writer.write_eof()
        assert await wire.rest() == b""
        assert wire.session.meter.turns == 0


async def test_a_dead_key_closes_the_connection_that_used_it() -> None:
    async with wired() as wire:
        wire.send(wire.ask())
        assert (await wire.answer())[0] == 200
        await wire.session.close()
        wire.send(wire.ask())
        status, headers, _ = await wire.answer()
        assert (status, headers["connection"]) == (401, "close")
        assert await wire.rest() == b""


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (b"", b""),
        (b"GET / HT", b"HTTP/1.1 408"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nabc", b"HTTP/1.1 408"),
    ],
)
async def test_who_takes_too_long_is_given_up(sent: bytes, expected: bytes) -> None:
    async def handle(request: HttpRequest) -> None:
        try:
            await request.read(100, lambda size: None)
        except BadMessage as error:
            request.reply(error.status, [], b"{}")

    server = Server(handle, lambda status, message: b"{}", idle=0.05, slow=0.05, stalled=0.05)
    listening = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*listening.sockets[0].getsockname())
    writer.write(sent)
    assert (await asyncio.wait_for(reader.read(), LIMIT))[: len(expected)] == expected
    writer.close()
    listening.close()
    await server.shutdown(1)


async def test_absolute_addresses_and_odd_methods_find_their_way() -> None:
    async with wired() as wire:
        none = "Content-Length: 0"
        wire.send(wire.head(method="GET", path="http://elsewhere/v1/models?x=1"))
        assert (await wire.answer())[0] == 200
        for method, path in (("CONNECT", "example.org:443"), ("OPTIONS", "*"), ("TRACE", "/")):
            wire.send(wire.head(none, method=method, path=path))
            status, _, raw = await wire.answer()
            assert (status, bool(json.loads(raw)["error"])) == (404, True)
        wire.send(wire.head(method="GET ", path="/v1/models"))
        assert (await wire.answer())[0] == 200
        wire.send(wire.head(none, method="BREW", path="/pot"))
        status, headers, raw = await wire.answer()
        assert (status, headers["connection"], bool(json.loads(raw)["error"])) == (400, "close", True)
        assert await wire.rest() == b""
