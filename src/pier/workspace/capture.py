"""Takes the trajectory of an agent's session into a trial directory.

A session that pier recorded is taken from the recording of its model calls; the agent's own log is kept with it. A
session without a recording is taken from that log alone. Sessions are those of a workspace, of a directory of this
machine (the agents' usual places are searched by working directory), or of any directory that holds logs.
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
from pier.record.reader import RecordingTooLarge
from pier.redact import Redactor
from pier.secret import secret_values
from pier.trajectory import TrajectoryHeader
from pier.trajectory.model import read
from pier.trajectory.native.convert import convert, find_sessions
from pier.tree import FAULTS, Tree, TreeError
from pier.trial.agent import RECORDING, TRAJECTORY, derive, summary_usage
from pier.trial.bounded import call_bounded
from pier.trial.result import AgentInfo, AgentResult, ModelInfo, PierInfo, TimingInfo, TrialResult, judge_as_harbor
from pier.workspace.client import fetch
from pier.workspace.host_sessions import FINDERS, find_host_sessions
from pier.workspace.workspace import CAST, PIER, new_directory

if TYPE_CHECKING:
    from pier.trajectory.native.assemble import SessionLog
    from pier.workspace.workspace import Workspace, WorkspaceSession

_LATE = 10.0
"""Seconds after the end of a session in which its log may still be written."""
_MOST = 1 << 30
"""Bytes of logs that are taken out of a sandbox's reach."""
_CHUNK = 1 << 20
_LOGS = (".jsonl", ".json")
"""Logs of one session each. A database holds those of others too, so it is not kept."""


@dataclass(frozen=True, slots=True)
class CapturedSession:
    """A session whose trajectory was written. `source` says where that came from."""

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
    """Write the trajectory of a session into `logs`, the `agent` directory of a trial: the newest, or the one named by
    `session`. None if there is none. `directory` is where the user's own agents worked; else it is the workspace."""
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
    """A session of any directory: a recording that pier made, or logs of an agent."""
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
    """Copy logs that a sandbox can write to out to `target`: those below a path that were written to `since` then. No
    link is followed, and what is too large is left out, so what reads the copy reads nothing else."""
    target.mkdir()
    if not home.is_dir():
        return target
    left = _MOST
    with Tree(home) as tree, suppress(FileNotFoundError, NotADirectoryError, TreeError):
        top = tree.find(below) if below != "." else None
        alone = below != "." and (top is None or top.kind != "directory")
        for entry in [top] if alone else tree.entries("" if below == "." else below):
            if entry is not None and entry.kind == "file" and entry.size <= left:
                left -= _take_log(tree, entry.path, target / entry.path, since, left)
    return target


def _take_log(tree: Tree, path: str, target: Path, since: float, most: int) -> int:
    """Copy one log with its time; how many bytes that were. It may grow or shrink meanwhile."""
    with suppress(FileNotFoundError, TreeError), tree.open(path) as stream:
        found = os.fstat(stream.fileno())
        if since <= found.st_mtime and found.st_size <= most:
            target.parent.mkdir(parents=True, exist_ok=True)
            left = found.st_size
            with target.open("wb") as out:
                while data := stream.read(min(_CHUNK, left)):
                    left -= out.write(data)
            os.utime(target, ns=(found.st_atime_ns, found.st_mtime_ns))
            return found.st_size
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
    own = min(written, key=_modified, default=None)  # the first that was written to while it ran
    if recorded.recording.is_file():
        found = _derive(recorded.recording, logs, info.agent, info.version, info.model, info.id)
    if found is not None and own is not None:
        _keep_log(own, logs)
    elif own is not None:
        found = _from_log(own, logs)
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
    newest = max((log for log in sessions if _fits(log, session)), key=_modified, default=None)
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
    sessions = [found for found in find_host_sessions(place, agent, environ) if _fits(found.log, session)]
    return _from_log(sessions[0].log, logs) if sessions else None


def _fits(log: SessionLog, session: str | None) -> bool:
    """Whether a session has this id, or one that begins so, or a log whose name has it."""
    return session is None or log.id.startswith(session) or session in log.path.name


def _derive(
    recording: Path, logs: Path, agent: str, version: str | None, model: str | None, id_: str
) -> CapturedSession | None:
    logs.mkdir(parents=True, exist_ok=True)
    _copy(recording, logs / RECORDING)
    summary = derive(logs, TrajectoryHeader(agent, version or "unknown", model, id_))
    if summary.path is None:
        (logs / RECORDING).unlink()
        return None
    known = read(summary.path)
    begin, end = _times([step.timestamp for step in known.steps])
    result = AgentResult.model_validate(summary_usage(summary))
    name = known.agent.model_name
    return CapturedSession(agent, version or "unknown", model or name, result, begin, end, id_, "recording")


