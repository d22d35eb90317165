"""Commands in the background (`pier exec -d`): each has a number, a log, and a line that says how it ended.

.pier/background/<number>/info.json     the command, when it began and how it ended
.pier/background/<number>/output.log    what it printed
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from pier.errors import WorkspaceError
from pier.files import write_json
from pier.sandbox.contract import Process
from pier.trial.record import OutputFile
from pier.workspace.agents import recognise
from pier.workspace.commands import order_of
from pier.workspace.live import LiveWorkspace
from pier.workspace.workspace import Workspace

LOG, INFO = "output.log", "info.json"
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
    number = 1 + max((int(path.name) for path in home.iterdir() if path.name.isdigit()), default=0)
    directory = home / str(number)
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
        process = await started
        self._running[info.id] = (process, task)
        return {"id": info.id, "log": str(directory / LOG)}

    async def _run(
        self, order: Any, info: BackgroundCommand, directory: Path, started: asyncio.Future[Process]
    ) -> None:
        try:
            async with self._live.session(recognise(order.argv[0]), order) as recorded:
                with OutputFile(directory / LOG, self._live.redactor) as output:
                    process = await self._live.spawn(order, recorded.endpoint, output)
                    await process.close_stdin()
                    async with process:
                        started.set_result(process)
                        info.exit_code = (await process.wait()).exit_code
                if recorded.kept is not None:
                    recorded.kept.info.exit_code, recorded.kept.info.ended_at = info.exit_code, datetime.now(UTC)
                    recorded.kept.write()
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
