"""The near side of `pier exec`: this terminal and a command in a workspace, or commands in its background."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from pier.cli import terminal
from pier.errors import WorkspaceError
from pier.sandbox import remote
from pier.workspace.client import SIGNAL, answer_of, call, connected, is_running
from pier.workspace.workspace import Workspace

_PASSED = ("TERM", "COLORTERM", "LANG", "LC_ALL")
"""Variables of this terminal that a command inside gets."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def run(workspace: Workspace, command: tuple[str, ...]) -> int:
    """Run a command with this process's streams; its exit code."""
    if workspace.is_host:
        _become(workspace, command)
    return asyncio.run(_run(workspace, command))


def _become(workspace: Workspace, command: tuple[str, ...]) -> None:
    """In host mode the command takes this process's place."""
    try:
        os.execvpe(command[0], command, {**os.environ, **_host_env(workspace)})
    except OSError as error:
        click.echo(f"pier: cannot run {command[0]}: {error.strerror}", err=True)
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


def _host_env(workspace: Workspace) -> dict[str, str]:
    return {**workspace.environment(), "TASK_WORKSPACE": str(workspace.root)}


async def _run(workspace: Workspace, command: tuple[str, ...]) -> int:
    tty = sys.stdin.isatty() and sys.stdout.isatty()
    request = _request("exec", workspace, command) | {"tty": tty, "size": terminal.size()}

    async with connected(workspace) as (reader, writer):

        async def resize(rows: int, columns: int) -> None:
            await remote.send(writer, remote.RESIZE, struct.pack("!HH", rows, columns))

        await remote.send(writer, remote.REQUEST, json.dumps(request).encode())
        with (
            terminal.raw() if tty else _passing_signals(writer),
            terminal.resizing(resize) if tty else contextlib.nullcontext(),
        ):
            pump = asyncio.create_task(
                terminal.pump(
                    lambda data: remote.send(writer, remote.STDIN, data),
                    lambda: remote.send(writer, remote.STDIN_END),
                )
            )
            try:
                answer = await answer_of(reader, on_output=terminal.write)
            finally:
                pump.cancel()
                with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                    await pump
    for note in answer["notes"]:
        click.echo(f"pier: {note}", err=True)
    if answer["missing"]:
        click.echo(f"hint: pier start --agent {answer['missing']} adds it to this workspace", err=True)
    return answer["exit_code"]


@contextlib.contextmanager
def _passing_signals(writer: asyncio.StreamWriter) -> Iterator[None]:
    """Hand signals to this process on to the command."""
    loop = asyncio.get_running_loop()

    def pass_on(number: int) -> None:
        writer.write(SIGNAL + struct.pack("!I", 1) + bytes([number]))

    for number in _SIGNALS:
        loop.add_signal_handler(number, pass_on, number)
    try:
        yield
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


def _request(op: str, workspace: Workspace, command: tuple[str, ...]) -> dict[str, Any]:
    here = Path.cwd().resolve()
    below = here.relative_to(workspace.root) if here.is_relative_to(workspace.root) else Path()
    env = {name: os.environ[name] for name in _PASSED if name in os.environ}
    return {"op": op, "argv": list(command), "cwd": "" if below == Path() else str(below), "env": env}


def detach(workspace: Workspace, command: tuple[str, ...]) -> None:
    """Start a command in the background."""
    answer = _detach_here(workspace, command) if workspace.is_host else None
    answer = answer or asyncio.run(call(workspace, _request("detach", workspace, command)))
    click.echo(f"{answer['id']}  (pier exec --logs {answer['id']}, pier exec --stop {answer['id']})")


def _detach_here(workspace: Workspace, command: tuple[str, ...]) -> dict[str, Any]:
    from pier.workspace.background import LOG, new_background, write_info

    info, directory = new_background(workspace, list(command))
    with (directory / LOG).open("ab") as log:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **_host_env(workspace)},
                start_new_session=True,
            )
        except OSError as error:
            raise WorkspaceError(f"cannot run {command[0]}: {error.strerror}", code="no-command") from error
    info.pid = process.pid
    write_info(directory, info)
    process.returncode = 0  # it is meant to outlive this process
    return {"id": info.id, "log": str(directory / LOG)}


def print_background(workspace: Workspace, as_json: bool) -> None:
    """Print the commands in the background."""
    from pier.workspace.background import read_background

    if not workspace.is_host and is_running(workspace):
        rows = asyncio.run(call(workspace, {"op": "background"}))["commands"]
    else:
        known = read_background(workspace, None if workspace.is_host else frozenset())
        rows = [row.model_dump(mode="json") | {"state": row.state} for row in known]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        click.echo(f"{row['id']:>4}  {row['state']:<12}  {' '.join(row['command'])}")
    if not rows:
        click.echo("no commands in the background", err=True)


def print_log(workspace: Workspace, id: str) -> None:
    """Print what a command in the background has printed so far."""
    from pier.workspace.background import LOG, find_background

    path = find_background(workspace, id) / LOG
    with contextlib.suppress(FileNotFoundError), path.open("rb") as stream:
        while chunk := stream.read(1 << 16):
            terminal.write("stdout", chunk)


def stop_background(workspace: Workspace, id: str) -> None:
    """End a command in the background."""
    from pier.workspace.background import find_background, read_background

    find_background(workspace, id)
    if not workspace.is_host:
        asyncio.run(call(workspace, {"op": "end", "id": id}))
        return
    (info,) = (row for row in read_background(workspace) if row.id == id)
    if info.pid is None or info.state != "running":
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(info.pid, number)
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            if read_background(workspace)[int(id) - 1].state != "running":
                return
            time.sleep(0.05)
