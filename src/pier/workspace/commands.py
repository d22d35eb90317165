"""Runs commands in a workspace, in the supervisor: forwards their streams and records the terminals of agents.

A terminal is recorded as an asciinema cast (version 2): output and resizes with their times, no input.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import json
import os
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pier import frames
from pier.beneath import write_all
from pier.redact import Redactor, StreamRedactor
from pier.sandbox import remote
from pier.sandbox.contract import Stream
from pier.trial.record import OutputFile
from pier.workspace.agents import recognise
from pier.workspace.live import CommandOrder, LiveWorkspace
from pier.workspace.workspace import CAST

LIMIT = 64 * 1024 * 1024
"""Maximum size of the output in a terminal recording."""


class CastWriter:
    """Appends to a cast while the terminal is used. A write error, kept in `fault`, ends the cast but not the
    command."""

    def __init__(self, path: Path, size: tuple[int, int], term: str, redactor: Redactor) -> None:
        self.fault: OSError | None = None
        self._begun = time.monotonic()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._redactor = StreamRedactor(redactor) if redactor else None
        self._left = LIMIT
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        head = {"version": 2, "width": size[1], "height": size[0], "timestamp": int(time.time())}
        self._append(json.dumps({**head, "env": {"TERM": term, "SHELL": "/bin/sh"}}))

    def output(self, data: bytes) -> None:
        """Add output of the command."""
        self._event("o", self._decoder.decode(self._redactor.feed(data) if self._redactor else data))

    def resize(self, rows: int, columns: int) -> None:
        """Add a resize of the terminal."""
        self._event("r", f"{columns}x{rows}")

    def close(self) -> None:
        if self._redactor is not None:
            self._event("o", self._decoder.decode(self._redactor.close()))
        os.close(self._fd)

    def _event(self, kind: str, text: str) -> None:
        if text and self._left > 0:
            self._left -= len(text)
            self._append(json.dumps([round(time.monotonic() - self._begun, 6), kind, text], ensure_ascii=False))

    def _append(self, line: str) -> None:
        if self.fault is None:
            try:
                write_all(self._fd, line.encode(errors="replace") + b"\n")
            except OSError as error:
                self.fault = error


_NOT_FOUND = 127


async def run_command(
    live: LiveWorkspace, request: Mapping[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> dict[str, Any]:
    """Run a command for a client, until either ends. Its output goes to the client, or to the log named by the
    request."""
    order = CommandOrder(
        tuple(request["argv"]), str(request.get("cwd") or ""), request.get("env") or {}, bool(request.get("tty"))
    )
    size: tuple[int, int] = request.get("size") or (24, 80)
    log = request.get("log")
    async with live.session(order) as (kept, endpoint):
        with OutputFile(Path(log) if log else None, live.redactor) as logged:
            cast = CastWriter(kept.directory / CAST, size, order.env.get("TERM", ""), live.redactor) if kept else None

            async def forward(stream: Stream, data: bytes) -> None:
                if cast is not None:
                    cast.output(data if order.tty else data.replace(b"\n", b"\r\n"))
                if log:
                    logged(stream, data)
                    return
                with contextlib.suppress(ConnectionError):
                    await remote.send(writer, frames.STDOUT if stream == "stdout" else frames.STDERR, data)

            code: int | None = None
            try:
                process = await live.spawn(order, endpoint, forward)
                if log and process.has_begun:
                    writer.write(frames.pack(frames.STDOUT, b"started\n"))
                on_resize = cast.resize if cast is not None else None
                async with process:
                    result = await remote.attend(process, reader, writer, size if order.tty else None, on_resize)
                    code = result.exit_code
            finally:
                if cast is not None:
                    cast.close()
                if kept is not None:
                    kept.info.ended_at, kept.info.exit_code = datetime.now(UTC), code
                    with contextlib.suppress(OSError):
                        kept.write()
    await live.adopt()
    agent = recognise(order.argv[0])
    missing = code == _NOT_FOUND and agent not in live.workspace.config.agents
    notes = [f"cannot record the terminal: {cast.fault}"] if cast is not None and cast.fault else []
    return {"exit_code": code, "missing": agent if missing else None, "notes": notes}
