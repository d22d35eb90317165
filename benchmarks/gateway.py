"""What the gateway adds to a model call: latency, throughput, time to the first streamed byte, memory of sessions.

A fake provider, the gateway and each peer run in processes of their own; the load comes from this one over raw
sockets, so that the client is no part of what is measured. The baseline is the same load sent to the provider directly.
nginx as a plain reverse proxy joins when it is installed; with `--peers` also the interception server of verifiers and
LiteLLM's proxy. All take turns, `--rounds` times, and the best round of each counts, since a machine is rarely quiet.
Prints a table, and JSON with `--json`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from gateway_peers import Place, litellm, nginx, running, verifiers

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
ONE_BY_ONE = "one by one"
"""Asks for a write for each event."""


async def provide(port: int) -> None:
    """The fake provider: answers at once. `EVENTS` events come in one burst, each a chunk of its own; or, if the
    request says so, in a write for each, which takes the provider itself a millisecond."""
    piece = {**EVENT, "choices": [{"index": 0, "delta": {"content": "token "}, "finish_reason": None}]}
    last = {**EVENT, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    chunks = [f"data: {json.dumps(piece)}\n\n".encode()] * EVENTS + [
        f"data: {json.dumps(last)}\n\ndata: [DONE]\n\n".encode()
    ]
    framed = [b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks]
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(ANSWER)
    stream = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    burst = b"".join((stream, *framed, b"0\r\n\r\n"))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                headers = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(headers.split(b"content-length:")[1].split(b"\r\n")[0])
                body = await reader.readexactly(length)
                if ONE_BY_ONE.encode() in body[:400]:
                    writer.write(stream)
                    for chunk in framed:
                        writer.write(chunk)
                        await asyncio.sleep(0)
                    writer.write(b"0\r\n\r\n")
                elif b'"stream": true' in body[:200] or b'"stream":true' in body:
                    writer.write(burst)
                else:
                    writer.write(head + ANSWER)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", port, limit=2**22, backlog=1024)
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


def request(place: Place, size: int, stream: bool, words: str = "hi") -> bytes:
    messages = (
        [{"role": "user", "content": "x" * 1000} for _ in range(max(1, size // 1000))]
        if size
        else [{"role": "user", "content": words}]
    )
    body = json.dumps({"model": "m", "stream": stream, "messages": messages}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {place.key}\r\n"
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
    place: Place, *, size: int = 0, stream: bool = False, words: str = "hi", count: int, parallel: int = 1
) -> dict[str, Any]:
    count, sent = max(parallel, int(count * place.share)), request(place, size, stream, words)
    firsts: list[float] = []
    wholes: list[float] = []

    async def worker(number: int) -> None:
        async with connected(place) as (reader, writer):
            for _ in range(number):
                first, whole = await ask(reader, writer, sent)
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
    ("small body, one connection", {"count": 1500}),
    ("small body, 16 connections", {"count": 3200, "parallel": 16}),
    ("200 kB body, one connection", {"count": 300, "size": 200_000}),
    ("200 kB body, 16 connections", {"count": 480, "size": 200_000, "parallel": 16}),
    ("2 MB body, one connection", {"count": 30, "size": 2_000_000}),
    (f"stream of {EVENTS} events", {"count": 200, "stream": True}),
    (f"{EVENTS} events one by one", {"count": 200, "stream": True, "words": ONE_BY_ONE}),
    ("200 streams at once", {"count": 400, "parallel": 200, "stream": True}),
    ("500 streams at once", {"count": 500, "parallel": 500, "stream": True}),
)


@contextmanager
def places(folder: str, peers: bool, before: str | None) -> Iterator[list[Place]]:
    with ExitStack() as stack:
        provider = stack.enter_context(running(sys.executable, __file__, "--provide"))
        assert provider.stdout
        port = int(provider.stdout.readline())
        found: list[Place | None] = [Place("direct", port, "k", provider.pid)]
        gateways: dict[str, dict[str, str]] = {"pier": {}}
        if before:
            gateways["before"] = {"PYTHONPATH": before}
        for name, variables in gateways.items():
            serve = (sys.executable, __file__, "--serve", f"http://127.0.0.1:{port}", f"{folder}/{name}")
            gateway = stack.enter_context(running(*serve, **variables))
            assert gateway.stdout
            if words := gateway.stdout.readline().split():
                found.append(Place(name, int(words[0]), words[1], gateway.pid))
        found.append(stack.enter_context(nginx(port, folder)))
        if peers:
            found += [stack.enter_context(verifiers(port)), stack.enter_context(litellm(port, folder))]
        yield [place for place in found if place]


def idle_sessions(folder: str, count: int) -> int:
    """Bytes that an idle session takes."""
    with running(
        sys.executable, __file__, "--serve", "http://127.0.0.1:9", folder, "--sessions", str(count)
    ) as process:
        assert process.stdout
        return int(process.stdout.readline().split()[2])


async def run(as_json: bool, peers: bool, rounds: int, only: str, before: str | None) -> None:
    best: dict[tuple[str, str], dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        each = idle_sessions(folder, 1000)
        with places(folder, peers, before) as found:
            for name, options in CASES:
                if only not in name:
                    continue
                for _ in range(rounds):
                    for place in found:
                        row = {"case": name, **await measure(place, **options)}
                        known = best.get((name, place.name))
                        if known is None or row["p50_ms"] < known["p50_ms"]:
                            best[name, place.name] = row
    rows = list(best.values())
    for row in rows:
        direct = best[row["case"], "direct"]
        row["added_ms"] = row["p50_ms"] - direct["p50_ms"]
        row["first_added_ms"] = row["first_p50_ms"] - direct["first_p50_ms"]
        if slow := best.get((row["case"], "verifiers")):
            row["times_verifiers"] = row["per_second"] / slow["per_second"]
    if as_json:
        print(json.dumps({"rows": rows, "idle_session_bytes": each}, indent=2))
        return
    columns = ("p50 ms", "p99 ms", "added", "first +", "req/s", "cpu ms", "MB", "x verif.")
    print(f"{'':28} {'':9} " + " ".join(f"{column:>8}" for column in columns))
    for row in rows:
        values = [row[name] for name in ("p50_ms", "p99_ms", "added_ms", "first_added_ms")]
        print(
            f"{row['case']:28} {row['place']:9} {' '.join(f'{value:8.2f}' for value in values)} "
            f"{row['per_second']:8.0f} {row['cpu_ms_each']:8.2f} {row['rss_mb']:8.0f} "
            f"{row.get('times_verifiers', float('nan')):8.1f}"
        )
    print(f"an idle session takes {each / 1000:.1f} kB (of 1000)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--peers", action="store_true", help="also verifiers and litellm (.ci/peers verifiers litellm)")
    parser.add_argument("--rounds", type=int, default=3, help="how often all take turns")
    parser.add_argument("--only", default="", help="cases with this in their name")
    parser.add_argument("--before", metavar="SRC", help="also the gateway of another source tree, e.g. ../before/src")
    parser.add_argument("--provide", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--sessions", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no peer outlives this process
    if args.provide:
        asyncio.run(provide(0))
    elif args.serve:
        upstream, folder = args.serve
        asyncio.run(serve_gateway(upstream, folder, args.sessions))
    else:
        asyncio.run(run(args.json, args.peers, args.rounds, args.only, args.before))


if __name__ == "__main__":
    main()
