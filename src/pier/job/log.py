"""`job.log`: what happened in a job, one line each, without secrets. Only ever appended to."""

from __future__ import annotations

import os
from pathlib import Path

from pier.job.ledger import Outcome, now
from pier.job.plan import PlannedTrial
from pier.job.progress import tell
from pier.redact import Redactor


class JobLog:
    """An open `job.log`. A `Watcher` of the schedule."""

    def __init__(self, path: Path, redactor: Redactor) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._redactor = redactor

    def say(self, text: str) -> None:
        """Add a line."""
        os.write(self._fd, f"{now()} {self._redactor.text(text)}\n".encode(errors="replace"))

    def started(self, trial: PlannedTrial, number: int) -> None:
        if number > 1:
            self.say(f"{trial.name}: try {number} starts")

    def ended(self, trial: PlannedTrial, outcome: Outcome) -> None:
        self.say(f"{trial.name}: {tell(outcome)}")

    def retrying(self, trial: PlannedTrial, outcome: Outcome, wait: float) -> None:
        self.say(f"{trial.name}: {tell(outcome)}; again in {wait:.1f} s")

    def close(self) -> None:
        os.close(self._fd)
