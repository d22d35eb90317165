"""Commands in the background (`pier exec -d`), in a sandbox or on this machine.

Each is a process group of this machine: the command itself in host mode, else a `pier exec` that runs it inside.
It holds a lock on its log as long as it lives, and its shell writes how it ended.

    .pier/background/<number>/info.json     the command, and when it began
    .pier/background/<number>/output.log    what it printed
    .pier/background/<number>/exit-code     how it ended
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel, Field, ValidationError

from pier.errors import WorkspaceError
from pier.files import write, write_json
from pier.workspace.client import connect
from pier.workspace.workspace import Workspace

LOG, INFO = "output.log", "info.json"
_CODE = "exit-code"
_SCRIPT = f'trap : TERM; "$@"; echo $? >"$0/{_CODE}"'
_GRACE = 10.0


class BackgroundCommand(BaseModel):
    """A command in the background. `exit_code` is None while it runs; `lost`: its end was not seen."""

    id: str
    command: list[str]
    started_at: datetime
    ended_at: datetime | None = None
    exit_code: int | None = None
    pid: int | None = Field(default=None, gt=1)
    """The process group on this machine."""
    lost: bool = False

    @property
    def state(self) -> str:
        if self.exit_code is not None:
            return f"exited {self.exit_code}"
        return "lost" if self.lost else "running"


def start(workspace: Workspace, command: Sequence[str], env: Mapping[str, str]) -> str:
    """Start a command here; its id. `env` has its variables in host mode."""
    if not workspace.is_host:
        connect(workspace).close()
    elif shutil.which(command[0], path=env.get("PATH")) is None:
        raise _not_started(f"{command[0]}: not found")
    directory = _new_directory(workspace)
    # -P: the command's directory may hold modules that an agent wrote.
    client = [sys.executable, "-P", "-m", "pier.cli.workspace_exec", str(workspace.root), str(directory / LOG)]
    script = ["/bin/sh", "-c", _SCRIPT, str(directory), *([] if workspace.is_host else client), *command]
    with (directory / LOG).open("ab") as log:
        os.fchmod(log.fileno(), 0o600)
        fcntl.flock(log, fcntl.LOCK_EX)
        began = datetime.now(UTC)
        stdout = log if workspace.is_host else subprocess.PIPE
        process = subprocess.Popen(
            script, stdin=subprocess.DEVNULL, stdout=stdout, stderr=log, env=env, start_new_session=True
        )
    if not workspace.is_host:
        _check_start(process, directory)
    info = BackgroundCommand(id=directory.name, command=list(command), started_at=began, pid=process.pid)
    write_json(directory / INFO, info.model_dump(mode="json"), durable=False)
    process.returncode = 0  # it is meant to outlive this process
    return info.id


def _check_start(process: subprocess.Popen[bytes], directory: Path) -> None:
    """Raise what the log says if the command did not start. The client writes a line when it did, as its output goes to
    the log."""
    assert process.stdout is not None
    with process.stdout:
        if process.stdout.readline():
            return
    process.wait()
    said = (directory / LOG).read_text(errors="replace").strip().removeprefix("pier: ")
    shutil.rmtree(directory)
    raise _not_started(said)


def _not_started(said: str) -> WorkspaceError:
    return WorkspaceError(f"the command did not start: {said}", code="not-started")


def _new_directory(workspace: Workspace) -> Path:
    """A directory with the next number."""
    home = workspace.background
    home.mkdir(parents=True, exist_ok=True)
    while True:
        directory = home / str(1 + max(_numbers(home), default=0))
        with contextlib.suppress(FileExistsError):  # another command took the number meanwhile
            directory.mkdir()
            return directory


def _numbers(home: Path) -> list[int]:
    return sorted(int(path.name) for path in home.iterdir() if path.name.isdecimal()) if home.is_dir() else []


def find(workspace: Workspace, id: str) -> Path:
    """The directory of a command in the background."""
    directory = workspace.background / id
    if not id.isdecimal() or not directory.is_dir():
        raise WorkspaceError(f"unknown background command {id!r}", hint="pier exec --list", code="no-command")
    return directory


def list_all(workspace: Workspace) -> list[BackgroundCommand]:
    """All commands in the background, oldest first."""
    places = [workspace.background / str(number) for number in _numbers(workspace.background)]
    return [info for place in places if (info := _read(place)) is not None]


def _read(directory: Path) -> BackgroundCommand | None:
    try:
        info = BackgroundCommand.model_validate_json((directory / INFO).read_bytes())
    except (OSError, ValidationError):
        return None
    is_alive = _is_alive(directory)  # before the exit code is read, which is written before the lock is gone
    info.exit_code = _exit_code(directory)
    if info.exit_code is not None:
        with contextlib.suppress(FileNotFoundError):
            info.ended_at = datetime.fromtimestamp((directory / _CODE).stat().st_mtime, UTC)
    info.lost = info.exit_code is None and not is_alive
    return info


def _exit_code(directory: Path) -> int | None:
    """How a command ended; None while it runs, and if its shell was killed."""
    with contextlib.suppress(OSError, ValueError):
        return int((directory / _CODE).read_text())
    return None


def _is_alive(directory: Path) -> bool:
    """Whether the command still holds the lock on its log."""
    with contextlib.suppress(FileNotFoundError), (directory / LOG).open("rb") as log:
        try:
            fcntl.flock(log, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def stop(workspace: Workspace, id: str) -> None:
    """End a command and all that it started: first by asking, then by force."""
    directory = find(workspace, id)
    info = _read(directory)
    if info is None or info.pid is None or info.state != "running":
        return
    code = 0
    for number in (signal.SIGTERM, signal.SIGKILL):
        if not _is_alive(directory):
            break
        code = 128 + number
        with contextlib.suppress(ProcessLookupError):
            os.killpg(info.pid, number)
        deadline = time.monotonic() + _GRACE
        while _is_alive(directory) and time.monotonic() < deadline:
            time.sleep(0.02)
    # Also if the lock is still held, by a process that left the group: another group may get this number.
    if code and not (directory / _CODE).exists():
        write(directory / _CODE, f"{code}\n", durable=False)


def stop_all(workspace: Workspace) -> None:
    """End all commands in the background."""
    for info in list_all(workspace):
        stop(workspace, info.id)
