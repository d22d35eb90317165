"""Background commands (`pier exec -d`), in a sandbox or on this machine.

Each is a process group on this machine: the command itself in host mode, else a `pier exec` that runs it in a sandbox.
The group holds a lock on its log while it lives, and its shell writes the exit code.

    .pier/background/<number>/info.json     the command and its start time
    .pier/background/<number>/output.log    its output
    .pier/background/<number>/exit-code     its exit code
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
    """A background command. `exit_code` is None while it runs, and if it is `lost`: it ended without an exit code."""

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
    """Start a command and return its id. `env` are its variables in host mode."""
    if not workspace.is_host:
        connect(workspace).close()
    elif shutil.which(command[0], path=env.get("PATH")) is None:
        raise _not_started(f"{command[0]}: not found")
    directory = _new_directory(workspace)
    # -P: the working directory may contain modules written by an agent.
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
    process.returncode = 0  # the command outlives this process: suppress the ResourceWarning
    return info.id


def _check_start(process: subprocess.Popen[bytes], directory: Path) -> None:
    """Raise the error from the log if the command did not start. The client prints one line once it has; all other
    output goes to the log."""
    assert process.stdout is not None
    with process.stdout:
        if process.stdout.readline():
            return
    process.wait()
    reason = (directory / LOG).read_text(errors="replace").strip().removeprefix("pier: ")
    shutil.rmtree(directory)
    raise _not_started(reason)


def _not_started(reason: str) -> WorkspaceError:
    return WorkspaceError(f"the command did not start: {reason}", code="not-started")


def _new_directory(workspace: Workspace) -> Path:
    """Make the directory with the next free number."""
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
    """The directory of a background command."""
    directory = workspace.background / id
    if not id.isdecimal() or not directory.is_dir():
        raise WorkspaceError(f"unknown background command {id!r}", hint="pier exec --list", code="no-command")
    return directory


def list_all(workspace: Workspace) -> list[BackgroundCommand]:
    """All background commands, oldest first."""
    home = workspace.background
    return [info for number in _numbers(home) if (info := _read(home / str(number))) is not None]


def _read(directory: Path) -> BackgroundCommand | None:
    try:
        info = BackgroundCommand.model_validate_json((directory / INFO).read_bytes())
    except (OSError, ValidationError):
        return None
    is_alive = _is_alive(directory)  # checked first: the exit code is written before the lock is released
    info.exit_code = _exit_code(directory)
    if info.exit_code is not None:
        with contextlib.suppress(FileNotFoundError):
            info.ended_at = datetime.fromtimestamp((directory / _CODE).stat().st_mtime, UTC)
    info.lost = info.exit_code is None and not is_alive
    return info


def _exit_code(directory: Path) -> int | None:
    """The exit code of a command; None while it runs, and if its shell was killed."""
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
    """Stop a command and its process group: with SIGTERM, then with SIGKILL."""
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
    # Even if a process that left the group still holds the lock: the number of the group may be reused.
    if code and not (directory / _CODE).exists():
        write(directory / _CODE, f"{code}\n", durable=False)


def stop_all(workspace: Workspace) -> None:
    """Stop all background commands."""
    for info in list_all(workspace):
        stop(workspace, info.id)
