"""In front of an engine's socket: passes every request on, but for those that ask for BuildKit, which it refuses in the
words of an engine that has none."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REFUSAL = json.dumps({"message": "buildkit is not supported by daemon"}).encode()
_CHUNK = 1 << 16


@contextmanager
def without_buildkit(socket: Path, place: Path) -> Iterator[str]:
    """The address of an engine that is the one at `socket` with its older builder only."""
    path = place / "classic.sock"
    ready, loop = threading.Event(), asyncio.new_event_loop()
    ended = asyncio.Event()

    async def serve() -> None:
        async with await asyncio.start_unix_server(lambda reader, writer: _serve(reader, writer, socket), path):
            ready.set()
            await ended.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        ready.wait(60)
        yield f"unix://{path}"
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(60)
        loop.close()


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, socket: Path) -> None:
    """One request a connection, so that each is looked at."""
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        head = await reader.readuntil(b"\r\n\r\n")
        line, _, rest = head.partition(b"\r\n")
        if b"/build?" in line and b"version=2" in line:
            await _read_whole(reader, rest)
            writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nConnection: close\r\n")
            writer.write(b"Content-Length: %d\r\n\r\n%s" % (len(REFUSAL), REFUSAL))
            await writer.drain()
        else:
            far_reader, far_writer = await asyncio.open_unix_connection(socket)
            far_writer.write(line + b"\r\nConnection: close\r\n" + rest)
            upward = asyncio.create_task(_pass(reader, far_writer))
            await _pass(far_reader, writer)
            upward.cancel()
            far_writer.close()
    writer.close()


async def _read_whole(reader: asyncio.StreamReader, head: bytes) -> None:
    """Take in a request's body, as engines do before they say no: who closes earlier breaks what is still sent."""
    fields = head.lower()
    if b"transfer-encoding: chunked" in fields:
        while size := int(await reader.readuntil(b"\r\n"), 16):
            await reader.readexactly(size + 2)
        await reader.readuntil(b"\r\n")
    elif b"content-length:" in fields:
        await reader.readexactly(int(fields.split(b"content-length:")[1].split(b"\r\n")[0]))


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
