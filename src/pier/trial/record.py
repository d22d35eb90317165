"""The files of one trial's directory, and its clocks.

Files are written atomically or appended to, without secrets. `config.json` and `lock.json` have Harbor's format.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from pier import files
from pier.beneath import write_all
from pier.errors import PierError, UsageError
from pier.image.model import Image, OnProgress
from pier.network.policy import Decision, OnDecision
from pier.redact import Redactor, StreamRedactor
from pier.sandbox import BACKENDS
from pier.sandbox.contract import Stream
from pier.secret import env_on_disk
from pier.task import Origin
from pier.trial.config import AgentConfig, EnvironmentConfig, VerifierConfig
from pier.trial.result import ALL_CLOCKS, MULTIPLIERS, TimingInfo, TrialResult, lock_row
from pier.trial.spec import OnPhase, Phase, SandboxChoice, TrialSpec

OUTPUT_LIMIT = 64 * 1024 * 1024
"""Maximum bytes of a program's output in its file."""


class TrialRecord:
    """Writes the files of one trial, if they are `kept`."""

    def __init__(self, directory: Path, redactor: Redactor, *, kept: bool = True) -> None:
        self.directory = directory
        self.redactor = redactor
        self.kept = kept
        self.image: Image | None = None
        """The image of the sandbox, once it is known."""
        self.warnings: list[str] = []
        self.refused: Counter[str] = Counter()
        self.watch: OnDecision | None = None
        """Receives the decisions of the network policy."""
        self.fault: OSError | None = None
        """The first error of writing a log: a trial with an incomplete record has no verdict."""
        self._open = False
        self._log: int | None = None
        self._network = files.Journal(directory / "network.jsonl")

    def open(self) -> None:
        """Create the directory, which must be new or empty."""
        self._open = True
        if not self.kept:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        if os.listdir(self.directory):
            raise UsageError(f"{self.directory}: the directory of a new trial must be empty", code="trial_directory")
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._log = os.open(self.directory / "trial.log", flags, 0o644)

    def log(self, text: str) -> None:
        """Add a line to `trial.log`."""
        if self._log is not None:
            now = datetime.now(UTC).isoformat(timespec="milliseconds")[:-6]
            line = f"{now}Z {printable(self.redactor.text(text))}\n".encode(errors="replace")
            try:
                write_all(self._log, line)
            except OSError as error:
                self.fault = self.fault or error

    def report(self, line: str, on_progress: OnProgress | None) -> None:
        """Log a line of progress and report it."""
        self.log(line)
        if on_progress is not None:
            on_progress(self.redactor.text(line))

    def warn(self, text: str) -> None:
        """Log a warning, which the result lists too."""
        self.warnings.append(self.redactor.text(text))
        self.log(f"warning: {text}")

    def write_exception(self, text: str) -> None:
        if self.kept:
            files.write(self.directory / "exception.txt", self.redactor.text(text), durable=False)

    def write(self, name: str, value: dict[str, Any] | TrialResult) -> None:
        """Write a JSON file. `result.json` is the last one, and durable."""
        if not self.kept:
            return
        plain = value if isinstance(value, dict) else value.model_dump(mode="json")
        content = to_json(self.redactor.value(plain), indent=2)
        files.write(self.directory / name, content + b"\n", durable=isinstance(value, TrialResult))

    def note_network(self, decision: Decision) -> None:
        """Append a decision of the network policy to `network.jsonl`, and count refusals."""
        if not self._open:
            return
        if self.watch is not None:
            self.watch(decision)
        if not decision.allowed:
            port = f":{decision.port}" if decision.port else ""
            self.refused[f"{decision.kind} {decision.name}{port}"] += decision.count
        if not self.kept:
            return
        try:
            self._network.append(self.redactor.value(decision.line()))
        except OSError as error:
            self.fault = self.fault or error
            self.log(f"could not write a line of network.jsonl: {error}")

    def output(self, path: Path) -> OutputFile:
        return OutputFile(path if self.kept else None, self.redactor)

    def close(self) -> None:
        self._open = False
        self._network.close()
        if self._log is not None:
            os.close(self._log)
            self._log = None


