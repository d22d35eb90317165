"""Port forwarding: each connection to a port on this machine's loopback is forwarded to a port of the sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from pier.errors import SandboxError, UsageError, WorkspaceError
from pier.sandbox.contract import Process, Sandbox

_CHUNK = 1 << 16
_RELAY = """\
for tool in nc socat python3; do command -v $tool >/dev/null && break; done
case $tool in
nc) exec nc 127.0.0.1 "$1" ;;
socat) exec socat - "TCP:127.0.0.1:$1" ;;
esac
exec python3 -c 'import os, socket, sys, threading
peer = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
def send():
    while data := os.read(0, 65536): peer.sendall(data)
    peer.shutdown(socket.SHUT_WR)
threading.Thread(target=send, daemon=True).start()
while data := peer.recv(65536): os.write(1, data)
' "$1"
"""
"""A script that connects stdin and stdout to a port, with a tool from the image."""


def parse_port(text: str) -> tuple[int, int]:
    """Parse `PORT` or `HOST_PORT:PORT` into the port on this machine and the port in the sandbox."""
    outer, colon, inner = text.partition(":")
    try:
        found = int(outer), int(inner if colon else outer)
    except ValueError:
        found = (0, 0)
    if not all(0 < port < 65536 for port in found):
        raise UsageError(f"invalid value {text!r} for --ports: expected PORT or HOST_PORT:PORT", code="port")
    return found


def add_ports(present: Sequence[str], added: Sequence[str]) -> list[str]:
    """Add mappings; a new one replaces those with the same port on either side."""
    found = list(present)
    for text in added:
        outer, inner = parse_port(text)
        found = [old for old in found if parse_port(old)[0] != outer and parse_port(old)[1] != inner]
        found.append(text)
    return found


def check_free(ports: Sequence[str], held: Sequence[str] = ()) -> None:
    """Refuse ports of this machine that are in use. `held` are the mappings that the workspace serves already."""
    own = {parse_port(text)[0] for text in held}
    for outer, inner in map(parse_port, ports):
        if outer in own:
            continue
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", outer))
                probe.listen()
            except OSError as error:
                raise _taken(outer, inner, error) from error


def _taken(outer: int, inner: int, error: OSError) -> WorkspaceError:
    return WorkspaceError(
        f"cannot listen on port {outer} of this machine: {error.strerror or error}",
        hint=f"stop what uses it, or choose another: --ports {outer + 1}:{inner}",
        code="port-taken",
    )


@asynccontextmanager
async def forward_ports(sandbox: Sandbox, ports: Sequence[str]) -> AsyncIterator[None]:
    """Serve the ports for the duration of the context."""
    async with AsyncExitStack() as stack:
        for outer, inner in map(parse_port, ports):
            try:
                server = await asyncio.start_server(partial(_serve, sandbox, inner), "127.0.0.1", outer)
            except OSError as error:
                raise _taken(outer, inner, error) from error
            stack.callback(server.close)
        yield


async def _serve(sandbox: Sandbox, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        inside = await asyncio.open_connection(sock=await sandbox.dial(port))
    except SandboxError as error:
        if error.code == "cannot_dial":
            with contextlib.suppress(OSError, SandboxError):
                await _relay(sandbox, port, reader, writer)
        writer.transport.abort()
        return
    except OSError:
        writer.transport.abort()
        return
    try:
        await asyncio.gather(_pump(reader, inside[1]), _pump(inside[0], writer))
    finally:
        inside[1].close()
        writer.close()


async def _relay(sandbox: Sandbox, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Forward a connection through the streams of a program in the sandbox, for backends that cannot dial a port."""

    async def receive(stream: str, data: bytes) -> None:
        if stream == "stdout":
            writer.write(data)
            await writer.drain()

    async def send(process: Process) -> None:
        while data := await reader.read(_CHUNK):
            await process.write(data)
        await process.close_stdin()

    command = ["/bin/sh", "-c", _RELAY, "sh", str(port)]
    async with await sandbox.spawn(command, cwd="/", stdin=True, on_output=receive) as process:
        sending = asyncio.create_task(send(process))
        try:
            await process.wait()
        finally:
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await sending


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
