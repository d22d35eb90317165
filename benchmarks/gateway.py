"""What the gateway adds to a model call: latency, throughput, time to the first streamed byte, memory of sessions.

A fake provider, the gateway and each peer run in processes of their own; the load comes from this one over raw
sockets, so that the client is no part of what is measured. The baseline is the same load sent to the provider directly.
nginx as a plain reverse proxy joins when it is installed. Prints a table, and JSON with `--json`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SMALL = {"id": "c", "object": "chat.completion", "created": 1, "model": "m"}
ANSWER = json.dumps(
    {
        **SMALL,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello."}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12},
    }
).encode()
EVENT = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
EVENTS = 100


async def provide(port: int) -> None:
    """The fake provider: answers at once, streams `EVENTS` events without a pause."""
    piece = {**EVENT, "choices": [{"index": 0, "delta": {"content": "token "}, "finish_reason": None}]}
    last = {**EVENT, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    chunks = [f"data: {json.dumps(piece)}\n\n".encode()] * EVENTS + [
        f"data: {json.dumps(last)}\n\ndata: [DONE]\n\n".encode()
    ]
    framed = [b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks]
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(ANSWER)
    stream = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                headers = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(headers.split(b"content-length:")[1].split(b"\r\n")[0])
                body = await reader.readexactly(length)
                if b'"stream": true' in body[:200] or b'"stream":true' in body:
                    writer.write(stream)
                    for chunk in framed:
                        writer.write(chunk)
                        await asyncio.sleep(0)
                    writer.write(b"0\r\n\r\n")
                else:
                    writer.write(head + ANSWER)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", port, limit=2**22)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def serve_gateway(upstream: str, folder: str, sessions: int) -> None:
    """Our side: one session with a recording, and as many idle ones as asked for."""
    from pier.gateway import Gateway, Provider

    async with Gateway() as gateway:
        provider = Provider("bench", upstream, ("chat",))
        session = gateway.session("m", upstream=provider, recording=Path(folder) / "calls.jsonl")
        url = await gateway.serve()
        before = _resident(os.getpid())
        for number in range(sessions):
            gateway.session("m", upstream=provider, recording=Path(folder) / f"{number}.jsonl")
        each = (_resident(os.getpid()) - before) / max(1, sessions)
        print(url.rpartition(":")[2], session.key, int(each), flush=True)
        await asyncio.Event().wait()


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


@dataclass(frozen=True, slots=True)
class Place:
    """Somewhere to send load to."""

    name: str
    port: int
    key: str
    pid: int

    def request(self, size: int, stream: bool) -> bytes:
        messages = (
            [{"role": "user", "content": "x" * 1000} for _ in range(max(1, size // 1000))]
            if size
            else [{"role": "user", "content": "hi"}]
        )
        body = json.dumps({"model": "m", "stream": stream, "messages": messages}).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {self.key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


@asynccontextmanager
async def connected(place: Place) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", place.port, limit=2**22)
    try:
        yield reader, writer
    finally:
        writer.close()


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> tuple[float, float]:
    """Seconds to the first byte of the body, and to its end."""
    began = time.perf_counter()
    writer.write(request)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    assert head.startswith(b"http/1.1 200"), head
    if b"content-length:" in head:
        await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0]))
        done = time.perf_counter() - began
        return done, done
    first = None
    while size := int(await reader.readuntil(b"\r\n"), 16):
        first = first or time.perf_counter() - began
        await reader.readexactly(size + 2)
    await reader.readuntil(b"\r\n")
    return first or 0.0, time.perf_counter() - began


async def measure(
    place: Place, *, size: int = 0, stream: bool = False, count: int, parallel: int = 1
) -> dict[str, Any]:
    request = place.request(size, stream)
    firsts: list[float] = []
    wholes: list[float] = []

    async def worker(number: int) -> None:
        async with connected(place) as (reader, writer):
            for _ in range(number):
                first, whole = await ask(reader, writer, request)
                firsts.append(first)
                wholes.append(whole)

    await worker(max(3, count // 20))
    firsts.clear()
    wholes.clear()
    began, cpu = time.perf_counter(), _cpu(place.pid)
    await asyncio.gather(*(worker(count // parallel) for _ in range(parallel)))
    seconds = time.perf_counter() - began
    ordered = sorted(wholes)
    return {
        "place": place.name,
        "p50_ms": statistics.median(wholes) * 1e3,
        "p99_ms": ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1e3,
        "first_p50_ms": statistics.median(firsts) * 1e3,
        "per_second": len(wholes) / seconds,
        "cpu_ms_each": (_cpu(place.pid) - cpu) / len(wholes) * 1e3,
        "rss_mb": _resident(place.pid) / 2**20,
    }


CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("small body, one connection", {"count": 2000}),
    ("200 kB body, one connection", {"count": 400, "size": 200_000}),
    (f"stream of {EVENTS} events", {"count": 200, "stream": True}),
    ("small body, 32 connections", {"count": 3200, "parallel": 32}),
    ("200 streams at once", {"count": 400, "parallel": 200, "stream": True}),
)


@contextmanager
def places(folder: str) -> Iterator[list[Place]]:
    with running(sys.executable, __file__, "--provide") as provider:
        assert provider.stdout
        port = int(provider.stdout.readline())
        upstream = f"http://127.0.0.1:{port}"
        with running(sys.executable, __file__, "--serve", upstream, folder) as gateway:
            assert gateway.stdout
            own, key, _ = gateway.stdout.readline().split()
            found = [Place("direct", port, "k", provider.pid), Place("pier", int(own), key, gateway.pid)]
            with nginx(port, folder) as proxy:
                yield [*found, *([proxy] if proxy else [])]


@contextmanager
def nginx(port: int, folder: str) -> Iterator[Place | None]:
    if shutil.which("nginx") is None:
        yield None
        return
    own = 20_000 + os.getpid() % 20_000
    config = Path(folder) / "nginx.conf"
    config.write_text(
        f"daemon off; master_process off; pid {folder}/nginx.pid; error_log /dev/null; events {{}}\n"
        f"http {{ access_log off; client_max_body_size 64m; client_body_temp_path {folder}/body;\n"
        f"proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/w;\n"
        f"scgi_temp_path {folder}/s; upstream u {{ server 127.0.0.1:{port}; keepalive 64; }}\n"
        f"server {{ listen 127.0.0.1:{own}; keepalive_requests 1000000; location / {{ proxy_pass http://u;\n"
        "proxy_http_version 1.1; proxy_set_header Connection ''; proxy_buffering off; } } }\n"
    )
    with running("nginx", "-e", "/dev/null", "-c", str(config), "-p", folder) as process:
        yield Place("nginx", own, "k", process.pid) if _listens(own) else None


def _listens(port: int) -> bool:
    """Whether something listens there, within ten seconds."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return True
        time.sleep(0.1)
    print(f"nothing listens on port {port}: left out", file=sys.stderr)
    return False


