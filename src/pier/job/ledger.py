"""A job's journal: the authoritative record of planned, started and finished trials.

One JSON line per event in `journal.jsonl`, append-only. Opening a job reads this one file, whatever its number of
trials; result files are read only for trials with a start and no end in the journal.

    {"e": "job", "id": ..., "at": ...}                              the job was created
    {"e": "plan", "tasks": [...], "agents": [...], "trials": [...]} the planned trials; a later plan replaces it
    {"e": "run", "pid": ..., "at": ...}                             a runner started
    {"e": "start", "trial": ID, "try": N, "at": ...}                a try of a trial started
    {"e": "end", "trial": ID, "try": N, ...}                        the try ended, with all data for summaries
    {"e": "again", "trial": ID, "why": ..., "kept": DIR}            its result no longer counts; its files are in DIR
    {"e": "used", "turns": ..., "cost": ...}                        the usage of the job's budget so far
    {"e": "done", "at": ...}                                        all trials were finished

Each job directory has at most one runner. It holds a record lock on `.owner`, which the kernel releases when the
process ends and which children do not inherit. A lock that can be acquired therefore has no living owner; for a lock
that is held, the kernel reports the process.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import stat
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from pier.errors import JobError, PierError
from pier.figures import Cost, TokenTotals
from pier.files import Journal, read_journal
from pier.job.plan import Plan
from pier.redact import Redactor
from pier.tree import TreeError, open_regular
from pier.trial.result import AgentResult, ExceptionInfo, TrialResult, failure_cause, read_result, storage_fault

JOURNAL = "journal.jsonl"
VERSION = 2
"""Version of trial identities. Version 1 ignored values that are 0 or false, file contents, and secrets."""


class Used(NamedTuple):
    """The usage of a job with a budget: turns, input and output tokens, dollars, and seconds if they are limited."""

    turns: int = 0
    read: int = 0
    written: int = 0
    cost: float = 0.0
    seconds: float = 0.0


def now() -> str:
    """Return the current time in the format of a job's files."""
    return datetime.now(UTC).isoformat()


