"""Streams that come in bursts: they go on as they came, their last event only when the turn is recorded, and what is
cut between two reads is looked at as a whole."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pier.gateway import Gateway, Provider
from pier.record import reader
from tests.fault.test_gateway_wire import DONE, KEY, SERVE, STREAM, chunked


def event(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return b"data: " + json.dumps({"id": "c", "choices": [choice]}).encode() + b"\n\n"


MANY = [event(f"word {number} ") for number in range(100)]
END = [event("", "stop"), DONE]


@asynccontextmanager
async def provider(*parts: bytes) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """Answers every request with the first part at once, and with the others when it is told to go on."""
    go_on = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
                for number, part in enumerate(parts):
                    if number:
                        await go_on.wait()
                    writer.write(part)
                    await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", go_on


class Agent:
    """Asks for a stream, and reads it chunk by chunk as it comes."""

    def __init__(self, url: str, key: str) -> None:
        self._port, self._key = int(url.rpartition(":")[2]), key

    async def __aenter__(self) -> Agent:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, limit=2**22)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def ask(self) -> None:
        body = json.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}]}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {self._key}\r\n"
        self._writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert (await self._reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")

    async def chunk(self) -> bytes:
        size = int(await asyncio.wait_for(self._reader.readuntil(b"\r\n"), 60), 16)
        return (await self._reader.readexactly(size + 2))[:-2]

    async def rest(self) -> bytes:
        found = b""
        while part := await self.chunk():
            found += part
        return found


@pytest.mark.parametrize("usage", [False, True])
async def test_a_burst_goes_on_as_it_came(usage: bool, tmp_path: Path) -> None:
    async with provider(STREAM + chunked(*MANY, *END)) as (url, _), Gateway() as gateway:
        upstream = Provider("fake", url, ("chat",), usage=usage)
        session = gateway.session("m", upstream=upstream, recording=tmp_path / "calls.jsonl")
        async with Agent(await gateway.serve(), session.key) as agent:
            for _ in range(2):
                await agent.ask()
                assert await agent.rest() == b"".join(MANY + END)
    for call in reader.read(tmp_path).generations():
        assert call.outcome == "ok"
        assert call.answer
        assert call.answer.body == b"".join(MANY + END)
        assert len(call.answer.events()) == len(MANY + END)


async def test_a_burst_goes_on_before_more_comes_and_a_key_in_two_reads_does_not(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    echo = event(f"<{KEY}>")
    cut = echo.index(KEY.encode()) + len(KEY) // 2
    first, second = b"".join(MANY) + echo[:cut], echo[cut:] + b"".join(MANY + END)
    framed = chunked(first, second)
    border = framed.index(second)
    async with provider(STREAM + framed[:border], framed[border:]) as (url, go_on), Gateway() as gateway:
        session = gateway.session("m", upstream=Provider("fake", url, ("chat",), key=KEY), recording=path)
        async with Agent(await gateway.serve(), session.key) as agent:
            await agent.ask()
            came = b""
            while len(came) < len(b"".join(MANY)):
                came += await agent.chunk()
            assert came == b"".join(MANY)
            go_on.set()
            assert await agent.rest() == event("<[redacted]>") + b"".join(MANY + END)
    assert KEY not in path.read_text()
    assert KEY[: len(KEY) // 2] not in path.read_text()


@pytest.mark.parametrize("wrong", [b"data: {\n\n", b'data: {"choices": [{"delta": {"content": "a"b"}}]}\n\n'])
async def test_what_is_no_json_in_a_burst_is_not_delivered(wrong: bytes, tmp_path: Path) -> None:
    burst = STREAM + chunked(*MANY[:50], wrong, *MANY[50:], *END)
    async with provider(burst) as (url, _), Gateway() as gateway:
        upstream = Provider("fake", url, ("chat",))
        session = gateway.session("m", upstream=upstream, recording=tmp_path / "calls.jsonl")
        async with Agent(await gateway.serve(), session.key) as agent:
            await agent.ask()
            came = await agent.rest()
    good = b"".join(MANY[:50])
    assert came.startswith(good)
    assert b"not JSON" in came[len(good) :]
    assert wrong not in came
    assert [call.outcome for call in reader.read(tmp_path).generations()] == ["error"]


@pytest.mark.parametrize("ends", [True, False])
async def test_a_gateway_killed_at_a_burst_has_recorded_what_was_delivered_to_its_end(
    ends: bool, tmp_path: Path
) -> None:
    path = tmp_path / "calls.jsonl"
    whole = chunked(*MANY, *END)
    parts = (STREAM + whole,) if ends else (STREAM + whole[: len(whole) // 2], whole[len(whole) // 2 :])
    async with provider(*parts) as (url, _):
        command = [sys.executable, "-c", SERVE, url, path]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            try:
                assert child.stdout
                async with Agent(*child.stdout.readline().split()) as agent:
                    await agent.ask()
                    came = await agent.chunk()
                    while ends and not came.endswith(DONE):
                        came += await agent.chunk()
                    os.kill(child.pid, signal.SIGKILL)
            finally:
                child.kill()
    calls = reader.read(path).generations()
    assert [call.outcome for call in calls] == ["ok" if ends else "interrupted"]
    assert calls[0].request["messages"] == [{"role": "user", "content": "hi"}]
    if ends:
        assert calls[0].answer
        assert calls[0].answer.body == came == b"".join(MANY + END)