def _from_log(log: SessionLog, logs: Path) -> CapturedSession:
    """The trajectory of an agent's own log, which is kept with it."""
    logs.mkdir(parents=True, exist_ok=True)
    convert(log, logs / TRAJECTORY)
    _keep_log(log, logs)
    known = read(logs / TRAJECTORY)
    final = known.final_metrics
    extra = (final.extra if final else None) or {}
    result = AgentResult(
        n_input_tokens=final.total_prompt_tokens if final else None,
        n_output_tokens=final.total_completion_tokens if final else None,
        n_cache_tokens=final.total_cached_tokens if final else None,
        cost_usd=final.total_cost_usd if final else None,
        peak_context_tokens=extra.get("peak_context_tokens"),
        summarization_count=extra.get("summarization_count"),
        n_agent_steps=len(known.agent_steps),
    )
    begin, end = _times([step.timestamp for step in known.steps])
    return CapturedSession(log.agent, log.version, log.model, result, begin, end, log.id, str(log.path))


def _keep_log(log: SessionLog, logs: Path) -> None:
    """Copy the log of a session and those of its sub-agents, in the places they have to each other."""
    top = log.path.parent
    for each in (log, *log.children):
        if each.path.suffix not in _LOGS:
            continue
        inner = each.path.relative_to(top) if each.path.is_relative_to(top) else Path(each.path.name)
        _copy(each.path, logs / "sessions" / inner)


def _copy(source: Path, target: Path) -> None:
    """Copy a regular file, which its writer may still append to."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with Tree(source.parent) as tree, tree.open(source.name) as stream, target.open("wb") as out:
        shutil.copyfileobj(stream, out)


def _times(stamps: list[str | None]) -> tuple[datetime | None, datetime | None]:
    known = [stamp for stamp in stamps if stamp]
    if not known:
        return None, None
    try:
        return datetime.fromisoformat(known[0]), datetime.fromisoformat(known[-1])
    except ValueError:
        return None, None


@dataclass(frozen=True, slots=True)
class Capture:
    """A captured session and the trial directory that it was written to."""

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
    """Save a session as a trial without a verdict: in the workspace's `.pier/trials`, in that of the working directory,
    or in `output`. What could not be saved whole is removed again."""
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
            words = f"cannot capture the session: to read its recording or log, {error}"
            raise RecordingTooLarge(words) from None
        if isinstance(error, OSError | TreeError) and getattr(error, "errno", None) in FAULTS:
            words = f"the session could not be saved to {target}: {error}"
            raise StorageError(words, hint="free some space, then pier capture again") from error
        if isinstance(error, UsageError) and place is not None and session_dir is not None:
            error.message = error.message.replace(str(place.resolve()), session_dir)
        raise
    return Capture(target, found)


def nothing_found(workspace: Workspace | None, root: Path, agent: str | None, session: str | None) -> UsageError:
    which = (f" {session!r}" if session else "") + (f" of {agent}" if agent else "")
    if workspace is not None and not workspace.is_host:
        words, hint = f"no session{which} was recorded in {root}", "pier exec claude starts one"
    else:
        words = f"no session{which} was found for {root}; searched the logs of {agent or ', '.join(FINDERS)}"
        hint = "pier capture --session-dir DIR -a AGENT"
    return UsageError(words, hint=hint, code="no-session")


def session_place(workspace: Workspace | None, path: str, scratch: Path) -> Path:
    """Where the logs are on this machine. In a workspace with a sandbox a path is one inside of it."""
    if workspace is None or workspace.is_host:
        return Path(path).expanduser()
    if path == AGENT_LOGS or path.startswith(f"{AGENT_LOGS}/"):
        below = posixpath.normpath(path[len(AGENT_LOGS) :].lstrip("/") or ".")
        if below.startswith(".."):
            raise UsageError(f"{path} is outside of the agents' logs", code="no-session")
        return take_logs(workspace.agent_logs, below, scratch) / below
    fetch(workspace, path, scratch)
    if scratch.is_symlink():
        raise UsageError(f"{path} is a link in the sandbox: name where it leads", code="no-session")
    return scratch


def known_secrets(environ: Mapping[str, str], workspace: Workspace | None) -> list[str]:
    """The tokens of the user's own logins, which an agent on this machine could read, and the workspace's secrets."""
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
    """Write the files that make a trial of it."""
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
    record.write_config(config)
    record.write_result(result)


def _task(workspace: Workspace | None, root: Path) -> tuple[str, str, dict[str, str]]:
    """Name, digest and reference of the task that was worked on; the directory stands for a task that is unknown."""
    path = workspace.config.task_path if workspace else None
    if path is not None:
        from pier.task import load_task

        try:
            task = load_task(path, verify=False)
            return task.name, task.digest, {"path": str(path)}
        except PierError:
            return path.name, "", {"path": str(path)}
    return root.resolve().name or "root", "", {"path": str(root.resolve())}