@dataclass(slots=True)
class Ledger:
    """The state of a job, in memory and on disk. Only the job's owner calls the methods that write."""

    directory: Path
    id: str
    created_at: str
    plan: Plan = field(default_factory=Plan)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    """Outcomes that count (neither cancelled nor voided), by trial id."""
    tries: dict[str, int] = field(default_factory=dict)
    """Number of the last try that started, by trial id."""
    open: set[str] = field(default_factory=set)
    """Trials with a start and no end."""
    used: Used = field(default_factory=Used)
    """Usage of the job's budget."""
    n_retries: int = 0
    version: int = VERSION
    finished_at: str | None = None
    lost_lines: int = 0
    _journal: Journal | None = None
    _dirty: bool = False

    @classmethod
    def create(cls, directory: Path, asked: str = "") -> Ledger:
        """Create the ledger of a new job. `asked` is the digest of its settings, by which the same command finds it."""
        ledger = cls(directory, str(uuid4()), now())
        ledger.write({"e": "job", "v": VERSION, "id": ledger.id, "at": ledger.created_at, "asked": asked})
        return ledger

    @classmethod
    def read(cls, directory: Path) -> Ledger:
        """Read the ledger of an existing job."""
        if (ledger := cls.find(directory)) is None:
            raise not_a_job(directory)
        return ledger

    @classmethod
    def find(cls, directory: Path) -> Ledger | None:
        """Read the ledger of a job; None if it is missing or unreadable."""
        ledger = cls(directory, "", "")
        for line in _lines(directory / JOURNAL):
            try:
                ledger._apply(line)
            except (KeyError, TypeError, IndexError, ValueError):
                ledger.lost_lines += 1
        return ledger if ledger.id else None

    def _apply(self, line: dict[str, Any]) -> None:
        event = line["e"]
        if event == "end":
            self.open.discard(line["trial"])
            outcome = Outcome.from_line(line)
            if not outcome.cancelled:
                self.outcomes[line["trial"]] = outcome
        elif event == "start":
            self.tries[line["trial"]] = line["try"]
            self.open.add(line["trial"])
            self.finished_at = None
        elif event == "again":
            self.outcomes.pop(line["trial"], None)
            self.open.discard(line["trial"])
            self.n_retries += line.get("why") == "retry"
        elif event == "plan":
            self.plan = Plan.from_line(line)
        elif event == "job":
            self.id, self.created_at, self.version = line["id"], line["at"], line.get("v", 1)
        elif event == "used":
            self.used = Used(line["turns"], line["input"], line["output"], line["cost"], line.get("seconds", 0.0))
        elif event == "done":
            self.finished_at = line["at"]

    def write(self, line: dict[str, Any]) -> None:
        """Append one event and apply it. Call `sync` from time to time to make events durable."""
        if self._journal is None:
            self._journal = Journal(self.directory / JOURNAL)
        self._journal.append(line)
        self._dirty = True
        self._apply(line)

    def adopt_plan(self, plan: Plan) -> None:
        """Replace the job's plan; outcomes of trials in the new plan still count."""
        self.write(plan.to_line())

    def begin(self, trial: str) -> int:
        """Record the start of a new try of a trial and return its number."""
        number = self.tries.get(trial, 0) + 1
        self.write({"e": "start", "trial": trial, "try": number, "at": now()})
        return number

    def end(self, trial: str, outcome: Outcome) -> None:
        """Record the outcome of the last try of a trial."""
        self.write({"e": "end", "trial": trial, "try": self.tries.get(trial, 1), "at": now(), **outcome.to_line()})

    def again(self, trial: str, why: str, kept: str | None) -> None:
        """Void the last try of a trial. `why` is `retry`, `interrupted`, `asked` or `lost`."""
        self.write({"e": "again", "trial": trial, "why": why, "kept": kept, "at": now()})

    def note_used(self, used: Used) -> None:
        """Record the usage of the job's budget so far."""
        line = {"e": "used", "turns": used.turns, "input": used.read, "output": used.written, "cost": used.cost}
        self.write({**line, "seconds": used.seconds} if used.seconds else line)

    def finish(self) -> None:
        """Record that all trials are finished."""
        self.write({"e": "done", "at": now()})

    def sync(self) -> None:
        """Flush all events to disk, so that they survive a power failure. Blocks."""
        if self._dirty and self._journal is not None:
            self._dirty = False
            self._journal.sync()

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def owed(self) -> Iterable[str]:
        """Yield the ids of planned trials without an outcome, in order."""
        return (trial.id for trial in self.plan.trials if trial.id not in self.outcomes)


def _lines(path: Path) -> Iterable[Any]:
    """Return the lines of a journal. Parsing it as one list is several times faster than line by line, which is the
    fallback for torn lines."""
    try:
        with open_regular(path) as stream:
            data = stream.read()
    except (OSError, TreeError):
        return ()
    try:
        return json.loads(b"[" + data[:-1].replace(b"\n", b",") + b"]") if data.endswith(b"\n") else read_journal(path)
    except (ValueError, RecursionError):
        return read_journal(path)


def not_a_job(directory: Path) -> JobError:
    """Return the error for a directory that is not a job, with the command to use instead."""
    if not directory.exists():
        return JobError(f"{directory}: no such directory", hint="pier job list", code="not-a-job")
    if not directory.is_dir():
        return JobError(f"{directory} is a file, not a job", hint="pier job list", code="not-a-job")
    if (directory / "trial.log").exists():
        return JobError(f"{directory} is a trial, not a job", hint=f"pier trial show {directory}", code="not-a-job")
    return JobError(f"{directory} is not a job: it has no readable {JOURNAL}", hint="pier job list", code="not-a-job")


OWNER = ".owner"
_FLOCK = "hh4xqqi4x"
"""`struct flock` of 64-bit Linux, to query the holder of a lock without acquiring it."""

_held: set[Path] = set()


