"""The process that runs a workspace: it owns the sandbox and the gateway, and serves commands over a socket.

`pier start` launches it and waits until it is ready; it runs until `pier stop`, a signal, or the end of its sandbox. A
lock allows one process per workspace. Background commands end with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import sys
import traceback
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from pier import frames
from pier.errors import PierError, SandboxError, StorageError, WorkspaceError
from pier.files import locked
from pier.sandbox import remote
from pier.workspace import state
from pier.workspace.background import stop_all
from pier.workspace.client import HELD, LOG, error_payload
from pier.workspace.commands import run_command
from pier.workspace.live import LiveWorkspace, open_live
from pier.workspace.ports import forward_ports
from pier.workspace.state import RUNNING, SAVE_FAILURES
from pier.workspace.verify import VerifyOrder, verify
from pier.workspace.workspace import Workspace, new_directory

_NAME = b"pier-workspace"
_PR_SET_NAME = 15
_LOOK = 2.0
"""Seconds between two checks of the workspace's directory."""
_PROGRESS = 0.1
"""Seconds between two checks for progress lines of the start."""
_GONE = frozenset({"sandbox_gone", "container_gone", "zygote_gone"})


@dataclass(slots=True)
class Supervisor:
    """Serves one workspace."""

    workspace: Workspace
    live: LiveWorkspace | None = None
    failure: PierError | None = None
    lines: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    failure_reported: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once a client has received the reason of a failed start."""
    gone: bool = False
    """Whether the workspace's directory was deleted."""
    _root: int = -1
    _stoppers: set[asyncio.StreamWriter] = field(default_factory=set)
    """Clients that wait for the stop."""

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        self._root = os.open(self.workspace.root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self.stopping.set)
        server = await asyncio.start_unix_server(self._answer, sock=frames.listen(str(self.workspace.state)))
        try:
            await self._hold()
        except PierError as error:
            self.failure = error
        except OSError as error:
            self.failure = StorageError(f"cannot start the workspace: {error}")
        finally:
            self.ready.set()
            self.stopped.set()
            if self.failure is not None:
                self._log(f"error: {self.failure.explain()}")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.failure_reported.wait(), 0 if self.gone else 10)
            server.close()
            (self.workspace.state / frames.SOCKET).unlink(missing_ok=True)
        return 1 if self.failure else 0

    async def _hold(self) -> None:
        async with open_live(self.workspace, self._say) as live:
            async with forward_ports(live.sandbox, self.workspace.config.ports):
                self.live = live
                self._log("ready")
                self.ready.set()
                await self._wait_for_stop()
            try:
                await asyncio.to_thread(stop_all, self.workspace)
            except (OSError, PierError) as error:  # the sandbox is saved anyway
                self.notes.append(f"cannot stop all background commands: {error}")
                self._log(self.notes[-1])
            if not await self._save(live):
                self._exit_without_cleanup()
        self.live = None

    async def _wait_for_stop(self) -> None:
        while not self.stopping.is_set():
            self._follow_root()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.stopping.wait(), _LOOK)

    def _follow_root(self) -> None:
        """Follow the directory if it was moved; stop if it was deleted."""
        if self.gone or _is_at(self._root, self.workspace.root):
            return
        place = Path(f"/proc/self/fd/{self._root}").readlink()
        if not _is_at(self._root, place):
            self._log(f"the workspace's directory {self.workspace.root} was deleted")
            self.gone = True
            self.stopping.set()
            return
        self._log(f"the workspace was moved to {place}")
        self.workspace.root = place
        self.workspace.link()
        if self.live is not None:
            self.live.placed.path = self.workspace.pier / self.live.placed.path.name

    async def _save(self, live: LiveWorkspace) -> bool:
        """Save the sandbox's changes; False if they can only be saved by the next start."""
        self._follow_root()
        if self.gone:
            await self._rescue(live)
            return True
        can_wait = (self.workspace.state / RUNNING).exists()
        try:
            await live.adopt()
            if note := await state.save(self.workspace, live.sandbox, live.environment.workdir):
                self.notes.append(note)
        except SAVE_FAILURES as error:
            later = "saved by the next pier start" if can_wait else "not kept"
            self.notes.append(f"changes outside of the workspace's directory are {later}: {error}")
            self._log(self.notes[-1])
            return not can_wait
        return True

    def _exit_without_cleanup(self) -> NoReturn:
        """Exit at once, as in a crash, so that the sandbox's files stay on disk for the next start."""
        for writer in self._stoppers:
            writer.write(frames.pack(frames.EXIT, json.dumps({"notes": self.notes}).encode()))
        sys.stderr.flush()
        os._exit(1)

    async def _rescue(self, live: LiveWorkspace) -> None:
        """Save the files of a workspace that is not mounted after its directory was deleted."""
        if self.workspace.config.mounted:
            return
        target = new_directory(self.workspace.state / "rescued")
        try:
            await live.sandbox.download(live.environment.workdir, target / "files")
            self._log(f"the files of the sandbox are in {target / 'files'}")
        except SAVE_FAILURES as error:
            self._log(f"cannot save the files of the sandbox: {error}")

    def _say(self, line: str) -> None:
        self.lines.append(line)
        self._log(line)

    def _log(self, line: str) -> None:
        sys.stderr.write(line.rstrip() + "\n")
        sys.stderr.flush()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            frame = await remote.receive(reader)
            if frame is not None and frame[0] == frames.REQUEST:
                request = json.loads(frame[1])
                answer = await self._serve(request, reader, writer)
                await remote.send(writer, frames.EXIT, json.dumps(answer).encode())
        except PierError as error:
            await _send_error(writer, error)
            if error.code in _GONE:
                self.failure = error
                self.stopping.set()
        except Exception as error:  # noqa: BLE001 - no request may end this process; the client gets the error
            self._log("".join(traceback.format_exception(error)))
            text = f"the request failed: {type(error).__name__}: {error}"
            await _send_error(writer, PierError(text, hint=f"see {self.workspace.state / LOG}", code="supervisor"))
        finally:
            writer.close()

    async def _serve(
        self, request: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> dict[str, Any]:
        op = request["op"]
        self._follow_root()
        if op == "wait":
            return await self._wait(writer)
        if op == "status":
            return self._status()
        if op == "stop":
            self._stoppers.add(writer)
            self.stopping.set()
            await self.stopped.wait()
            return {"notes": self.notes}
        live = await self._live()
        if op == "exec":
            return await run_command(live, request, reader, writer)
        if op == "verify":
            return await self._verify(live, request, writer)
        if op == "fetch":
            return {"left_out": await live.sandbox.download(request["path"], Path(request["target"]))}
        if op == "save":
            return await self._save_for_fork(live, request)
        if op == "outside":
            return {"changes": await _outside_changes(live)}
        raise ValueError(f"unknown request {op!r}")

    async def _live(self) -> LiveWorkspace:
        await self.ready.wait()
        if self.gone:
            raise WorkspaceError(
                f"the directory of this workspace was deleted: {self.workspace.root}",
                hint="pier start TASK -d DIR creates another",
                code="workspace-gone",
            )
        if self.live is None:
            self.failure_reported.set()
            raise self.failure or SandboxError("the workspace is stopping", code="stopping", retryable=False)
        return self.live

    async def _wait(self, writer: asyncio.StreamWriter) -> dict[str, Any]:
        """Send progress lines until the workspace is ready."""
        sent = 0
        while not self.ready.is_set() or sent < len(self.lines):
            for line in self.lines[sent:]:
                await remote.send(writer, frames.PROGRESS, line.encode())
                sent += 1
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.ready.wait(), _PROGRESS)
        await self._live()
        return self._status()

    def _status(self) -> dict[str, Any]:
        live = self.live
        return {
            "pid": os.getpid(),
            "ready": live is not None,
            "sandbox": live.sandbox.id if live else None,
            "workdir": live.environment.workdir if live else None,
            "image": live.environment.record.image.reference if live and live.environment.record.image else None,
            "warnings": list(live.environment.record.warnings) if live else [],
        }

    async def _verify(
        self, live: LiveWorkspace, request: dict[str, Any], writer: asyncio.StreamWriter
    ) -> dict[str, Any]:
        def send(kind: bytes, payload: bytes) -> None:
            writer.write(frames.pack(kind, payload))

        order = VerifyOrder(**{name: value for name, value in request.items() if name != "op"})
        return await verify(
            self.workspace,
            live.services,
            order,
            lambda line: send(frames.PROGRESS, line.encode()),
            live,
            partial(send, frames.STDOUT),
        )

    async def _save_for_fork(self, live: LiveWorkspace, request: dict[str, Any]) -> dict[str, Any]:
        """Save the current state for a fork: files that are not mounted, and changes elsewhere."""
        if not self.workspace.config.mounted:
            await live.sandbox.download(live.environment.workdir, Path(request["files"]))
        await state.keep(live.sandbox, Path(request["target"]))
        return {}


async def _outside_changes(live: LiveWorkspace) -> list[dict[str, str]]:
    """The changes outside of the workspace's directory since the start."""
    before = {(change.path, change.mark) for change in live.environment.before or ()}
    return [
        {"path": change.path, "kind": change.kind}
        for change in await live.sandbox.changes() or ()
        if (change.path, change.mark) not in before and not f"{change.path}/".startswith(f"{live.environment.workdir}/")
    ]


def _is_at(directory: int, path: Path) -> bool:
    """Whether an open directory is the one at `path`."""
    try:
        return os.path.samestat(os.fstat(directory), path.stat())
    except OSError:
        return False


async def _send_error(writer: asyncio.StreamWriter, error: PierError) -> None:
    with contextlib.suppress(OSError):
        await remote.send(writer, frames.ERROR, error_payload(error))


def main(root: str) -> int:
    """Serve the workspace in `root` until it is stopped."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_NAME, _NAME)
    workspace = Workspace.open(Path(root))
    with locked(workspace.state / "lock", wait=False) as mine:
        if not mine:
            sys.stderr.write("another process serves this workspace\n")
            return HELD
        return asyncio.run(Supervisor(workspace).run())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