def printable(text: str) -> str:
    """`text` with control characters escaped: an agent's text must not move the cursor or forge a line."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


class OutputFile:
    """Appends the output of a program to a file, or drops it without a path. A context manager and an `OnOutput`.

    If there are secrets, incomplete lines are held back, and more while a secret may have begun, so that a secret in
    several pieces is removed too.
    """

    def __init__(self, path: Path | None, redactor: Redactor, limit: int = OUTPUT_LIMIT) -> None:
        self.path = path
        self._left = limit
        self._dropped = 0
        self._clean = {name: StreamRedactor(redactor) for name in ("stdout", "stderr")} if redactor else {}
        self._fd = -1

    def __enter__(self) -> OutputFile:
        if self.path is None:
            return self
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        try:
            self._fd = os.open(self.path, flags, 0o600)
        except FileNotFoundError:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, flags, 0o600)
        return self

    def __call__(self, stream: Stream, data: bytes) -> None:
        if self._fd >= 0:
            self._write(self._clean[stream].feed(data) if self._clean else data)

    def __exit__(self, *_: object) -> None:
        if self._fd < 0:
            return
        for stream in self._clean.values():
            self._write(stream.close())
        if self._dropped:
            os.write(self._fd, f"\n[{self._dropped} more bytes were not kept]\n".encode())
        os.close(self._fd)

    def _write(self, data: bytes) -> None:
        kept = data[: self._left]
        self._dropped += len(data) - len(kept)
        self._left -= len(kept)
        write_all(self._fd, kept)


_HARBOR_BACKENDS = frozenset({"docker", "modal", "podman", "daytona", "e2b", "gke", "ec2"})


def task_reference(origin: Origin) -> dict[str, Any]:
    """The task's identity in Harbor's format: a path, or a path in a commit of a repository."""
    if origin.git_url:
        return {"git_url": origin.git_url, "git_commit_id": origin.git_commit, "path": origin.git_path or "."}
    return {"path": str(resolved(origin.path))}


@functools.lru_cache(maxsize=256)
def resolved(path: Path) -> Path:
    """`path.resolve()`, cached since each trial of a job resolves the same directories several times."""
    return path.resolve()


def trial_config(spec: TrialSpec, environ: Mapping[str, str]) -> dict[str, Any]:
    """The content of `config.json`."""
    return {
        "task": {**task_reference(spec.task.origin), "source": spec.task.origin.source},
        "trial_name": spec.name,
        "trials_dir": str(spec.directory.parent),
        **{name: spec.multipliers.get(name, 1.0 if name == ALL_CLOCKS else None) for name in MULTIPLIERS},
        "agent": _on_disk(spec.agent, environ),
        "environment": _environment(spec.sandbox, environ),
        "verifier": _on_disk(spec.verifier, environ),
        "artifacts": [artifact.model_dump(mode="json") for artifact in spec.artifacts],
        "extra_instructions": list(spec.extra_instructions),
        "job_id": spec.job_id,
    }


def trial_lock(spec: TrialSpec, config: Mapping[str, Any]) -> dict[str, Any]:
    """The content of `lock.json`: all inputs of the trial, with digests of files and texts. `config` is the content of
    its `config.json`."""
    task, origin = spec.task, spec.task.origin
    mode = None if task.is_multi_step else task.steps[0].verifier_mode
    texts = [hashlib.sha256(text.encode()).hexdigest() for text in spec.extra_instructions]
    lock = lock_row(task.name, task.digest, origin.source, task_reference(origin), config)
    lock["task"]["version"] = task.config.task.version if task.config.task else None
    lock["extra_instructions"] = [{"path": None, "digest": f"sha256:{digest}"} for digest in texts] or None
    lock["verifier"] = {**lock["verifier"], "environment_mode": mode}
    return lock


def _on_disk(settings: AgentConfig | EnvironmentConfig | VerifierConfig, environ: Mapping[str, str]) -> dict[str, Any]:
    """Settings without secrets, and with hosts without ports, which Harbor does not support."""
    table = settings.model_dump() | {"env": env_on_disk(settings.env, environ)}
    if hosts := settings.extra_allowed_hosts:
        table["extra_allowed_hosts"] = [host.partition(":")[0] for host in hosts]
    return table


def _environment(choice: SandboxChoice, environ: Mapping[str, str]) -> dict[str, Any]:
    network = choice.network
    own: dict[str, Any] = {"image": choice.image} if choice.image else {}
    if network is not None:
        own |= {"network": network.mode, "hosts": list(network.hosts)}
    table = _on_disk(choice.settings, environ) | backend_fields(choice.settings.backend)
    return table | {"kwargs": {**choice.settings.kwargs, **own}}


def backend_fields(backend: str) -> dict[str, str | None]:
    """A backend in Harbor's configuration: its `type` if Harbor has one, else its `import_path`."""
    known = backend in _HARBOR_BACKENDS
    return {"type": backend if known else None, "import_path": None if known else BACKENDS.get(backend, backend)}


class Clock:
    """Reports the phases as they begin, and adds up their times. A phase may have several parts."""

    def __init__(self, record: TrialRecord, on_phase: OnPhase | None = None) -> None:
        self.current: Phase = "prepare"
        self.seconds: dict[str, float] = {}
        self.timings: dict[str, TimingInfo] = {}
        """Times of the first part of each phase."""
        self._record = record
        self._on_phase = on_phase

    @contextmanager
    def phase(self, name: Phase) -> Iterator[TimingInfo]:
        """Run the block as a part of a phase, and yield its times for the result."""
        if name != self.current or not self.timings:
            self._record.log(f"phase {name}")
            if self._on_phase is not None:
                self._on_phase(name)
        self.current = name
        begun, timing = time.monotonic(), TimingInfo(started_at=now())
        self.timings.setdefault(name, timing)
        try:
            yield timing
        finally:
            timing.finished_at = now()
            self.seconds[name] = round(self.seconds.get(name, 0.0) + time.monotonic() - begun, 6)


@asynccontextmanager
async def limit(seconds: float | None, error: Callable[[], PierError]) -> AsyncIterator[None]:
    """Raise `error` if the block takes longer. A `TimeoutError` of the block itself is passed on."""
    scope = asyncio.timeout(seconds)
    try:
        async with scope:
            yield
    except TimeoutError:
        if scope.expired():
            raise error() from None
        raise


def now() -> datetime:
    return datetime.now(UTC)
