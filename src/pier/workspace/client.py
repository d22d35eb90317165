"""The near side of a workspace's supervisor: starts one, asks it, and runs commands through it.

The supervisor listens at `control.sock` in the workspace's part of pier's home, for this user alone. A request is one
frame of JSON (`pier.sandbox.remote`), followed by frames in both directions until `EXIT` or `ERROR`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from pier.errors import PierError, SandboxError, WorkspaceError
from pier.sandbox import remote
from pier.workspace.workspace import Workspace, is_served

PROGRESS, SIGNAL = b"p", b"s"
"""The frames of a line about long work, and of a signal for a command."""
LOG = "supervisor.log"
HELD = 3
"""The exit code of a supervisor that found another one."""
_SECONDS = 60.0
"""How long a supervisor may take until it listens."""

OnLine = Callable[[str], None]
OnStream = Callable[[str, bytes], None]


def is_running(workspace: Workspace) -> bool:
    """Whether this very directory is served by a supervisor."""
    return _belongs(workspace) and is_served(workspace.state)


def _belongs(workspace: Workspace) -> bool:
    """Whether the supervisor is that of this directory. One that was moved while it ran is linked again."""
    if not workspace.is_settled() and workspace.was_moved() and is_served(workspace.state):
        workspace.link()
    return workspace.is_settled()


def launch(workspace: Workspace) -> None:
    """Start a supervisor that outlives this process, and wait until it listens."""
    workspace.state.mkdir(parents=True, exist_ok=True, mode=0o700)
    log = os.open(workspace.state / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        command = [sys.executable, "-m", "pier.workspace.supervisor", str(workspace.root)]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", start_new_session=True
        )
    finally:
        os.close(log)
    deadline = time.monotonic() + _SECONDS
    while not is_served(workspace.state):
        if process.poll() not in (None, HELD) or time.monotonic() > deadline:
            raise _failed(workspace)
        time.sleep(0.01)
    process.returncode = 0  # it is meant to outlive this process, which must not warn about that


def _failed(workspace: Workspace) -> WorkspaceError:
    path = workspace.state / LOG
    with contextlib.suppress(OSError):
        tail = path.read_text(errors="replace").strip().splitlines()[-1:]
        if tail:
            return WorkspaceError(f"the workspace did not start: {tail[0]}", hint=f"see {path}", code="supervisor")
    return WorkspaceError("the workspace did not start", hint=f"see {path}", code="supervisor", blame="infra")


@asynccontextmanager
async def connected(workspace: Workspace) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to the supervisor; `WorkspaceError` if the workspace is not running."""
    if not _belongs(workspace):
        raise not_running(workspace)
    try:
        reader, writer = await asyncio.open_unix_connection(sock=remote.dial_control(workspace.state))
    except OSError:
        raise not_running(workspace) from None
    try:
        yield reader, writer
    finally:
        writer.close()


def not_running(workspace: Workspace) -> WorkspaceError:
    return WorkspaceError(
        f"the workspace {workspace.root} is not running", hint=f"cd {workspace.root} && pier start", code="not-running"
    )


async def call(
    workspace: Workspace,
    request: dict[str, Any],
    on_line: OnLine | None = None,
    on_output: OnStream | None = None,
) -> dict[str, Any]:
    """Ask the supervisor, and give its answer."""
    async with connected(workspace) as (reader, writer):
        await remote.send(writer, remote.REQUEST, json.dumps(request).encode())
        return await answer_of(reader, on_line, on_output)


async def answer_of(
    reader: asyncio.StreamReader, on_line: OnLine | None = None, on_output: OnStream | None = None
) -> dict[str, Any]:
    """The answer to a request, after all that comes before it."""
    while (frame := await remote.receive(reader)) is not None:
        kind, payload = frame
        if kind == PROGRESS and on_line is not None:
            on_line(payload.decode(errors="replace"))
        elif kind in (remote.STDOUT, remote.STDERR) and on_output is not None:
            on_output("stdout" if kind == remote.STDOUT else "stderr", payload)
        elif kind == remote.EXIT:
            return json.loads(payload)
        elif kind == remote.ERROR:
            raise error_of(json.loads(payload))
    raise SandboxError(
        "the workspace's supervisor ended", hint="pier start brings the workspace back", code="supervisor_gone"
    )


def call_now(workspace: Workspace, request: dict[str, Any]) -> dict[str, Any]:
    """`call` for callers without an event loop."""
    return asyncio.run(call(workspace, request))


def error_fields(error: PierError) -> dict[str, Any]:
    """An error as it is sent."""
    return {
        "message": error.message,
        "code": error.code,
        "blame": error.blame,
        "hint": error.hint,
        "retryable": error.retryable,
    }


def error_of(fields: dict[str, Any]) -> PierError:
    """The error that was sent."""
    return PierError(
        str(fields.get("message")),
        code=fields.get("code"),
        blame=fields.get("blame"),
        hint=fields.get("hint"),
        retryable=fields.get("retryable"),
    )
