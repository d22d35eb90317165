"""The files of one trial's directory, and its clocks.

Each file is written whole or appended to, and nothing secret gets into it. `config.json` and `lock.json` are in the
format of Harbor's.
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

from pydantic_core import PydanticSerializationError, to_json

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
"""How many bytes of a program's output are kept in its file."""


class TrialRecord:
    """Writes into the directory of one trial. If it is not `kept`, no file is written and no directory is made."""

    def __init__(self, directory: Path, redactor: Redactor, *, kept: bool = True) -> None:
        self.directory = directory
        self.redactor = redactor
        self.kept = kept
        self.image: Image | None = None
        """The image of the sandbox, once that is known."""
        self.warnings: list[str] = []
        self.refused: Counter[str] = Counter()
        self.watch: OnDecision | None = None
        """Sees each decision of the network policy that is noted."""
        self.fault: OSError | None = None
        """The first line of a log that could not be written: a trial whose record is incomplete has no verdict."""
        self._open = False
        self._log: int | None = None
        self._network = files.Journal(directory / "network.jsonl")

    def open(self) -> None:
        """Make the directory; it must be new or empty."""
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
        """Add a line on how long work goes, and report it."""
        self.log(line)
        if on_progress is not None:
            on_progress(self.redactor.text(line))

    def warn(self, text: str) -> None:
        """Add a line that the result shows too."""
        self.warnings.append(self.redactor.text(text))
        self.log(f"warning: {text}")

    def write_exception(self, text: str) -> None:
        if self.kept:
            files.write(self.directory / "exception.txt", self.redactor.text(text), durable=False)

    def write(self, name: str, value: dict[str, Any] | TrialResult) -> None:
        """Write a JSON file. `result.json` seals the trial: it is the last one, and on disk before this returns."""
        if not self.kept:
            return
        try:
            content = b"" if self.redactor else to_json(value, indent=2)
        except PydanticSerializationError:
            content = b""
        if not content:
            plain = value if isinstance(value, dict) else value.model_dump(mode="json")
            content = to_json(self.redactor.value(plain), indent=2)
        files.write(self.directory / name, content + b"\n", durable=isinstance(value, TrialResult))

    def note_network(self, decision: Decision) -> None:
        """Add a decision of the network policy to `network.jsonl`, and count what was refused."""
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
    """`text` without what would move a terminal's cursor or forge a line: an agent may have had a hand in it."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


class OutputFile:
    """The output of a program, appended to a file as it arrives, or dropped without a path. Use as a context manager;
    call it as `on_output`.

    A secret that arrives in two pieces is found too: with secrets, a line is held back until it is whole, and longer
    where one may have begun.
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
    """The task's identity as Harbor writes it: a path, or a path in a repository at a commit."""
    if origin.git_url:
        return {"git_url": origin.git_url, "git_commit_id": origin.git_commit, "path": origin.git_path or "."}
    return {"path": str(resolved(origin.path))}


@functools.lru_cache(maxsize=256)
def resolved(path: Path) -> Path:
    """The directory of a task or a job, asked for several times by each of its trials."""
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
    """The content of `lock.json`: all inputs of the trial, with digests of files and texts. `config` is the
    trial's own `config.json`."""
    task, origin = spec.task, spec.task.origin
    mode = None if task.is_multi_step else task.steps[0].verifier_mode
    texts = [hashlib.sha256(text.encode()).hexdigest() for text in spec.extra_instructions]
    lock = lock_row(task.name, task.digest, origin.source, task_reference(origin), config)
    lock["task"]["version"] = task.config.task.version if task.config.task else None
    lock["extra_instructions"] = [{"path": None, "digest": f"sha256:{digest}"} for digest in texts] or None
    lock["verifier"] = {**lock["verifier"], "environment_mode": mode}
    return lock


def _on_disk(settings: AgentConfig | EnvironmentConfig | VerifierConfig, environ: Mapping[str, str]) -> dict[str, Any]:
    """Settings as they may be written down. Hosts are without ports, which Harbor does not know."""
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
    """A backend as Harbor's configurations name it: by `type` if Harbor has it, else by `import_path`."""
    known = backend in _HARBOR_BACKENDS
    return {"type": backend if known else None, "import_path": None if known else BACKENDS.get(backend, backend)}


class Clock:
    """Reports each phase when it begins, and adds up the time it took. A phase may be continued by another part."""

    def __init__(self, record: TrialRecord, on_phase: OnPhase | None = None) -> None:
        self.current: Phase = "prepare"
        self.seconds: dict[str, float] = {}
        self.timings: dict[str, TimingInfo] = {}
        """When each phase was first begun and left."""
        self._record = record
        self._on_phase = on_phase

    @contextmanager
    def phase(self, name: Phase) -> Iterator[TimingInfo]:
        """A phase, with its times as they go into the result."""
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
    """Raise `error` when what is inside takes longer. A timeout that something inside raised for itself passes."""
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
