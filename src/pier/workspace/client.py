"""The client side of a workspace's supervisor: finds the workspace around here, starts a supervisor and asks it.

The supervisor listens in the workspace's part of pier's home, for this user alone. A request is one frame of JSON
(`pier.frames`), followed by frames in both directions until `EXIT` or `ERROR`. This module imports next to nothing: a
command in a running workspace must not wait for Python.
"""

from __future__ import annotations

import json
import os

from pier import frames
from pier.home import home_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from pathlib import Path
    from typing import Any

    from pier.errors import PierError, SandboxError, WorkspaceError
    from pier.workspace.workspace import Workspace

PIER, CONFIG, LINK = ".pier", "workspace.json", "link.json"
GONE = "gone"
"""Marks a workspace whose missing directory was reported."""
LOG = "supervisor.log"
HELD = 3
"""The exit code of a supervisor that found another one."""
_SECONDS = 300.0
"""How long a supervisor may take until it listens."""
_STATUS_SECONDS = 5.0
_CHUNK = 1 << 16


class WorkspacePlace:
    """A workspace as far as a command must know it: its directory, its settings as they are on disk, and this
    machine's part of it."""

    __slots__ = ("config", "root", "state")

    def __init__(self, root: str, config: dict[str, Any]) -> None:
        self.root = root
        self.config = config
        self.state = f"{home_text()}/workspaces/{config['id']}"

    @property
    def is_host(self) -> bool:
        return self.config["mode"] == "host"

    @property
    def is_linked(self) -> bool:
        """Whether this machine's part belongs to this directory: not after a move, nor in a copy."""
        return linked(self.state) == self.root


def find_root(start: str) -> str | None:
    """The directory of the workspace that `start` lies in."""
    directory = os.path.realpath(start)
    while not os.path.isfile(f"{directory}/{PIER}/{CONFIG}"):
        if directory == (directory := os.path.dirname(directory)):
            return None
    return directory


def find_place(start: str = ".") -> WorkspacePlace | None:
    """The workspace with a sandbox around `start`; None if there is none, or something about it is out of the ordinary,
    so that the whole of pier must look at it."""
    try:
        place = _read_place(find_root(start) or "/")
    except OSError:
        return None
    return place if place is not None and not place.is_host and place.is_linked else None


