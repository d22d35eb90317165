"""Providers whose HTTP is odd or broken, and a gateway that is killed: nothing is lost or believed by mistake."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pier.gateway import Gateway, Provider, pool
from pier.gateway.budget import Retry
from pier.record import reader
from tests.gateway_fakes import HELLO as TURN
from tests.gateway_fakes import PATHS, fake_provider, post, request_body, says, streams

QUICK = Retry(first=0.01, longest=0.02)
KEY = "sk-canary-of-the-provider"
ANSWER = json.dumps({"choices": [{"index": 0, "message": {"role": "assistant", "content": "hello"}}]}).encode()
EVENTS = b"".join(
    b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
    for choice in ({"index": 0, "delta": {"content": "hello"}}, {"index": 0, "delta": {}, "finish_reason": "stop"})
)
DONE = b"data: [DONE]\n\n"
JSON = b"Content-Type: application/json\r\n"
SSE = b"Content-Type: text/event-stream\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\n" + JSON + b"Transfer-Encoding: chunked\r\n\r\n"
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


WHOLE = b"HTTP/1.1 200 OK\r\n" + JSON + b"Content-Length: %d\r\n\r\n" % len(ANSWER) + ANSWER


@dataclass
class RawProvider:
    """Sends the same bytes to every request, all at once or byte by byte, and counts."""

    says: bytes = WHOLE
    close: bool = False
    drip: bool = False
    url: str = ""
    connections: int = 0
    heads: list[bytes] = field(default_factory=list)
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.append(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.heads.append(head)
                await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
                for piece in [self.says[at : at + 1] for at in range(len(self.says))] if self.drip else [self.says]:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                if self.close:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()


@asynccontextmanager
async def raw_provider(
    made: RawProvider | None = None, tls: ssl.SSLContext | None = None, **facts: object
) -> AsyncIterator[RawProvider]:
    raw = made or RawProvider(**facts)  # type: ignore[arg-type]
    server = await asyncio.start_server(raw.serve, "127.0.0.1", 0, ssl=tls)
    scheme, host = ("https", "localhost") if tls else ("http", "127.0.0.1")
    raw.url = f"{scheme}://{host}:{server.sockets[0].getsockname()[1]}"
    try:
        yield raw
    finally:
        server.close()
        for writer in raw.writers:
            writer.close()


async def ask(raw: RawProvider, folder: Path, *, stream: bool = False, times: int = 1) -> list[tuple[int, bytes]]:
    async with Gateway(retry=QUICK) as gateway:
        url = await gateway.serve()
        provider = Provider("raw", raw.url, ("chat",), key=KEY, usage=False)
        session = gateway.session("named-by-agent", upstream=provider, recording=folder / "calls.jsonl")
        answers = []
        for _ in range(times):
            status, _, body = await post(url, PATHS["chat"], session.key, request_body("chat", stream=stream))
            answers.append((status, body))
        return answers


ZIPPED = gzip.compress(ANSWER)
GOOD = {
    "interim answers": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + WHOLE,
    "no reason": WHOLE.replace(b"200 OK", b"200"),
    "chunks": CHUNKED + chunked(ANSWER[:7], ANSWER[7:]),
    "extensions and trailers": CHUNKED + b"%x;a=b\r\n%b\r\n0\r\nX: y\r\n\r\n" % (len(ANSWER), ANSWER),
    "gzip though not asked for": CHUNKED.replace(JSON, JSON + b"Content-Encoding: gzip\r\n")
    + chunked(ZIPPED[:9], ZIPPED[9:]),
    "bare line feeds": WHOLE.replace(b"\r\n", b"\n"),
    "a folded header": WHOLE.replace(b"\r\nContent-Length", b"\r\nX: a\r\n b\r\nContent-Length"),
    "bytes in a header": WHOLE.replace(b"\r\nContent-Length", b"\r\nX-Name: \xff\xc3\xa9\r\nContent-Length"),
}


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("drip", [False, True])
async def test_odd_answers_are_read(name: str, drip: bool, tmp_path: Path) -> None:
    async with raw_provider(says=GOOD[name], drip=drip) as raw:
        assert await ask(raw, tmp_path, times=3) == [(200, ANSWER)] * 3
        assert raw.connections == 1
    assert [call.outcome for call in reader.read(tmp_path).generations()] == ["ok"] * 3


@pytest.mark.parametrize("drip", [False, True])
async def test_a_key_that_is_echoed_goes_no_further(drip: bool, tmp_path: Path) -> None:
    echo = EVENTS.replace(b"hello", KEY.encode()) + DONE
    async with raw_provider(says=STREAM + chunked(echo[:-70], echo[-70:]), drip=drip) as raw:
        answers = await ask(raw, tmp_path, stream=True)
        assert KEY.encode() in raw.heads[0]
    assert answers == [(200, EVENTS.replace(b"hello", b"[redacted]") + DONE)]
    assert KEY not in (tmp_path / "calls.jsonl").read_text()
    assert [call.outcome for call in reader.read(tmp_path).generations()] == ["ok"]


async def test_an_answer_may_end_with_its_connection(tmp_path: Path) -> None:
    for says_, stream in (
        (b"HTTP/1.1 200 OK\r\n" + JSON + b"\r\n" + ANSWER, False),
        (b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + EVENTS + DONE, True),
    ):
        async with raw_provider(says=says_, close=True) as raw:
            answers = await ask(raw, tmp_path, times=2, stream=stream)
            assert answers == [(200, EVENTS + DONE if stream else ANSWER)] * 2
            assert raw.connections == 2


async def test_a_connection_is_used_again_only_if_that_is_safe(tmp_path: Path) -> None:
    async with raw_provider(says=WHOLE.replace(b"\r\nContent", b"\r\nConnection: close\r\nContent", 1)) as raw:
        assert await ask(raw, tmp_path, times=3) == [(200, ANSWER)] * 3
        assert raw.connections == 3
    twice = b"\r\nConnection: keep-alive\r\nConnection: close\r\nContent"
    async with raw_provider(says=WHOLE.replace(b"\r\nContent", twice, 1)) as raw:
        assert await ask(raw, tmp_path, times=3) == [(200, ANSWER)] * 3
        assert raw.connections == 3
    async with raw_provider(says=WHOLE + b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\npoisoned") as raw:
        assert await ask(raw, tmp_path, times=3) == [(200, ANSWER)] * 3
        assert raw.connections == 3
    async with raw_provider(close=True) as raw:
        answers = await ask(raw, tmp_path, times=3)
        assert answers == [(200, ANSWER)] * 3


@dataclass
class Fickle(RawProvider):
    """Answers on each connection once, and closes it when the next request has come."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.append(writer)
        for answer in (self.says, b""):
            head = await reader.readuntil(b"\r\n\r\n")
            self.heads.append(head)
            await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
            writer.write(answer)
        writer.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_kept_connection_that_the_provider_gave_up_costs_no_call(stream: bool, tmp_path: Path) -> None:
    says_ = STREAM + chunked(EVENTS + DONE) if stream else WHOLE
    async with raw_provider(Fickle(says_)) as raw, Gateway(retry=Retry(attempts=1)) as gateway:
        url = await gateway.serve()
        provider = Provider("raw", raw.url, ("chat",), key=KEY, usage=False)
        session = gateway.session("named-by-agent", upstream=provider, recording=tmp_path / "calls.jsonl")
        for _ in range(3):
            status, _, body = await post(url, PATHS["chat"], session.key, request_body("chat", stream=stream))
            assert (status, body) == (200, EVENTS + DONE if stream else ANSWER)
        assert raw.connections == 3 and len(raw.heads) == 5
        calls = reader.read(tmp_path).generations()
        assert [[attempt.wait for attempt in call.attempts] for call in calls] == [[None], [0, None], [0, None]]
        assert session.meter.turns == 3


