"""The client of a workspace's supervisor: finds the enclosing workspace, launches a supervisor, and sends requests.

The supervisor listens on a socket in the workspace's local state, which only this user may enter. A request is one
frame of JSON (`pier.frames`), followed by frames in both directions until `EXIT` or `ERROR`. To keep `pier exec` fast,
this module imports almost nothing.
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
"""File that marks a workspace whose missing directory was reported."""
LOG = "supervisor.log"
HELD = 3
"""The exit code of a supervisor that found another one running."""
_SECONDS = 300.0
"""Timeout for a supervisor to listen."""
_STATUS_SECONDS = 5.0
_CHUNK = 1 << 16


class WorkspacePlace:
    """The minimal view of a workspace for fast commands: its directory, its raw settings and its local state."""

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
        """Whether the local state belongs to this directory: False after a move, and in a copy."""
        return linked(self.state) == self.root


def find_root(start: str) -> str | None:
    """The directory of the workspace that contains `start`."""
    directory = os.path.realpath(start)
    while not os.path.isfile(f"{directory}/{PIER}/{CONFIG}"):
        if directory == (directory := os.path.dirname(directory)):
            return None
    return directory


def find_place(start: str = ".") -> WorkspacePlace | None:
    """The workspace around `start`, if it has a sandbox and its local state is in order; None in all cases that
    `Workspace.find` must handle."""
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
    """The workspace directory that a local state belongs to."""
    try:
        with open(f"{state}/{LINK}", encoding="utf-8") as stream:
            return str(json.load(stream)["path"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def list_places(on_dropped: Callable[[str], None] | None = None) -> list[WorkspacePlace]:
    """All workspaces of this user on this machine, sorted by directory. A workspace whose directory is missing is
    skipped and reported once; its local state is kept, since the directory may have been moved."""
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
    except Exception:  # noqa: BLE001 - a workspace that does not answer counts as stopped
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
    """Whether a supervisor serves this directory. If the directory was moved meanwhile, its link is updated."""
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
    process.returncode = 0  # the supervisor outlives this process: suppress the ResourceWarning


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
    """Send a request to the supervisor and return its answer. Progress lines and test output are passed on as they
    arrive. `TimeoutError` if nothing arrives for `seconds`."""
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
    """Copy a file or directory of the running sandbox to `target`, which must not exist."""
    call(workspace, {"op": "fetch", "path": path, "target": str(target.absolute())})


def ended() -> SandboxError:
    """The error for a connection closed without an answer."""
    from pier.errors import SandboxError

    return SandboxError(
        "the workspace's supervisor ended", hint="pier start restarts the workspace", code="supervisor_gone"
    )


def error_of(payload: bytes) -> PierError:
    """Decode an error from a supervisor."""
    from pier.errors import PierError

    fields = json.loads(payload)
    return PierError(str(fields.pop("message")), **fields)


def error_payload(error: PierError) -> bytes:
    """Encode an error for a client."""
    names = ("message", "code", "blame", "hint", "retryable")
    return json.dumps({name: getattr(error, name) for name in names}).encode()