def _read_place(root: str) -> WorkspacePlace | None:
    try:
        with open(f"{root}/{PIER}/{CONFIG}", encoding="utf-8") as stream:
            config = {"mode": "sandbox", "task_path": None, **json.load(stream)}
        id = str(config["id"])
        is_id = len(id) == 8 and all(letter in "0123456789abcdef" for letter in id)
        return WorkspacePlace(root, config) if is_id else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def linked(state: str) -> str | None:
    """The directory that a part of pier's home belongs to."""
    try:
        with open(f"{state}/{LINK}", encoding="utf-8") as stream:
            return str(json.load(stream)["path"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def list_places(on_dropped: Callable[[str], None] | None = None) -> list[WorkspacePlace]:
    """All workspaces of this user on this machine, by their directories. One whose directory is gone is left out, and
    reported once: it may have been moved, so its secrets are kept for the next start."""
    home = f"{home_text()}/workspaces"
    found: list[WorkspacePlace] = []
    for id in sorted(os.listdir(home)) if os.path.isdir(home) else ():
        state = f"{home}/{id}"
        root = linked(state)
        place = _read_place(root) if root is not None else None
        if place is not None and place.config["id"] == id:
            found.append(place)
        elif root is not None and place is None and on_dropped is not None and not is_served(state):
            try:
                os.close(os.open(f"{state}/{GONE}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            except OSError:
                continue
            on_dropped(root)
    return sorted(found, key=lambda place: place.root)


def status_of(place: WorkspacePlace) -> dict[str, Any]:
    """One row of `pier list`."""
    config = place.config
    try:
        status = call(place, {"op": "status"}, seconds=_STATUS_SECONDS) if not place.is_host else {}
    except Exception:  # noqa: BLE001 - one that cannot be asked does not run
        status = {}
    sandbox = status.get("sandbox")
    running = "running" if status.get("ready") else "starting" if status else "stopped"
    return {
        "workspace": place.root,
        "sandbox": f"pier-{os.path.basename(place.root)}-{sandbox}" if sandbox else None,
        "status": "—" if place.is_host else running,
        "mode": config["mode"],
        "backend": None if place.is_host else config.get("backend", "local"),
        "task": config.get("task"),
        "image": status.get("image") or config.get("image"),
        "agents": config.get("agents", []),
        "ports": config.get("ports", []),
        "pid": status.get("pid"),
    }


def is_served(state: object) -> bool:
    """Whether a supervisor answers at the socket of a workspace."""
    try:
        frames.dial(str(state)).close()
    except OSError:
        return False
    return True


def is_running(workspace: Workspace) -> bool:
    """Whether this very directory is served by a supervisor. One that was moved while it ran is linked again."""
    if not is_served(workspace.state):
        return False
    if (origin := workspace.origin) == "moved":
        workspace.link()
    return origin in ("here", "moved")


def launch(workspace: Workspace) -> None:
    """Start a supervisor that outlives this process, and wait until it listens."""
    import subprocess
    import sys
    import time

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
    from pier.errors import WorkspaceError

    path = workspace.state / LOG
    try:
        last = path.read_text(errors="replace").strip().splitlines()[-1:]
    except OSError:
        last = []
    reason = f": {last[0]}" if last else ""
    return WorkspaceError(
        f"the workspace did not start{reason}", hint=f"see {path}, then pier start again", code="supervisor",
        blame="infra",
    )  # fmt: skip


def connect(place: WorkspacePlace | Workspace) -> socket.socket:
    """A connection to the supervisor; `WorkspaceError` if the workspace is not running."""
    try:
        if isinstance(place, WorkspacePlace) or is_running(place):
            return frames.dial(str(place.state))
    except OSError:
        pass
    from pier.errors import WorkspaceError

    raise WorkspaceError(
        f"the workspace {place.root} is not running", hint=f"cd {place.root} && pier start", code="not-running"
    )


def call(
    place: WorkspacePlace | Workspace,
    request: dict[str, Any],
    on_line: Callable[[str], None] | None = None,
    on_output: Callable[[bytes], None] | None = None,
    seconds: float | None = None,
) -> dict[str, Any]:
    """Ask the supervisor, and give its answer. Lines about long work and output of tests are passed on meanwhile. It is
    a `TimeoutError` if nothing comes for `seconds`."""
    with connect(place) as sock:
        sock.settimeout(seconds)
        sock.sendall(frames.pack(frames.REQUEST, json.dumps(request).encode()))
        received = bytearray()
        while chunk := sock.recv(_CHUNK):
            received += chunk
            for kind, payload in frames.unpack(received):
                if kind == frames.PROGRESS and on_line is not None:
                    on_line(payload.decode(errors="replace"))
                elif kind == frames.STDOUT and on_output is not None:
                    on_output(payload)
                elif kind == frames.EXIT:
                    return json.loads(payload)
                elif kind == frames.ERROR:
                    raise error_of(payload)
    raise ended()


def fetch(workspace: Workspace, path: str, target: Path) -> None:
    """Copy a file or directory of the running sandbox out to `target`, which must not exist."""
    call(workspace, {"op": "fetch", "path": path, "target": str(target.absolute())})


def ended() -> SandboxError:
    """The error that the supervisor went away without an answer."""
    from pier.errors import SandboxError

    return SandboxError(
        "the workspace's supervisor ended", hint="pier start brings the workspace back", code="supervisor_gone"
    )


def error_of(payload: bytes) -> PierError:
    """The error that a supervisor sent."""
    from pier.errors import PierError

    fields = json.loads(payload)
    return PierError(str(fields.pop("message")), **fields)


def error_payload(error: PierError) -> bytes:
    """An error as it is sent."""
    names = ("message", "code", "blame", "hint", "retryable")
    return json.dumps({name: getattr(error, name) for name in names}).encode()