async def test_a_new_connection_that_breaks_is_a_fault(tmp_path: Path) -> None:
    """Only a connection that had served before is replaced beyond the attempts that are allowed, and the last request,
    which is asked again without the agent's headers."""
    async with raw_provider(says=b"", close=True) as raw, Gateway(retry=Retry(attempts=1)) as gateway:
        url = await gateway.serve()
        session = gateway.session("m", upstream=Provider("raw", raw.url, ("chat",)))
        assert (await post(url, PATHS["chat"], session.key, request_body("chat")))[0] == 502
        assert raw.connections == 2 and [b"aiohttp" in head for head in raw.heads] == [True, False]


async def test_connections_that_nobody_uses_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "KEPT", 0.2)
    async with raw_provider() as raw, Gateway() as gateway:
        url = await gateway.serve()
        session = gateway.session("m", upstream=Provider("raw", raw.url, ("chat",)))
        await asyncio.gather(*(post(url, PATHS["chat"], session.key, request_body("chat")) for _ in range(3)))
        await asyncio.wait_for(asyncio.gather(*(writer.wait_closed() for writer in raw.writers)), 60)


async def test_connections_to_providers_end_with_the_gateway() -> None:
    async with raw_provider() as raw:
        async with Gateway() as gateway:
            url = await gateway.serve()
            session = gateway.session("m", upstream=Provider("raw", raw.url, ("chat",)))
            await post(url, PATHS["chat"], session.key, request_body("chat"))
            (writer,) = raw.writers
            assert not writer.is_closing()
        await asyncio.wait_for(writer.wait_closed(), 60)


