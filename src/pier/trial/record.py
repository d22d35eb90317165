"""The files of one trial's directory. Each is written whole or appended to, and nothing secret gets into them."""

from __future__ import annotations

import os
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic_core import PydanticSerializationError, to_json

from pier import files
from pier.beneath import write_all
from pier.errors import UsageError
from pier.network.decision import Decision, OnDecision
from pier.redact import Redactor, StreamRedactor
from pier.sandbox.contract import Stream
from pier.trial.model import TrialResult

OUTPUT_LIMIT = 64 * 1024 * 1024
"""How many bytes of a program's output are kept in its file."""


class TrialRecord:
    """Writes into the directory of one trial."""

    def __init__(self, directory: Path, redactor: Redactor) -> None:
        self.directory = directory
        self.redactor = redactor
        self.warnings: list[str] = []
        self.refused: Counter[str] = Counter()
        self.watch: OnDecision | None = None
        """Sees each decision of the network policy that is noted."""
        self.fault: OSError | None = None
        """The first line of a log that could not be written: a trial whose record is incomplete has no verdict."""
        self._log: int | None = None
        self._network = files.Journal(directory / "network.jsonl")

    def open(self) -> None:
        """Make the directory; it must be new or empty."""
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

    def warn(self, text: str) -> None:
        """Add a line that the result shows too."""
        self.warnings.append(self.redactor.text(text))
        self.log(f"warning: {text}")

    def write_config(self, config: dict[str, Any]) -> None:
        self._write("config.json", config, durable=False)

    def write_lock(self, lock: dict[str, Any]) -> None:
        self._write("lock.json", lock, durable=False)

    def write_exception(self, text: str) -> None:
        files.write(self.directory / "exception.txt", self.redactor.text(text), durable=False)

    def write_result(self, result: TrialResult) -> None:
        """Seal the trial: `result.json` is the last file, and on disk before this returns."""
        self._write("result.json", result, durable=True)

    def _write(self, name: str, value: dict[str, Any] | TrialResult, *, durable: bool) -> None:
        try:
            content = b"" if self.redactor else to_json(value, indent=2)
        except PydanticSerializationError:
            content = b""
        if not content:
            plain = value if isinstance(value, dict) else value.model_dump(mode="json")
            content = to_json(self.redactor.value(plain), indent=2)
        files.write(self.directory / name, content + b"\n", durable=durable)

    def note_network(self, decision: Decision) -> None:
        """Add a decision of the network policy to `network.jsonl`, and count what was refused."""
        if self._log is None:
            return
        if self.watch is not None:
            self.watch(decision)
        if not decision.allowed:
            port = f":{decision.port}" if decision.port else ""
            self.refused[f"{decision.kind} {decision.name}{port}"] += decision.count
        try:
            self._network.append(self.redactor.value(decision.line()))
        except OSError as error:
            self.fault = self.fault or error
            self.log(f"network.jsonl lacks a line: {error}")

    def output(self, path: Path) -> OutputFile:
        return OutputFile(path, self.redactor)

    def close(self) -> None:
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
    """What a program prints, appended to a file as it comes. Use as a context manager; call it as `on_output`.

    A secret that arrives in two pieces is found too: with secrets, a line is held back until it is whole, and longer
    where one may have begun.
    """

    def __init__(self, path: Path, redactor: Redactor, limit: int = OUTPUT_LIMIT) -> None:
        self.path = path
        self._left = limit
        self._dropped = 0
        self._clean = {name: StreamRedactor(redactor) for name in ("stdout", "stderr")} if redactor else {}
        self._fd = -1

    def __enter__(self) -> OutputFile:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        try:
            self._fd = os.open(self.path, flags, 0o600)
        except FileNotFoundError:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, flags, 0o600)
        return self

    def __call__(self, stream: Stream, data: bytes) -> None:
        self._write(self._clean[stream].feed(data) if self._clean else data)

    def __exit__(self, *_: object) -> None:
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
