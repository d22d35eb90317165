"""A workspace on disk: its settings, its sessions and trials, and the index of all workspaces of this user.

    DIR/.pier/workspace.json          the settings, without the values of secret variables
    DIR/.pier/sessions/<time>/        one recorded run of an agent
    DIR/.pier/trials/<time>/          one trial for each `pier verify` and `pier capture`
    DIR/.pier/agent/                  the agents' logs and settings, mounted at /logs/agent in the sandbox
    <home>/workspaces/<id>/           the local state: link.json, secrets.json, control.sock, supervisor.log

The directories below `<home>/workspaces` are the index. A workspace whose directory is missing is not listed; its local
state is kept, since the directory may have been moved.
"""

from __future__ import annotations

import json
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError

from pier.errors import WorkspaceError
from pier.files import write_json
from pier.home import pier_home
from pier.workspace.client import CONFIG, GONE, LINK, PIER, find_root, linked, list_places

TASK = ".task"
SESSION, CAST, SECRETS = "session.json", "terminal.cast", "secrets.json"
CONSENT = "consent.json"
RECORDING = "recording.jsonl"
STAMP = "%Y-%m-%d_%H-%M-%S"
_SUFFIXES = 1000


class WorkspaceConfig(BaseModel):
    """The settings of a workspace. `task` is a directory or a git reference, `task_path` its directory on this machine.
    Values of secret variables in `env` are empty."""

    version: int = 1
    id: str = Field(default_factory=lambda: secrets.token_hex(4), pattern=r"^[0-9a-f]{8}$")
    mode: Literal["sandbox", "host"] = "sandbox"
    backend: str = "local"
    task: str | None = None
    task_path: Path | None = None
    git: dict[str, str] | None = None
    """The repository, commit and path of a remote task."""
    image: str | None = None
    agents: list[str] = []
    model: str | None = None
    direct: bool = False
    """Whether agents call their providers directly, with the variables of `env`."""
    ports: list[str] = []
    mounts: list[str] = []
    env: dict[str, str] = {}
    skills: list[Path] = []
    mounted: bool = True
    """Whether the directory is mounted; else its files are copied in at the start and out at the stop."""
    workdir: str | None = None
    """Path of the directory in the sandbox; set by the first start."""
    image_digest: str | None = None
    created_at: datetime = Field(default_factory=lambda: datetime.now(UTC))
    seeded: bool = False
    """Whether the image's files have been copied into the directory."""


class SessionInfo(BaseModel):
    """One recorded run of an agent. `exit_code` is None while it runs, or if pier ended before it."""

    id: str
    agent: str
    version: str | None = None
    command: list[str] = []
    model: str | None = None
    tty: bool = False
    started_at: datetime
    ended_at: datetime | None = None
    exit_code: int | None = None


@dataclass(frozen=True, slots=True)
class WorkspaceSession:
    """A recorded run of an agent and its files."""

    info: SessionInfo
    directory: Path

    @property
    def recording(self) -> Path:
        """The recording of its model calls; the file is missing if there were none."""
        return self.directory / RECORDING

    @property
    def cast(self) -> Path:
        """The terminal recording, an asciinema cast."""
        return self.directory / CAST

    def write(self) -> None:
        write_json(self.directory / SESSION, self.info.model_dump(mode="json"), durable=False)