BAD = {
    "no HTTP": b"SSH-2.0-OpenSSH_9.0\r\n\r\n",
    "length and chunks": WHOLE.replace(b"\r\nContent-Length", b"\r\nTransfer-Encoding: chunked\r\nContent-Length"),
    "two lengths": WHOLE.replace(b"\r\nContent-Length", b"\r\nContent-Length: 1\r\nContent-Length"),
    "a head without end": b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000,
    "an unknown coding": WHOLE.replace(b"\r\nContent-Length", b"\r\nContent-Encoding: br\r\nContent-Length"),
}


@pytest.mark.parametrize("name", BAD)
async def test_broken_heads_are_a_clean_failure(name: str, tmp_path: Path) -> None:
    async with raw_provider(says=BAD[name]) as raw:
        ((status, body),) = await ask(raw, tmp_path)
        assert (status, json.loads(body)["error"]["message"] != "") == (502, True)
    (call,) = reader.read(tmp_path).generations()
    assert (call.outcome, len(call.attempts)) == ("error", 1)


CUT = {
    "a chunk that lies": STREAM + b"%x\r\n%b\r\n" % (len(EVENTS) - 3, EVENTS),
    "an early end": STREAM + b"%x\r\n%b" % (len(EVENTS) + 99, EVENTS),
    "no last chunk": STREAM + chunked(EVENTS[:40])[:-5],
    "a length that lies": b"HTTP/1.1 200 OK\r\n" + SSE + b"Content-Length: 9999\r\n\r\n" + EVENTS[:40],
}


@pytest.mark.parametrize("name", CUT)
async def test_broken_bodies_end_in_an_error_once(name: str, tmp_path: Path) -> None:
    async with raw_provider(says=CUT[name], close=True) as raw:
        ((status, body),) = await ask(raw, tmp_path, stream=True)
        assert status == (502 if name == "a chunk that lies" else 200)
        assert b'"error"' in body
        assert raw.connections == 1
    (call,) = reader.read(tmp_path).generations()
    assert call.outcome == "error"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    subprocess.run(
        [*command, "-keyout", path, "-out", path.with_suffix(".crt"), "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost"],
        check=True, capture_output=True,
    )  # fmt: skip
    return path


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl, which makes the certificate, is not installed")
async def test_tls_is_checked(certificate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate.with_suffix(".crt"), certificate)
    async with raw_provider(tls=context, says=STREAM + chunked(EVENTS, DONE)) as raw:
        ((status, body),) = await ask(raw, tmp_path / "unknown", stream=True)
        assert (status, b"certificate" in body.lower()) == (502, True)
        assert raw.heads == []
        assert [len(call.attempts) for call in reader.read(tmp_path / "unknown").generations()] == [1]
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate.with_suffix(".crt")))
        assert await ask(raw, tmp_path / "known", stream=True, times=2) == [(200, EVENTS + DONE)] * 2
        assert len(raw.heads) == 2
        raw.url = raw.url.replace("localhost", "127.0.0.1")
        ((status, _),) = await ask(raw, tmp_path / "other", stream=True)
        assert status == 502


async def test_a_proxy_of_the_environment_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with raw_provider() as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        far = RawProvider(url="http://model.invalid:8000/v1")
        assert await ask(far, tmp_path, times=2) == [(200, ANSWER)] * 2
        assert proxy.heads[0].startswith(b"POST http://model.invalid:8000/v1/chat/completions HTTP/1.1\r\n")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        async with raw_provider() as near:
            assert await ask(near, tmp_path, times=1) == [(200, ANSWER)]
            assert len(near.heads) == 1


@asynccontextmanager
async def tunnels() -> AsyncIterator[tuple[str, list[bytes]]]:
    """A proxy that connects to wherever it is asked to: its address, and the heads of the requests."""
    heads: list[bytes] = []

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            sink.write(data)
        sink.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        host, port = heads[-1].split()[1].decode().split(":")
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", heads
    finally:
        server.close()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl, which makes the certificate, is not installed")
async def test_tls_goes_through_a_proxy_with_a_password(
    certificate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate.with_suffix(".crt"), certificate)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate.with_suffix(".crt")))
    async with raw_provider(tls=context) as raw, tunnels() as (proxy, heads):
        monkeypatch.setenv("https_proxy", f"http://user:secret@{proxy}")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        assert await ask(raw, tmp_path, times=2) == [(200, ANSWER)] * 2
        assert [head.split(b" ")[0] for head in heads] == [b"CONNECT"]
        assert b"proxy-authorization: basic dxnlcjpzzwnyzxq=" in heads[0].lower()
        assert all(b"proxy-authorization" not in head.lower() for head in raw.heads)


