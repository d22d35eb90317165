"""A running sandbox that another process may reach: over a unix socket in the sandbox's own directory.

`pier sandbox run` serves its sandbox, and `list`, `exec` and `stop` find it. The socket is only for the user that
started it, and goes with the directory. `pier.frames` has the protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pier.errors import ArgumentError, PierError, UsageError
from pier.files import write_json
from pier.frames import (
    ERROR,
    EXIT,
    LARGEST,
    REQUEST,
    RESIZE,
    SIGNAL,
    STDERR,
    STDIN,
    STDIN_END,
    STDOUT,
    TAKEN,
    WINDOW,
    dial,
    listen,
    pack,
)
from pier.home import pier_home
from pier.sandbox.contract import Process, Result, Sandbox

INFO = "info.json"


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
    writer.write(pack(kind, payload))
    await writer.drain()


async def receive(reader: asyncio.StreamReader) -> tuple[bytes, bytes] | None:
    """The next frame, or None at the end."""
    try:
        head = await reader.readexactly(5)
        size = struct.unpack("!I", head[1:])[0]
        return (head[:1], await reader.readexactly(size)) if size <= LARGEST else None
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


@asynccontextmanager
async def serving(sandbox: Sandbox, running: Running, stop: Callable[[], None]) -> AsyncIterator[None]:
    """Let other processes of this user run commands in `sandbox`, and ask for its end (`stop`)."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await _answer(sandbox, reader, writer, stop)
        except PierError as error:
            with contextlib.suppress(ConnectionError):
                fields = {"message": error.message, "code": error.code, "blame": error.blame}
                await send(writer, ERROR, json.dumps(fields).encode())
        finally:
            writer.close()

    server = await asyncio.start_unix_server(answer, sock=listen(str(running.directory)))
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
        result = await attend(process, reader, writer, request.get("size"))
        await send(writer, EXIT, json.dumps({"exit_code": result.exit_code}).encode())


def _parsed(payload: bytes) -> dict[str, Any]:
    try:
        request = json.loads(payload)
    except (ValueError, RecursionError):
        request = None
    if not isinstance(request, dict):
        raise ArgumentError("invalid request: expected a JSON object")
    return request


async def attend(
    process: Process,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    size: tuple[int, int] | None,
    on_resize: Callable[[int, int], None] | None = None,
) -> Result:
    """Pass on what a client sends to its command until that ends; when the client is gone, so is the command. `size` is
    that of the client's terminal. Input that the command does not read yet holds up nothing else."""
    unread: asyncio.Queue[bytes | None] = asyncio.Queue(WINDOW + 1)

    async def type_() -> None:
        while (data := await unread.get()) is not None:
            await process.write(data)
            writer.write(pack(TAKEN))
        await process.close_stdin()

    async def feed() -> None:
        while (frame := await receive(reader)) is not None:
            kind, payload = frame
            if kind in (STDIN, STDIN_END):
                await unread.put(payload if kind == STDIN else None)
            elif kind == SIGNAL and len(payload) == 1:
                with contextlib.suppress(PierError):  # an unknown signal
                    await process.signal(payload[0])
            elif kind == RESIZE and len(payload) == 4:
                rows, columns = struct.unpack("!HH", payload)
                with contextlib.suppress(PierError):
                    await process.resize(rows, columns)
                if on_resize is not None:
                    on_resize(rows, columns)
        await process.kill()

    if size is not None:
        await process.resize(*size)
    tasks = [asyncio.create_task(work()) for work in (type_, feed)]
    try:
        return await process.wait()
    finally:
        for task in tasks:
            task.cancel()


def list_running() -> list[Running]:
    """All sandboxes that are being served now, oldest first."""
    found: list[Running] = []
    for path in sorted((pier_home() / "sandboxes").glob(f"*/{INFO}")):
        with contextlib.suppress(OSError, ValueError, TypeError):
            data = json.loads(path.read_text())
            one = Running(**(data | {"directory": path.parent}))
            dial(str(path.parent)).close()
            found.append(one)
    return sorted(found, key=lambda one: one.started)


def find_running(wanted: str) -> Running:
    """The sandbox with this name, or whose id begins so."""
    every = list_running()
    named = [one for one in every if one.name == wanted]
    found = named or [one for one in every if one.id.startswith(wanted)]
    if len(found) == 1:
        return found[0]
    problem = "is not unique" if found else "does not run"
    raise UsageError(f"the sandbox {wanted!r} {problem}", hint="pier sandbox list", code="no_such_sandbox")
