"""Commands in a workspace on the supervisor's side: passes their streams on, keeps the terminals of agents, and runs
some in the background (`pier exec -d`).

A terminal is kept as an asciinema cast (version 2): output and changes of size with their times, no input. Each
command in the background has a number, a log, and a line that says how it ended.

    .pier/background/<number>/info.json     the command, when it began and how it ended
    .pier/background/<number>/output.log    what it printed
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from pier import frames
from pier.beneath import write_all
from pier.errors import WorkspaceError
from pier.files import write_json
from pier.redact import Redactor, StreamRedactor
from pier.sandbox import remote
from pier.sandbox.contract import Process
from pier.trial.record import OutputFile
from pier.workspace.agents import recognise
from pier.workspace.live import CommandOrder, LiveWorkspace
from pier.workspace.workspace import CAST, Workspace, WorkspaceSession

LIMIT = 64 * 1024 * 1024
"""How many bytes of a terminal are kept."""


class CastWriter:
    """Appends to a cast while the terminal is used. A disk that is full ends the cast, not the command: `fault` says
    why."""

    def __init__(self, path: Path, rows: int, columns: int, env: Mapping[str, str], redactor: Redactor) -> None:
        self.fault: OSError | None = None
        self._begun = time.monotonic()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._redactor = StreamRedactor(redactor) if redactor else None
        self._left = LIMIT
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        head = {"version": 2, "width": columns, "height": rows, "timestamp": int(time.time()), "env": dict(env)}
        self._append(json.dumps(head))

    def output(self, data: bytes) -> None:
        """Add what the command printed."""
        self._event("o", self._decoder.decode(self._redactor.feed(data) if self._redactor else data))

    def resize(self, rows: int, columns: int) -> None:
        """Add a change of the terminal's size."""
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
    async with live.session(order) as (kept, endpoint):
        cast = _cast(kept, rows, columns, order, live.redactor)

        async def hand_on(stream: str, data: bytes) -> None:
            if cast is not None:
                cast.output(data if order.tty else data.replace(b"\n", b"\r\n"))
            with contextlib.suppress(ConnectionError):
                await remote.send(writer, frames.STDOUT if stream == "stdout" else frames.STDERR, data)

        code: int | None = None
        try:
            process = await live.spawn(order, endpoint, hand_on)
            async with process:
                if order.tty:
                    await process.resize(rows, columns)
                feeding = asyncio.create_task(remote.feed(process, reader, writer, cast and cast.resize))
                try:
                    code = (await process.wait()).exit_code
                finally:
                    feeding.cancel()
        finally:
            if cast is not None:
                cast.close()
            _finish(kept, code)
    await live.adopt()
    agent = recognise(order.argv[0])
    missing = code == _NOT_FOUND and agent not in live.workspace.config.agents
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


LOG, INFO = "output.log", "info.json"
_CODE = "exit-code"
_GRACE = 10.0


class BackgroundCommand(BaseModel):
    """A command in the background. `exit_code` is None while it runs; `lost`: its end was not seen."""

    id: str
    command: list[str]
    started_at: datetime
    ended_at: datetime | None = None
    exit_code: int | None = None
    pid: int | None = None
    """Its process on this machine, in host mode."""
    lost: bool = False

    @property
    def state(self) -> str:
        if self.exit_code is not None:
            return f"exited {self.exit_code}"
        return "lost" if self.lost else "running"


def background_home(workspace: Workspace) -> Path:
    return workspace.pier / "background"


def new_background(workspace: Workspace, command: list[str]) -> tuple[BackgroundCommand, Path]:
    """A number and a directory for a command."""
    home = background_home(workspace)
    home.mkdir(parents=True, exist_ok=True)
    while True:
        number = 1 + max((int(path.name) for path in home.iterdir() if path.name.isdigit()), default=0)
        directory = home / str(number)
        with contextlib.suppress(FileExistsError):  # another command took the number meanwhile
            directory.mkdir()
            return BackgroundCommand(id=str(number), command=command, started_at=datetime.now(UTC)), directory


def write_info(directory: Path, info: BackgroundCommand) -> None:
    write_json(directory / INFO, info.model_dump(mode="json"), durable=False)


