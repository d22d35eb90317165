"""What one agent can make the gateway hold in memory: measured in a process of its own, against what it held before."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.redteam import route

pytestmark = pytest.mark.plain

MOST = 640
"""Megabytes that one session may add to a gateway, its copies of a request for a moment included."""
GATEWAY = """
import asyncio, resource, sys
from pathlib import Path
from pier.gateway import Gateway
from pier.wire.turn import Text, Turn, Usage

async def answer(request):
    await asyncio.sleep(0.05)
    return Turn((Text("hello"),), "end", Usage(1, 1))

def used():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

async def main():
    async with Gateway() as gateway:
        session = gateway.session("m", upstream=answer, recording=Path(sys.argv[1]))
        print(await gateway.serve(session=session), session.key, used(), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        print(used(), flush=True)

asyncio.run(main())
"""


class Measured:
    """A gateway in another process, its session, and what that took, in megabytes."""

    def __init__(self, url: str, key: str) -> None:
        self.url, self.key = f"{url}/v1/chat/completions", key
        self.added = 0

    async def post(self, body: bytes) -> int:
        headers = {"Authorization": f"Bearer {self.key}"}
        async with aiohttp.ClientSession() as http, http.post(self.url, data=body, headers=headers) as answer:
            await answer.read()
            return answer.status


@asynccontextmanager
async def measured(recording: Path) -> AsyncIterator[Measured]:
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", GATEWAY, recording, stdin=pipe, stdout=pipe)
    assert child.stdin and child.stdout
    url, key, before = (await child.stdout.readline()).decode().split()
    found = Measured(url, key)
    try:
        yield found
        child.stdin.close()
        found.added = int(await child.stdout.readline()) - int(before)
        assert await child.wait() == 0
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


def body(*messages: Any) -> bytes:
    said = [{"role": "user", "content": message} for message in messages]
    return json.dumps({"model": "m", "messages": said}, ensure_ascii=False).encode()


def many_values() -> Iterator[bytes]:
    for number in range(6):
        yield b'{"model":"m","x":%d,"messages":[%b]}' % (number, b",".join([b"{}"] * 490_000))


def large_texts() -> Iterator[bytes]:
    for number in range(8):
        yield body(f"\N{PILE OF POO}{number}" + "x" * (14 << 20))


def many_conversations() -> Iterator[bytes]:
    for number in range(10):
        yield body(str(number), *["x"] * 10_000)


def many_messages() -> Iterator[bytes]:
    for number in range(8):
        yield body(*map(str, range(number * 15_000, (number + 1) * 15_000)))


@route(
    "host",
    "an agent fills pier's memory: large requests at once, millions of values, ever new messages or conversations",
    "one session adds less than 640 MB to the gateway; its large requests wait for one another",
)
@pytest.mark.parametrize("bodies", [many_values, large_texts, many_conversations, many_messages])
async def test_a_session_takes_a_bounded_amount_of_memory(bodies: Any, tmp_path: Path) -> None:
    async with measured(tmp_path / "recording.jsonl") as gateway:
        asked = await asyncio.gather(*(gateway.post(each) for each in bodies()))
    assert set(asked) == {400 if bodies is many_values else 200}, "they wait for one another"
    assert gateway.added < MOST, gateway.added