def idle_sessions(folder: str, count: int) -> int:
    """Bytes that an idle session takes."""
    with running(
        sys.executable, __file__, "--serve", "http://127.0.0.1:9", folder, "--sessions", str(count)
    ) as process:
        assert process.stdout
        return int(process.stdout.readline().split()[2])


async def run(as_json: bool) -> None:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        each = idle_sessions(folder, 1000)
        with places(folder) as found:
            for name, options in CASES:
                rows += [{"case": name, **await measure(place, **options)} for place in found]
    if as_json:
        print(json.dumps({"rows": rows, "idle_session_bytes": each}, indent=2))
        return
    print(f"{'':30} {'':8} {'p50 ms':>8} {'p99 ms':>8} {'first':>8} {'req/s':>8} {'cpu ms':>7} {'MB':>6}")
    for row in rows:
        print(
            f"{row['case']:30} {row['place']:8} {row['p50_ms']:8.2f} {row['p99_ms']:8.2f} {row['first_p50_ms']:8.2f} "
            f"{row['per_second']:8.0f} {row['cpu_ms_each']:7.2f} {row['rss_mb']:6.0f}"
        )
    print(f"an idle session takes {each / 1000:.1f} kB (of 1000)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--provide", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--sessions", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.provide:
        asyncio.run(provide(0))
    elif args.serve:
        upstream, folder = args.serve
        asyncio.run(serve_gateway(upstream, folder, args.sessions))
    else:
        asyncio.run(run(args.json))


if __name__ == "__main__":
    main()