@contextmanager
def owning(directory: Path) -> Iterator[None]:
    """Become the only runner of the job in `directory`, or raise a `JobError` that names the current runner."""
    path = directory.resolve() / OWNER
    if path in _held:
        raise taken(directory, Owner(os.getpid()))
    fd = _open_owner(path, os.O_RDWR | os.O_CREAT)
    try:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise taken(directory, _holder(fd)) from None
        _held.add(path)
        try:
            me = {"pid": os.getpid(), "host": socket.gethostname(), "since": datetime.now(UTC).isoformat()}
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps(me).encode(), 0)
            yield
        finally:
            _held.discard(path)
    finally:
        os.close(fd)


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that runs a job. `here` is set if the kernel reported it, so it runs on this machine."""

    pid: int
    host: str = ""
    since: str = ""
    here: bool = True

    def __str__(self) -> str:
        if self.here and self.pid == os.getpid():
            return f"this process ({self.pid})"
        since = f" since {self.since}" if self.since else ""
        return f"process {self.pid} on {self.host}{since}" if self.pid > 0 else "another process"


def current_owner(directory: Path) -> Owner | None:
    """Return the runner of the job, or None if it is not running."""
    path = directory.resolve() / OWNER
    if path in _held:
        return Owner(os.getpid())
    try:
        fd = _open_owner(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        return _holder(fd)
    finally:
        os.close(fd)


def _open_owner(path: Path, flags: int) -> int:
    """Open the owner file without following a link or blocking on a fifo; `OSError` if it is not a regular file."""
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file with one name", str(path))
    return fd


def _holder(fd: int) -> Owner | None:
    """Return the process that holds the lock on a file. A process that just acquired it may not have written the file
    yet."""
    query = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, query))
    if kind == fcntl.F_UNLCK:
        return None
    host = socket.gethostname()
    try:
        data = json.loads(os.pread(fd, 4096, 0))
        recorded = Owner(int(data["pid"]), str(data["host"]), str(data["since"]), here=False)
    except (ValueError, KeyError, TypeError):
        recorded = Owner(0, host, here=False)
    if pid <= 0 or recorded.host != host:
        return recorded
    return Owner(pid, host, recorded.since if recorded.pid == pid else "")


def stop_owner(directory: Path, owner: Owner) -> None:
    """Ask the runner of a job to shut down cleanly, like Ctrl-C; a second request limits its clean-up. Raises
    `JobError` if this process cannot signal it."""
    if not owner.here:
        raise JobError(f"cannot stop {directory}: {owner} runs it, which is not on this machine", code="job-owned")
    try:
        process = os.pidfd_open(owner.pid)
    except ProcessLookupError:
        return
    try:
        holder = current_owner(directory)
        if holder and holder.pid == owner.pid:  # the pid was not reused in the meantime
            signal.pidfd_send_signal(process, signal.SIGTERM)
    except ProcessLookupError:
        return
    except PermissionError:
        why = f"{owner} runs it, which belongs to another user"
        raise JobError(f"cannot stop {directory}: {why}", code="job-owned") from None
    finally:
        os.close(process)


def taken(directory: Path, owner: Owner | None) -> JobError:
    """Return the error for an action that is impossible while the job runs."""
    return JobError(
        f"the job {directory} is being run by {owner or 'another process'}",
        hint=f"pier job logs -f {directory}, or: pier job stop {directory}",
        code="job-owned",
    )


RESULT = "result.json"
CANCELLED = "CancelledError"
_WITHOUT_MODELS = ("oracle", "nop", "kept-state")
_AGENT_ERRORS = ("AgentTimeoutError", "NonZeroAgentExitCodeError")
_BLAME_BY_CAUSE = {"verifier_failed": "task", "model_provider_failed": "provider"}
_NO_VERDICT = "job-budget"
"""Error code of a trial that was cut off by the job's budget: it counts as cancelled and is still owed."""


