"""Saves the trajectory of an agent's session in a trial directory.

The trajectory of a session that pier recorded is derived from the recording of its model calls, and the agent's session
log is copied. Without a recording the trajectory is converted from the log. The session is one of a workspace, of a
working directory on this machine (found in the agents' log directories), or of any directory with logs.
"""

from __future__ import annotations

import os
import posixpath
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from pier import __version__
from pier.agent.contract import AGENT_LOGS
from pier.errors import PierError, StorageError, UsageError
from pier.record import RECORDING, TRAJECTORY, About
from pier.record.reader import RecordingTooLarge
from pier.redact import Redactor
from pier.secret import secret_values
from pier.trajectory.derive import write_trajectory
from pier.trajectory.model import read
from pier.trajectory.native.convert import convert, find_sessions
from pier.tree import FAULTS, Entry, Tree, TreeError
from pier.trial.bounded import call_bounded
from pier.trial.result import AgentInfo, AgentResult, ModelInfo, PierInfo, TimingInfo, TrialResult, judge_as_harbor
from pier.trial.trajectory import summary_usage, usage_in
from pier.workspace.client import fetch
from pier.workspace.host_sessions import FINDERS, find_host_sessions
from pier.workspace.workspace import CAST, PIER, new_directory

if TYPE_CHECKING:
    from pier.trajectory.native.assemble import SessionLog
    from pier.workspace.workspace import Workspace, WorkspaceSession

_LATE = 10.0
"""Seconds after the end of a session until its log is complete."""
_MOST = 1 << 30
"""Maximum size of the logs copied out of a sandbox's directory."""
_CHUNK = 1 << 20
_LOGS = (".jsonl", ".json")
"""Suffixes of logs with a single session. A database may contain other sessions too, so it is not copied."""


@dataclass(frozen=True, slots=True)
class CapturedSession:
    """A session whose trajectory was written. `source` is `recording` or the path of the log."""

    agent: str
    version: str
    model: str | None
    result: AgentResult
    started_at: datetime | None
    ended_at: datetime | None
    id: str = ""
    source: str = ""

    @property
    def agent_info(self) -> AgentInfo:
        return AgentInfo(
            name=self.agent, version=self.version, model_info=ModelInfo(name=self.model) if self.model else None
        )

    @property
    def timing(self) -> TimingInfo:
        return TimingInfo(started_at=self.started_at, finished_at=self.ended_at)