def read_background(workspace: Workspace, live: frozenset[str] | None = None) -> list[BackgroundCommand]:
    """All commands in the background, oldest first. `live` are those that run now; in host mode that is looked up."""
    found = []
    home = background_home(workspace)
    names = sorted((path.name for path in home.iterdir() if path.name.isdigit()), key=int) if home.is_dir() else []
    for name in names:
        try:
            info = BackgroundCommand.model_validate_json((home / name / INFO).read_bytes())
        except (OSError, ValidationError):
            continue
        if info.exit_code is None and live is None:
            with contextlib.suppress(OSError, ValueError):
                info.exit_code = int((home / name / _CODE).read_text())
        if info.exit_code is None:
            info.lost = not _is_alive(info.pid) if live is None else name not in live
        found.append(info)
    return found


def find_background(workspace: Workspace, id: str) -> Path:
    """The directory of a command in the background."""
    directory = background_home(workspace) / id
    if not id.isdigit() or not directory.is_dir():
        raise WorkspaceError(f"unknown background command {id!r}", hint="pier exec --list", code="no-command")
    return directory


def _is_alive(pid: int | None) -> bool:
    if pid is None:
        return False
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def start_on_host(workspace: Workspace, command: Sequence[str], env: Mapping[str, str]) -> str:
    """Start a command of a workspace without a sandbox in the background; its id."""
    info, directory = new_background(workspace, list(command))
    script = ["/bin/sh", "-c", f'"$@"; echo $? >"$0/{_CODE}"', str(directory), *command]
    with (directory / LOG).open("ab") as log:
        process = subprocess.Popen(
            script, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True
        )
    info.pid = process.pid
    write_info(directory, info)
    process.returncode = 0  # it is meant to outlive this process
    return info.id


def end_on_host(workspace: Workspace, id: str) -> None:
    """End a command of a workspace without a sandbox, and all that it started."""
    info = next((row for row in read_background(workspace) if row.id == id), None)
    if info is None or info.pid is None or info.state != "running":
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(info.pid, number)
        deadline = time.monotonic() + _GRACE / 2
        while time.monotonic() < deadline:
            if not _is_alive(info.pid):
                info.exit_code, info.ended_at = 128 + number, datetime.now(UTC)
                write_info(background_home(workspace) / id, info)
                return
            time.sleep(0.05)


class Background:
    """The commands in the background of one sandbox."""

    def __init__(self, live: LiveWorkspace) -> None:
        self._live = live
        self._running: dict[str, tuple[Process, asyncio.Task[None]]] = {}

    async def start(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Start a command that goes on when its client is gone."""
        order = order_of(request)
        info, directory = new_background(self._live.workspace, list(order.argv))
        write_info(directory, info)
        started: asyncio.Future[Process] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._run(order, info, directory, started))
        process = await asyncio.shield(started)
        if info.ended_at is None:
            self._running[info.id] = (process, task)
        return {"id": info.id, "log": str(directory / LOG)}

    async def _run(
        self, order: Any, info: BackgroundCommand, directory: Path, started: asyncio.Future[Process]
    ) -> None:
        try:
            async with self._live.session(order) as (kept, endpoint):
                with OutputFile(directory / LOG, self._live.redactor) as output:
                    process = await self._live.spawn(order, endpoint, output)
                    await process.close_stdin()
                    async with process:
                        started.set_result(process)
                        info.exit_code = (await process.wait()).exit_code
                _finish(kept, info.exit_code)
        except Exception as error:  # noqa: BLE001 - the outcome of the start goes to the client that asked for it
            if not started.done():
                started.set_exception(error)
        finally:
            info.ended_at = datetime.now(UTC)
            with contextlib.suppress(OSError):
                write_info(directory, info)
            self._running.pop(info.id, None)
            with contextlib.suppress(Exception):
                await self._live.adopt()

    async def list(self) -> dict[str, Any]:
        rows = read_background(self._live.workspace, frozenset(self._running))
        return {"commands": [row.model_dump(mode="json") | {"state": row.state} for row in rows]}

    async def stop(self, id: str) -> dict[str, Any]:
        """Ask a command to end, and kill it if it does not."""
        find_background(self._live.workspace, id)
        await self._end(id)
        return {}

    async def _end(self, id: str) -> None:
        if id in self._running:
            process, task = self._running[id]
            await process.signal(signal.SIGTERM)
            await asyncio.wait({task}, timeout=_GRACE)
            await process.kill()
            await asyncio.wait({task})

    async def close(self) -> None:
        for id in list(self._running):
            await self._end(id)
