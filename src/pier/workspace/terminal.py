"""Keeps a terminal as an asciinema cast (version 2): output and changes of size with their times, no input."""

from __future__ import annotations

import codecs
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

from pier.beneath import write_all
from pier.redact import Redactor, StreamRedactor

LIMIT = 64 * 1024 * 1024
"""How many bytes of a terminal are kept."""


class CastWriter:
    """Appends to a cast while the terminal is used. A disk that is full ends the cast, not the command: `fault` says
    why."""

    def __init__(self, path: Path, rows: int, columns: int, env: Mapping[str, str], redactor: Redactor) -> None:
        self.fault: OSError | None = None
        self._begun = time.monotonic()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._redactor = StreamRedactor(redactor) if redactor else None
        self._left = LIMIT
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        head = {"version": 2, "width": columns, "height": rows, "timestamp": int(time.time()), "env": dict(env)}
        self._append(json.dumps(head))

    def output(self, data: bytes) -> None:
        """Add what the command printed."""
        self._event("o", self._decoder.decode(self._redactor.feed(data) if self._redactor else data))

    def resize(self, rows: int, columns: int) -> None:
        """Add a change of the terminal's size."""
        self._event("r", f"{columns}x{rows}")

    def close(self) -> None:
        if self._redactor is not None:
            self._event("o", self._decoder.decode(self._redactor.close()))
        os.close(self._fd)

    def _event(self, kind: str, text: str) -> None:
        if text and self._left > 0:
            self._left -= len(text)
            self._append(json.dumps([round(time.monotonic() - self._begun, 6), kind, text], ensure_ascii=False))

    def _append(self, line: str) -> None:
        if self.fault is None:
            try:
                write_all(self._fd, line.encode(errors="replace") + b"\n")
            except OSError as error:
                self.fault = error