def capture_session(
    workspace: Workspace | None,
    logs: Path,
    *,
    agent: str | None = None,
    session: str | None = None,
    session_dir: Path | None = None,
    redactor: Redactor | None = None,
    environ: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> CapturedSession | None:
    """Write the trajectory of the session with id `session`, else of the newest, to `logs`, the `agent` directory of a
    trial. None if there is no session. `directory` is the working directory of agents outside of workspaces."""
    found: CapturedSession | None = None
    if session_dir is not None:
        found = _from_directory(session_dir, logs, agent, session)
    elif workspace is not None:
        found = _from_workspace(workspace, logs, agent, session)
    if found is None and (workspace is None or workspace.is_host):
        place = directory or (workspace.root if workspace else Path.cwd())
        found = _from_host(place, logs, agent, session, environ)
    if found is not None and redactor:
        with Tree(logs) as tree:
            redactor.tree(tree)
    return found


def _from_directory(place: Path, logs: Path, agent: str | None, session: str | None) -> CapturedSession:
    """A session in any directory: a recording of pier, or logs of an agent."""
    if not place.exists():
        raise UsageError(f"{place}: no such file or directory", hint="pier capture --session-dir DIR -a AGENT")
    recording = place / RECORDING if place.is_dir() else place
    is_recording = recording.name == RECORDING and recording.is_file()
    if is_recording and (found := _derive(recording, logs, agent or "unknown", None, None, place.name)):
        return found
    if found := _newest(find_sessions(place, agent), logs, session):
        return found
    raise UsageError(f"no session {session!r} at {place}", code="no-session")


def _from_workspace(workspace: Workspace, logs: Path, agent: str | None, session: str | None) -> CapturedSession | None:
    recorded = workspace.session(session, agent)
    if workspace.is_host and recorded is None:
        return None
    since = recorded.info.started_at.timestamp() if recorded else 0.0
    with tempfile.TemporaryDirectory(prefix="pier-logs.") as name:
        place = take_logs(workspace.agent_logs, ".", Path(name) / "logs", since)
        found = _from_copy(recorded, place, logs, agent, session)
    return found and replace(found, source=found.source.replace(f"{place}/", f"{workspace.agent_logs}/"))


def take_logs(home: Path, below: str, target: Path, since: float = 0.0) -> Path:
    """Copy the logs below a path of `home`, which a sandbox can write to, to `target`: those modified at or after
    `since`. No link is followed and oversized logs are skipped, so that readers of the copy are safe from both."""
    target.mkdir()
    if not home.is_dir():
        return target
    left, below = _MOST, "" if below == "." else below
    with Tree(home) as tree, suppress(FileNotFoundError, NotADirectoryError, TreeError):
        top = tree.find(below) if below else Entry("", "directory")
        for entry in () if top is None else tree.entries(below) if top.kind == "directory" else (top,):
            if entry.kind == "file" and entry.size <= left:
                left -= _take_log(tree, entry.path, target / entry.path, since, left)
    return target


def _take_log(tree: Tree, path: str, target: Path, since: float, most: int) -> int:
    """Copy one log and its modification time; its size, or 0 if it was skipped. The log may change at the same time."""
    with suppress(FileNotFoundError, TreeError), tree.open(path) as stream:
        status = os.fstat(stream.fileno())
        if since <= status.st_mtime and status.st_size <= most:
            target.parent.mkdir(parents=True, exist_ok=True)
            left = status.st_size
            with target.open("wb") as out:
                while data := stream.read(min(_CHUNK, left)):
                    left -= out.write(data)
            os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
            return status.st_size
    return 0


def _from_copy(
    recorded: WorkspaceSession | None, place: Path, logs: Path, agent: str | None, session: str | None
) -> CapturedSession | None:
    if recorded is None:
        return _newest(_logs_at(place, agent), logs, session)
    info, found = recorded.info, None
    begin = info.started_at.timestamp()
    end = info.ended_at.timestamp() + _LATE if info.ended_at else float("inf")
    written = [log for log in _logs_at(place, info.agent) if begin <= _modified(log) <= end]
    first = min(written, key=_modified, default=None)  # the first log modified during the session
    if recorded.recording.is_file():
        found = _derive(recorded.recording, logs, info.agent, info.version, info.model, info.id)
    if found is not None and first is not None:
        _keep_log(first, logs)
    elif first is not None:
        found = _from_log(first, logs)
    if found is None:
        return None
    if recorded.cast.is_file():
        _copy(recorded.cast, logs / CAST)
    version = info.version or found.version
    times = {"started_at": info.started_at, "ended_at": info.ended_at}
    return replace(found, agent=info.agent, version=version, id=info.id, **times)


def _modified(log: SessionLog) -> float:
    return log.path.stat().st_mtime


def _newest(sessions: list[SessionLog], logs: Path, session: str | None) -> CapturedSession | None:
    newest = max((log for log in sessions if _matches(log, session)), key=_modified, default=None)
    return _from_log(newest, logs) if newest else None


def _logs_at(place: Path, agent: str | None) -> list[SessionLog]:
    with suppress(UsageError):
        return find_sessions(place, agent)
    return []


def _from_host(
    place: Path, logs: Path, agent: str | None, session: str | None, environ: Mapping[str, str] | None
) -> CapturedSession | None:
    if agent is not None and agent not in FINDERS:
        raise UsageError(
            f"cannot find sessions of {agent} by working directory: supported are {', '.join(FINDERS)}",
            hint=f"pier capture --session-dir DIR -a {agent}",
            code="no-session",
        )
    sessions = [found for found in find_host_sessions(place, agent, environ) if _matches(found.log, session)]
    return _from_log(sessions[0].log, logs) if sessions else None


def _matches(log: SessionLog, session: str | None) -> bool:
    """Whether `session` is a prefix of the session's id, or part of its log's file name."""
    return session is None or log.id.startswith(session) or session in log.path.name


def _derive(
    recording: Path, logs: Path, agent: str, version: str | None, model: str | None, id_: str
) -> CapturedSession | None:
    logs.mkdir(parents=True, exist_ok=True)
    _copy(recording, logs / RECORDING)
    about = About(agent, version or "unknown", model, id_)
    summary = write_trajectory(logs / RECORDING, logs / TRAJECTORY, about)
    if summary.path is None:
        (logs / RECORDING).unlink()
        return None
    known = read(summary.path)
    begin, end = _times([step.timestamp for step in known.steps])
    result = AgentResult.model_validate(summary_usage(summary))
    name = known.agent.model_name
    return CapturedSession(agent, version or "unknown", model or name, result, begin, end, id_, "recording")


def _from_log(log: SessionLog, logs: Path) -> CapturedSession:
    """Convert an agent's log to a trajectory, and copy the log."""
    logs.mkdir(parents=True, exist_ok=True)
    convert(log, logs / TRAJECTORY)
    _keep_log(log, logs)
    known = read(logs / TRAJECTORY)
    result = AgentResult(**usage_in(known))
    begin, end = _times([step.timestamp for step in known.steps])
    return CapturedSession(log.agent, log.version, log.model, result, begin, end, log.id, str(log.path))


def _keep_log(log: SessionLog, logs: Path) -> None:
    """Copy the logs of a session and its sub-agents, with their relative paths."""
    top = log.path.parent
    for each in (log, *log.children):
        if each.path.suffix not in _LOGS:
            continue
        inner = each.path.relative_to(top) if each.path.is_relative_to(top) else Path(each.path.name)
        _copy(each.path, logs / "sessions" / inner)


def _copy(source: Path, target: Path) -> None:
    """Copy a regular file, which may still be growing."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with Tree(source.parent) as tree, tree.open(source.name) as stream, target.open("wb") as out:
        shutil.copyfileobj(stream, out)


def _times(stamps: list[str | None]) -> tuple[datetime | None, datetime | None]:
    known = [stamp for stamp in stamps if stamp]
    with suppress(ValueError, IndexError):
        return datetime.fromisoformat(known[0]), datetime.fromisoformat(known[-1])
    return None, None


@dataclass(frozen=True, slots=True)
class Capture:
    """A captured session and its trial directory."""

    directory: Path
    session: CapturedSession


def capture(
    workspace: Workspace | None,
    *,
    agent: str | None = None,
    session: str | None = None,
    session_dir: str | None = None,
    output: Path | None = None,
    environ: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> Capture:
    """Save a session as a trial without a verdict, in `output`, else in `.pier/trials` of the workspace or the working
    directory. An incomplete trial is removed."""
    env = os.environ if environ is None else environ
    root = workspace.root if workspace else (directory or Path.cwd())
    home = output or root / PIER / "trials"
    missing = [path for path in (home, *home.parents) if not path.exists()]
    target = output or new_directory(home)
    target.mkdir(parents=True, exist_ok=True)
    if any(target.iterdir()):
        raise UsageError(f"{target}: the directory of a new trial must be empty", code="trial_directory")
    redactor = Redactor([*secret_values(env, env), *known_secrets(env, workspace)])
    scratch, place = target / ".incoming", None
    try:
        place = session_place(workspace, session_dir, scratch) if session_dir else None
        found = call_bounded(
            capture_session, workspace, target / "agent", agent=agent, session=session, session_dir=place,
            redactor=redactor, environ=dict(env), directory=root,
        )  # fmt: skip
        if found is None:
            raise nothing_found(workspace, root, agent, session)
        if place is not None and session_dir is not None:
            found = replace(found, source=found.source.replace(str(place), session_dir))
        shutil.rmtree(scratch, ignore_errors=True)
        _seal(target, found, workspace, root, redactor)
    except BaseException as error:
        shutil.rmtree(target, ignore_errors=True)
        for parent in missing:
            with suppress(OSError):
                parent.rmdir()
        if isinstance(error, MemoryError):
            raise RecordingTooLarge(f"cannot capture the session: to read its recording or log, {error}") from None
        if isinstance(error, OSError | TreeError) and getattr(error, "errno", None) in FAULTS:
            text = f"the session could not be saved to {target}: {error}"
            raise StorageError(text, hint="free some space, then pier capture again") from error
        if isinstance(error, UsageError) and place is not None and session_dir is not None:
            error.message = error.message.replace(str(place.resolve()), session_dir)
        raise
    return Capture(target, found)


def nothing_found(workspace: Workspace | None, root: Path, agent: str | None, session: str | None) -> UsageError:
    which = (f" {session!r}" if session else "") + (f" of {agent}" if agent else "")
    if workspace is not None and not workspace.is_host:
        text, hint = f"no session{which} was recorded in {root}", "pier exec claude starts one"
    else:
        text = f"no session{which} was found for {root}; searched the logs of {agent or ', '.join(FINDERS)}"
        hint = "pier capture --session-dir DIR -a AGENT"
    return UsageError(text, hint=hint, code="no-session")


def session_place(workspace: Workspace | None, path: str, scratch: Path) -> Path:
    """The directory of session logs on this machine. In a workspace with a sandbox `path` is a path in the sandbox, and
    the logs are copied to `scratch`."""
    if workspace is None or workspace.is_host:
        return Path(path).expanduser()
    if path == AGENT_LOGS or path.startswith(f"{AGENT_LOGS}/"):
        below = posixpath.normpath(path[len(AGENT_LOGS) :].lstrip("/") or ".")
        if below.startswith(".."):
            raise UsageError(f"{path} is outside of the agents' logs", code="no-session")
        return take_logs(workspace.agent_logs, below, scratch) / below
    fetch(workspace, path, scratch)
    if scratch.is_symlink():
        raise UsageError(f"{path} is a link in the sandbox: use its target instead", code="no-session")
    return scratch


def known_secrets(environ: Mapping[str, str], workspace: Workspace | None) -> list[str]:
    """The workspace's secrets and the tokens of the user's logins, which an agent on this machine could read."""
    from pier.gateway.login import LoginRefused
    from pier.gateway.logins import LOGINS, find_login

    found = [*secret_values(workspace.secret_env(), environ, given=True)] if workspace else []
    for kind in LOGINS:
        login = find_login(kind, environ)
        if isinstance(login, str):
            found.append(login)
        elif login is not None:
            with suppress(LoginRefused):
                found += [login.tokens.access, login.tokens.refresh or ""]
    return [*filter(None, found)]


def _seal(target: Path, found: CapturedSession, workspace: Workspace | None, root: Path, redactor: Redactor) -> None:
    """Write the trial's `config.json` and `result.json`."""
    from pier.trial.record import TrialRecord

    name, digest, reference = _task(workspace, root)
    agent = {"name": found.agent, "import_path": None, "model_name": found.model, "kwargs": {}, "env": {}}
    config = {"task": reference, "trial_name": target.name, "trials_dir": str(target.parent), "agent": agent}
    now = datetime.now(UTC)
    result = TrialResult(
        task_name=name,
        trial_name=target.name,
        trial_uri=target.resolve().as_uri(),
        task_id=reference,
        task_checksum=digest.removeprefix("sha256:"),
        config=config,
        agent_info=found.agent_info,
        agent_result=found.result,
        n_agent_steps=found.result.n_agent_steps,
        agent_execution=found.timing,
        started_at=found.started_at or now,
        finished_at=found.ended_at or now,
        pier=PierInfo(version=__version__, backend="", task_digest=digest),
    )
    judge_as_harbor(result)
    record = TrialRecord(target, redactor)
    record.write("config.json", config)
    record.write("result.json", result)


def _task(workspace: Workspace | None, root: Path) -> tuple[str, str, dict[str, str]]:
    """Name, digest and reference of the workspace's task; those of the directory if there is none."""
    path = workspace.config.task_path if workspace else None
    if path is not None:
        from pier.task import load_task

        try:
            task = load_task(path, verify=False)
            return task.name, task.digest, {"path": str(path)}
        except PierError:
            return path.name, "", {"path": str(path)}
    return root.resolve().name or "root", "", {"path": str(root.resolve())}
