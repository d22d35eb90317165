"""Ports of the sandbox on this machine's loopback: each connection there becomes one to the same port inside."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from pier.errors import SandboxError, UsageError, WorkspaceError
from pier.sandbox.contract import Sandbox

_CHUNK = 1 << 16


def parse_port(text: str) -> tuple[int, int]:
    """`PORT` or `HOST_PORT:PORT` as the port on this machine and the one inside."""
    outer, colon, inner = text.partition(":")
    try:
        found = int(outer), int(inner if colon else outer)
    except ValueError:
        found = (0, 0)
    if not all(0 < port < 65536 for port in found):
        raise UsageError(f"invalid value {text!r} for --ports: expected PORT or HOST_PORT:PORT", code="port")
    return found


@asynccontextmanager
async def forward_ports(sandbox: Sandbox, ports: Sequence[str]) -> AsyncIterator[None]:
    """Serve the ports while the context lasts."""
    async with AsyncExitStack() as stack:
        for outer, inner in map(parse_port, ports):
            try:
                server = await asyncio.start_server(partial(_serve, sandbox, inner), "127.0.0.1", outer)
            except OSError as error:
                raise WorkspaceError(
                    f"cannot listen on port {outer} of this machine: {error.strerror or error}",
                    hint=f"stop what uses it, or choose another: --ports {outer + 1}:{inner}",
                    code="port-taken",
                ) from error
            stack.callback(server.close)
        yield


async def _serve(sandbox: Sandbox, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        inside = await asyncio.open_connection(sock=await sandbox.dial(port))
    except (OSError, SandboxError):
        writer.transport.abort()
        return
    try:
        await asyncio.gather(_pump(reader, inside[1]), _pump(inside[0], writer))
    finally:
        inside[1].close()
        writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
