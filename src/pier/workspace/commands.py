"""One `pier exec` on the supervisor's side: passes the command's streams on, and keeps those of an agent."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from pier.errors import WorkspaceError
from pier.redact import Redactor
from pier.sandbox import remote
from pier.sandbox.contract import Process
from pier.workspace.agents import recognise
from pier.workspace.client import SIGNAL
from pier.workspace.live import CommandOrder, LiveWorkspace
from pier.workspace.terminal import CastWriter
from pier.workspace.workspace import CAST, WorkspaceSession

_NOT_FOUND = 127


def order_of(request: Mapping[str, Any]) -> CommandOrder:
    """The command that a request wants run."""
    argv = tuple(map(str, request.get("argv") or ()))
    if not argv:
        raise WorkspaceError("a command is needed", hint="pier exec bash", code="no-command")
    env = {str(name): str(value) for name, value in (request.get("env") or {}).items()}
    return CommandOrder(argv, str(request.get("cwd") or ""), env, bool(request.get("tty")))


async def run_command(
    live: LiveWorkspace, request: Mapping[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> dict[str, Any]:
    """Run a command for a client; when the client goes, so does the command."""
    order = order_of(request)
    rows, columns = request.get("size") or (24, 80)
    agent = recognise(order.argv[0])
    async with live.session(agent, order) as recorded:
        cast = _cast(recorded.kept, rows, columns, order, live.redactor)

        async def hand_on(stream: str, data: bytes) -> None:
            if cast is not None:
                cast.output(data if order.tty else data.replace(b"\n", b"\r\n"))
            with contextlib.suppress(ConnectionError):
                await remote.send(writer, remote.STDOUT if stream == "stdout" else remote.STDERR, data)

        code: int | None = None
        try:
            process = await live.spawn(order, recorded.endpoint, hand_on)
            async with process:
                if order.tty:
                    await process.resize(rows, columns)
                feeding = asyncio.create_task(_feed(process, reader, cast))
                try:
                    code = (await process.wait()).exit_code
                finally:
                    feeding.cancel()
        finally:
            if cast is not None:
                cast.close()
            _finish(recorded.kept, code)
    await live.adopt()
    missing = code == _NOT_FOUND and agent is not None and live.find(agent) is None
    notes = [f"cannot keep the terminal: {cast.fault}"] if cast is not None and cast.fault else []
    return {"exit_code": code, "missing": agent if missing else None, "notes": notes}


def _cast(
    kept: WorkspaceSession | None, rows: int, columns: int, order: CommandOrder, redactor: Redactor
) -> CastWriter | None:
    if kept is None:
        return None
    env = {"TERM": order.env.get("TERM", ""), "SHELL": "/bin/sh"}
    return CastWriter(kept.directory / CAST, rows, columns, env, redactor)


def _finish(kept: WorkspaceSession | None, code: int | None) -> None:
    if kept is not None:
        kept.info.ended_at = datetime.now(UTC)
        kept.info.exit_code = code
        with contextlib.suppress(OSError):
            kept.write()


async def _feed(process: Process, reader: asyncio.StreamReader, cast: CastWriter | None) -> None:
    """Pass on what the client sends; when it is gone, so is the command."""
    while (frame := await remote.receive(reader)) is not None:
        kind, payload = frame
        if kind == remote.STDIN:
            await process.write(payload)
        elif kind == remote.STDIN_END:
            await process.close_stdin()
        elif kind == remote.RESIZE and len(payload) == 4:
            rows, columns = struct.unpack("!HH", payload)
            await process.resize(rows, columns)
            if cast is not None:
                cast.resize(rows, columns)
        elif kind == SIGNAL and len(payload) == 1:
            await process.signal(payload[0])
    await process.kill()