async def test_five_hundred_streams_at_once(tmp_path: Path) -> None:
    go_on, count = asyncio.Event(), 500
    events = [b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'] * 3
    async with raw_provider() as raw:

        async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            raw.writers.append(writer)
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
            writer.write(STREAM + chunked(*events)[:-5])
            raw.connections += 1
            await go_on.wait()
            writer.write(chunked(EVENTS, DONE))

        server = await asyncio.start_server(slow, "127.0.0.1", 0, backlog=1024)
        async with Gateway() as gateway:
            port = int((await gateway.serve()).rpartition(":")[2])
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            provider = Provider("raw", url, ("chat",), usage=False)
            sessions = [
                gateway.session("m", upstream=provider, recording=tmp_path / f"{number}.jsonl") for number in range(10)
            ]

            async def talk(number: int) -> bytes:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                body = json.dumps(request_body("chat", stream=True)).encode()
                head = f"POST {PATHS['chat']} HTTP/1.1\r\nHost: x\r\nx-api-key: {sessions[number % 10].key}\r\n"
                writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
                raw_answer = await asyncio.wait_for(reader.read(), 240)
                writer.close()
                return raw_answer

            talks = [asyncio.create_task(talk(number)) for number in range(count)]
            while raw.connections < count:
                await asyncio.sleep(0.05)
            go_on.set()
            for answer in await asyncio.gather(*talks):
                assert answer.startswith(b"HTTP/1.1 200")
                assert answer.endswith(DONE + b"\r\n0\r\n\r\n")
        server.close()
    calls = [call for number in range(10) for call in reader.read(tmp_path / f"{number}.jsonl").generations()]
    assert [call.outcome for call in calls] == ["ok"] * count


@pytest.mark.parametrize("stream", [True, False])
async def test_bodies_of_two_megabytes_pass_in_parallel(stream: bool, tmp_path: Path) -> None:
    async with fake_provider(says(TURN)) as fake, Gateway() as gateway:
        url = await gateway.serve()
        session = gateway.session("named-by-agent", upstream=fake.provider(usage=False), recording=tmp_path / "c.jsonl")
        bodies = [request_body("chat", f"{number}" * 2_000_000, stream=stream) for number in range(8)]
        answers = await asyncio.gather(*(post(url, PATHS["chat"], session.key, body) for body in bodies))
        assert [status for status, _, _ in answers] == [200] * 8
        assert {len(asked.body) for asked in fake.asked} == {len(json.dumps(bodies[0]))}
        await session.close()
        assert len(reader.read(tmp_path / "c.jsonl").generations()) == 8


SERVE = """
import asyncio, sys
from pathlib import Path
from pier.gateway import Gateway, Provider, pool

async def main():
    async with Gateway() as gateway:
        provider = Provider("fake", sys.argv[1], ("chat",), usage=False)
        session = gateway.session("m", upstream=provider, recording=Path(sys.argv[2]))
        print(await gateway.serve(), session.key, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("stream", [True, False])
async def test_a_gateway_that_is_killed_loses_no_turn_that_was_delivered(stream: bool, tmp_path: Path) -> None:
    never, path = asyncio.Event(), tmp_path / "calls.jsonl"
    async with fake_provider(says(TURN)) as fake:
        with subprocess.Popen(
            [sys.executable, "-c", SERVE, fake.url, path], stdout=subprocess.PIPE, text=True
        ) as child:
            try:
                assert child.stdout
                url, key = child.stdout.readline().split()
                body = request_body("chat", stream=stream)
                for _ in range(3):
                    assert (await post(url, PATHS["chat"], key, body))[0] == 200
                fake.then = [streams(b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n', wait=never)]
                open_call = asyncio.create_task(post(url, PATHS["chat"], key, {**body, "stream": True}))
                while len(fake.asked) < 4 or len(reader.read(path).generations()) < 4:
                    await asyncio.sleep(0.01)
                fake.then = []
                status, _, last = await post(url, PATHS["chat"], key, body)
                os.kill(child.pid, signal.SIGKILL)
            finally:
                child.kill()
        await asyncio.wait({open_call})
        assert status == 200
        calls = reader.read(path).generations()
        assert [call.outcome for call in calls] == ["ok", "ok", "ok", "interrupted", "ok"]
        assert calls[-1].answer
        assert calls[-1].answer.body == last
        assert open_call.exception()