@dataclass(frozen=True, slots=True)
class Fault:
    """The error of a try: its class name and code, the blame, and whether a retry may succeed."""

    type: str
    code: str
    blame: str
    retryable: bool
    message: str
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one try of a trial. `rewards` is None without a verdict; unknown usage and cost are None."""

    rewards: dict[str, float] | None = None
    fault: Fault | None = None
    cancelled: bool = False
    tokens: tuple[int | None, int | None, int | None] = (None, None, None)
    cost: float | None = None
    seconds: float = 0.0
    steps: tuple[int, int] | None = None
    """Graded steps and all steps of a multi-step task."""
    size: int = 0
    """Size of the result file, to detect a torn one without reading it."""

    def to_line(self) -> dict[str, Any]:
        """Return the fields of a journal line, without empty ones."""
        f, known = self.fault, any(count is not None for count in self.tokens)
        more = {
            "fault": [f.type, f.code, f.blame, f.retryable, f.message[:500]] if f else None,
            "hint": f.hint[:500] if f and f.hint else None,
            "cancelled": self.cancelled or None,
            "tokens": list(self.tokens) if known else None,
            "cost": self.cost,
            "steps": list(self.steps) if self.steps else None,
        }
        line = {"rewards": self.rewards, "seconds": round(self.seconds, 4), "size": self.size}
        return line | {name: value for name, value in more.items() if value is not None}

    @classmethod
    def from_line(cls, line: dict[str, Any]) -> Outcome:
        fault, tokens, steps = line.get("fault"), line.get("tokens"), line.get("steps")
        return cls(
            rewards=line["rewards"],
            fault=Fault(*fault, hint=line.get("hint")) if fault else None,
            cancelled=line.get("cancelled", False),
            tokens=(tokens[0], tokens[1], tokens[2]) if tokens else (None, None, None),
            cost=line.get("cost"),
            seconds=line.get("seconds", 0.0),
            steps=(steps[0], steps[1]) if steps else None,
            size=line.get("size", 0),
        )


def outcome_of(result: TrialResult, directory: Path) -> Outcome:
    """Return the outcome of the trial in `directory` with this result."""
    info, pier = result.exception_info, result.pier
    used = [result.agent_result] if result.agent_result else [step.agent_result for step in result.step_results or ()]
    infos = (info, *(step.exception_info for step in result.step_results or ()))
    cut_off = any(each is not None and each.code == _NO_VERDICT for each in infos)
    cancelled = cut_off or (info is not None and info.exception_type == CANCELLED)
    tokens, cost = _usage(result, [each for each in used if each is not None])
    began, ended = result.started_at, result.finished_at
    rewards = None if cut_off else result.rewards
    return Outcome(
        rewards=dict(rewards) if rewards is not None else None,
        fault=_fault(result, info) if info is not None and not cancelled else None,
        cancelled=cancelled,
        tokens=tokens,
        cost=cost,
        seconds=(ended - began).total_seconds() if began and ended else 0.0,
        steps=(pier.graded_steps or 0, pier.n_steps) if pier and pier.n_steps is not None else None,
        size=size_of(directory),
    )


def _fault(result: TrialResult, info: ExceptionInfo) -> Fault:
    """Return the error of a result. For Harbor's results the blame is derived from the recorded cause."""
    cause = result.failure_cause or failure_cause(info)
    known = "agent" if info.exception_type in _AGENT_ERRORS else _BLAME_BY_CAUSE.get(cause, "infra")
    return Fault(
        type=info.exception_type,
        code=info.code or info.exception_type,
        blame=info.blame or known,
        retryable=bool(info.retryable),
        message=info.exception_message,
        hint=info.hint,
    )


def _usage(
    result: TrialResult, used: Sequence[AgentResult]
) -> tuple[tuple[int | None, int | None, int | None], float | None]:
    """Return the tokens and the cost of a trial over its steps. A trial whose agent never started cost nothing."""
    tokens, cost = TokenTotals(), Cost()
    for each in used:
        tokens.add(each.n_input_tokens, each.n_cache_tokens, each.n_output_tokens)
        cost.add(each.cost_usd)
    free = result.agent_info.name in _WITHOUT_MODELS or not used
    return (tokens.input, tokens.cached, tokens.output), 0.0 if free else cost.total


def outcome_of_error(error: Exception, redactor: Redactor) -> Outcome:
    """Return the outcome of a trial that failed before it wrote its result."""
    error = storage_fault(error) or error
    known = isinstance(error, PierError)
    fault = Fault(
        type=type(error).__name__,
        code=error.code if known else type(error).__name__,
        blame=error.blame if known else "infra",
        retryable=error.retryable if known else False,
        message=redactor.text(str(error)) or type(error).__name__,
        hint=redactor.text(error.hint) if known and error.hint else None,
    )
    return Outcome(fault=fault, cost=0.0)


def read_outcome(directory: Path) -> Outcome | None:
    """Return the outcome in a trial's directory; None if its result is missing, empty, torn or invalid."""
    try:
        return outcome_of(read_result(directory), directory)
    except JobError:
        return None


def size_of(directory: Path, name: str = RESULT) -> int:
    """Return the size of a file, by default the result; 0 if it is missing."""
    try:
        return (directory / name).stat().st_size
    except OSError:
        return 0
