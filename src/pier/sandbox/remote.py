"""A running sandbox that another process may reach: over a unix socket in the sandbox's own directory.

`pier sandbox run` serves its sandbox, and `list`, `exec` and `stop` find it. The socket is only for the user that
started it, and goes with the directory. Frames are one byte of kind, four of length, and the payload.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pier.errors import ArgumentError, PierError, SandboxError, UsageError
from pier.files import write_json
from pier.home import pier_home
from pier.sandbox.contract import Process, Sandbox

SOCKET, INFO = "control.sock", "info.json"
REQUEST, STDIN, STDIN_END, RESIZE, STDOUT, STDERR, EXIT, ERROR = b"Q", b"i", b"c", b"w", b"o", b"e", b"x", b"!"
_LARGEST = 8 << 20


@dataclass(frozen=True, slots=True)
class Running:
    """A sandbox that is being served."""

    id: str
    name: str
    image: str
    pid: int
    started: float
    command: list[str] = field(default_factory=list)
    directory: Path = field(default_factory=Path)


async def send(writer: asyncio.StreamWriter, kind: bytes, payload: bytes = b"") -> None:
    """Send one frame."""
    writer.write(kind + struct.pack("!I", len(payload)) + payload)
    await writer.drain()


async def receive(reader: asyncio.StreamReader) -> tuple[bytes, bytes] | None:
    """The next frame, or None at the end."""
    try:
        head = await reader.readexactly(5)
        size = struct.unpack("!I", head[1:])[0]
        return (head[:1], await reader.readexactly(size)) if size <= _LARGEST else None
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


@contextlib.contextmanager
def _near(directory: Path) -> Iterator[str]:
    """A short path to a directory, since the name of a unix socket has room for a hundred bytes."""
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


@asynccontextmanager
async def serving(sandbox: Sandbox, running: Running, stop: Callable[[], None]) -> AsyncIterator[None]:
    """Let other processes of this user run commands in `sandbox`, and ask for its end (`stop`)."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await _answer(sandbox, reader, writer, stop)
        except PierError as error:
            with contextlib.suppress(ConnectionError):
                told = {"message": error.message, "code": error.code, "blame": error.blame}
                await send(writer, ERROR, json.dumps(told).encode())
        finally:
            writer.close()

    server = await asyncio.start_unix_server(answer, sock=bind(running.directory))
    write_json(running.directory / INFO, {**asdict(running), "directory": str(running.directory)}, durable=False)
    try:
        yield
    finally:
        server.close()


async def _answer(
    sandbox: Sandbox, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, stop: Callable[[], None]
) -> None:
    frame = await receive(reader)
    if frame is None or frame[0] != REQUEST:
        return
    request = _parsed(frame[1])
    if request.get("op") == "stop":
        stop()
        await send(writer, EXIT, b"{}")
        return

    async def hand_on(stream: str, data: bytes) -> None:
        await send(writer, STDOUT if stream == "stdout" else STDERR, data)

    process = await sandbox.spawn(
        request.get("argv", ()),
        cwd=request.get("cwd"),
        env=request.get("env"),
        user=request.get("user"),
        tty=request.get("tty", False),
        stdin=request.get("stdin", False),
        on_output=hand_on,
    )
    async with process:
        feeding = asyncio.create_task(_feed(process, reader))
        try:
            result = await process.wait()
        finally:
            feeding.cancel()
        await send(writer, EXIT, json.dumps({"exit_code": result.exit_code}).encode())


def _parsed(payload: bytes) -> dict[str, Any]:
    try:
        request = json.loads(payload)
    except (ValueError, RecursionError):
        request = None
    if not isinstance(request, dict):
        raise ArgumentError("invalid request: expected a JSON object")
    return request


async def _feed(process: Process, reader: asyncio.StreamReader) -> None:
    """Pass on what the other side says; when it is gone, so is the command."""
    while (frame := await receive(reader)) is not None:
        kind, payload = frame
        if kind == STDIN:
            await process.write(payload)
        elif kind == STDIN_END:
            await process.close_stdin()
        elif kind == RESIZE and len(payload) == 4:
            await process.resize(*struct.unpack("!HH", payload))
    await process.kill()


def list_running() -> list[Running]:
    """All sandboxes that are being served now, oldest first."""
    found: list[Running] = []
    for path in sorted((pier_home() / "sandboxes").glob(f"*/{INFO}")):
        with contextlib.suppress(OSError, ValueError, TypeError):
            data = json.loads(path.read_text())
            one = Running(**(data | {"directory": path.parent}))
            dial_control(path.parent).close()
            found.append(one)
    return sorted(found, key=lambda one: one.started)


def bind(directory: Path) -> socket.socket:
    """The control socket in a directory that only this user may enter; one that is left over is replaced."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    (directory / SOCKET).unlink(missing_ok=True)
    with _near(directory) as near:
        sock.bind(f"{near}/{SOCKET}")
    (directory / SOCKET).chmod(0o600)
    return sock


def dial_control(directory: Path) -> socket.socket:
    """A connection to the control socket in a directory; OSError if no process serves it."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        with _near(directory) as near:
            sock.connect(f"{near}/{SOCKET}")
    except OSError:
        sock.close()
        raise
    return sock


def find_running(wanted: str) -> Running:
    """The sandbox with this name, or whose id begins so."""
    every = list_running()
    named = [one for one in every if one.name == wanted]
    found = named or [one for one in every if one.id.startswith(wanted)]
    if len(found) == 1:
        return found[0]
    problem = "is not unique" if found else "does not run"
    raise UsageError(f"the sandbox {wanted!r} {problem}", hint="pier sandbox list", code="no_such_sandbox")


async def connect(running: Running) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a connection to a sandbox that another process serves."""
    try:
        return await asyncio.open_unix_connection(sock=dial_control(running.directory))
    except OSError as error:
        raise SandboxError(f"the sandbox {running.id} is gone", code="sandbox_gone") from error