@dataclass(slots=True)
class Workspace:
    """A workspace: its directory, and its settings at the time it was opened."""

    root: Path
    config: WorkspaceConfig

    @property
    def pier(self) -> Path:
        return self.root / PIER

    @property
    def trials(self) -> Path:
        return self.pier / "trials"

    @property
    def background(self) -> Path:
        return self.pier / "background"

    @property
    def agent_logs(self) -> Path:
        return self.pier / "agent"

    @property
    def is_host(self) -> bool:
        return self.config.mode == "host"

    @property
    def state(self) -> Path:
        """The directory of the local state, in pier's home."""
        return workspaces_home() / self.config.id

    @classmethod
    def open(cls, root: Path) -> Workspace:
        """Open the workspace in a directory; `WorkspaceError` if it is not one, or its settings are broken."""
        path = root / PIER / CONFIG
        try:
            config = WorkspaceConfig.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            raise WorkspaceError(
                f"{root}: not a workspace", hint="pier start TASK -d DIR", code="no-workspace"
            ) from None
        except (OSError, ValidationError, UnicodeDecodeError) as error:
            raise WorkspaceError(
                f"{path}: cannot be read: {str(error).splitlines()[0]}",
                hint=f"move {path.parent} away and run pier start again: other files are not affected",
                code="workspace-broken",
            ) from error
        return cls(root.resolve(), config)

    @classmethod
    def find(cls, path: Path | None = None) -> Workspace:
        """Find the workspace around `path` or the working directory; without `path`, else this user's only one."""
        start = (path or Path.cwd()).resolve()
        if root := find_root(str(start)):
            return cls.open(Path(root))
        known = list_places() if path is None else []
        if len(known) == 1:
            return cls.open(Path(known[0].root))
        where = f"{start} lies in no workspace" + (f", and there are {len(known)} to choose from" if known else "")
        hint = "pier list shows them; change into one, or pier start TASK -d DIR" if known else "pier start TASK -d DIR"
        raise WorkspaceError(where, hint=hint, code="no-workspace")

    def save(self) -> None:
        """Write the settings, and link the local state to this directory."""
        self.pier.mkdir(exist_ok=True, mode=0o700)
        write_json(self.pier / CONFIG, self.config.model_dump(mode="json"))
        self.link()

    def link(self) -> None:
        """Link the local state to this directory."""
        self.state.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_json(self.state / LINK, {"path": str(self.root)}, mode=0o600)
        (self.state / GONE).unlink(missing_ok=True)

    @property
    def origin(self) -> Literal["here", "moved", "copied", "elsewhere"]:
        """The origin of the settings: written on this machine for this directory, for a directory that was moved here
        or for one that was copied here; or written elsewhere."""
        known = linked(str(self.state))
        if known is None or Path(known) == self.root:
            return "here" if known else "elsewhere"
        if not (Path(known) / PIER / CONFIG).exists():
            return "moved"
        original = _try_open(Path(known))
        return "copied" if original is not None and original.config == self.config else "elsewhere"

    def settle(self) -> None:
        """Give this directory its local state: the existing one after a move. A copy, or a directory from another
        machine, gets a new one, under a new id if its id is taken, so that the original is not affected."""
        if (origin := self.origin) == "here":
            return
        if origin != "moved" and linked(str(self.state)):
            self.config.id = secrets.token_hex(4)
        self.save()

    def check_known(self) -> None:
        """Refuse settings from elsewhere: they choose mounts of this machine's files and variables of commands."""
        if self.origin != "elsewhere":
            return
        config = self.config
        settings = {"mounts": config.mounts, "variables": sorted(config.env), "skills": [*map(str, config.skills)]}
        named = "; ".join(f"{kind}: {', '.join(values)}" for kind, values in settings.items() if values)
        raise WorkspaceError(
            f"the settings of {self.root} were not made on this machine, and they give its commands access to files "
            f"and variables" + (f" ({named})" if named else ""),
            hint="check .pier/workspace.json, then pier start -y",
            code="foreign-workspace",
        )

    def agreed(self) -> set[str]:
        """This machine's variables that the user agreed to give to the task."""
        return set(map(str, self._read(CONSENT, list)))

    def agree(self, names: set[str]) -> None:
        write_json(self.state / CONSENT, sorted(names), mode=0o600)

    def secret_env(self) -> dict[str, str]:
        """The values of secret variables, which are stored in the local state only."""
        return {str(name): str(value) for name, value in self._read(SECRETS, dict).items()}

    def keep_secrets(self, values: dict[str, str]) -> None:
        self.state.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_json(self.state / SECRETS, values, mode=0o600)

    def _read(self, name: str, kind: type[Any]) -> Any:
        try:
            value = json.loads((self.state / name).read_text())
        except (OSError, ValueError):
            value = None
        return value if isinstance(value, kind) else kind()

    def environment(self) -> dict[str, str]:
        """The workspace's variables with their values. `WorkspaceError` if the value of a secret is missing."""
        known = self.secret_env()
        missing = [name for name, value in self.config.env.items() if not value and name not in known]
        if missing:
            raise WorkspaceError(
                f"the value of {missing[0]} is not on this machine",
                hint=" ".join(["pier start", *(f"-e {name}=..." for name in missing)]),
                code="variable-lost",
            )
        return {name: known.get(name, value) for name, value in self.config.env.items()}

    def sessions(self) -> list[WorkspaceSession]:
        """The recorded runs of agents, oldest first; unreadable ones are skipped."""
        found: list[WorkspaceSession] = []
        for path in sorted(subdirectories(self.pier / "sessions")):
            with suppress(OSError, ValidationError):
                info = SessionInfo.model_validate_json((path / SESSION).read_bytes())
                found.append(WorkspaceSession(info, path))
        return sorted(found, key=lambda session: session.info.started_at)

    def session(self, id: str | None = None, agent: str | None = None) -> WorkspaceSession | None:
        """The newest recorded run with this id and agent."""
        for session in reversed(self.sessions()):
            if id in (None, session.info.id) and agent in (None, session.info.agent):
                return session
        return None

    def new_session(self, agent: str, command: list[str], **facts: Any) -> WorkspaceSession:
        directory = new_directory(self.pier / "sessions")
        info = SessionInfo(id=directory.name, agent=agent, command=command, started_at=datetime.now(UTC), **facts)
        session = WorkspaceSession(info, directory)
        session.write()
        return session


def new_directory(parent: Path) -> Path:
    """Make a directory named after the current time, with a number if the name is taken."""
    parent.mkdir(parents=True, exist_ok=True)
    stamp = datetime.now().strftime(STAMP)
    for number in range(1, _SUFFIXES):
        path = parent / (stamp if number == 1 else f"{stamp}-{number}")
        with suppress(FileExistsError):
            path.mkdir()
            return path
    raise WorkspaceError(f"cannot create a directory in {parent}: all names for this second are taken")


def workspaces_home() -> Path:
    return pier_home() / "workspaces"


def enclosing(path: Path) -> Workspace | None:
    """The workspace that contains a directory; the directory itself does not count."""
    outer = find_root(str(path.resolve().parent))
    return _try_open(Path(outer)) if outer else None


def _try_open(root: Path) -> Workspace | None:
    try:
        return Workspace.open(root)
    except WorkspaceError:
        return None


def subdirectories(directory: Path) -> list[Path]:
    """The directories in `directory`, without links; none if it is missing."""
    with suppress(OSError), os.scandir(directory) as entries:
        return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    return []
