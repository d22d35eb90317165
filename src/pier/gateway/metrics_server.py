"""Serves a gateway's metrics at a separate address, which no session uses.

`GET /metrics` is Prometheus text, `GET /metrics.json` the same as JSON. There are no other routes, and nothing can be
changed here. A unix socket is for its owner only.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from pier.errors import UsageError
from pier.gateway.http.server import Handle, Request, Server
from pier.gateway.metrics import Metrics


@asynccontextmanager
async def metrics_served(metrics: Metrics, address: str) -> AsyncIterator[str]:
    """Serve at `address`, HOST:PORT or the path of a unix socket, while the context lasts; gives where that is."""
    server = Server(_answers(metrics), lambda status, message: json.dumps({"error": message}).encode())
    listening, where = await _listen(server, address)
    sampling = asyncio.create_task(metrics.sample_lag())
    try:
        yield where
    finally:
        sampling.cancel()
        listening.close()
        await server.shutdown(1)
        if "/" in address:
            Path(address).unlink(missing_ok=True)
        await asyncio.wait({sampling})


async def _listen(server: Server, address: str) -> tuple[asyncio.Server, str]:
    loop = asyncio.get_running_loop()
    if "/" in address:
        return await loop.create_unix_server(server, sock=private_socket(Path(address))), address
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(
            f"invalid address {address!r} for metrics", hint="give HOST:PORT, or the path of a unix socket"
        )
    listening = await loop.create_server(server, host.strip("[]"), int(port))
    return listening, f"http://{host}:{listening.sockets[0].getsockname()[1]}/metrics"


def private_socket(path: Path) -> socket.socket:
    """A unix socket at `path` that only its owner could open at any moment; one without a listener is replaced.
    `OSError` if it has one, or if another kind of file is there."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        if path.is_socket() and not _answers_at(path):
            path.unlink()
        os.fchmod(made.fileno(), 0o600)
        made.bind(str(path))
    except BaseException:
        made.close()
        raise
    return made


def _answers_at(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as asking:
        try:
            asking.connect(str(path))
        except ConnectionRefusedError:
            return False
    return True


async def fetch(address: str, path: str) -> str:
    """The answer of a gateway at `address` for `path`; `UsageError` if there is none."""
    try:
        host, _, port = address.removeprefix("http://").partition("/")[0].rpartition(":")
        opening = asyncio.open_unix_connection(address) if "/" in address and "://" not in address else None
        reader, writer = await (opening or asyncio.open_connection(host.strip("[]"), int(port)))
        writer.write(f"GET {path} HTTP/1.1\r\nHost: pier\r\nConnection: close\r\n\r\n".encode())
        data = await asyncio.wait_for(reader.read(-1), 30)
        writer.close()
    except (OSError, ValueError, TimeoutError) as error:
        raise UsageError(
            f"no gateway tells its numbers at {address}: {error}", hint="pier gateway serve --metrics HOST:PORT"
        ) from None
    head, _, body = data.partition(b"\r\n\r\n")
    if b" 200 " not in head.partition(b"\r\n")[0]:
        raise UsageError(f"{address} is not where a gateway tells its numbers", hint="pier gateway serve --metrics")
    return body.decode().rstrip("\n") + "\n"


def _answers(metrics: Metrics) -> Handle:
    async def answer(request: Request) -> None:
        if request.method not in ("GET", "HEAD"):
            return request.reply(405, [("Allow", "GET, HEAD")], b"")
        if request.path == "/metrics":
            kind = "text/plain; version=0.0.4; charset=utf-8"
            return request.reply(200, [("Content-Type", kind)], metrics.text().encode())
        if request.path == "/metrics.json":
            body = json.dumps(metrics.snapshot(), indent=2).encode()
            return request.reply(200, [("Content-Type", "application/json")], body)
        return request.reply(404, [("Content-Type", "application/json")], b'{"error": "look at /metrics"}')

    return answer
