"""Shows how a running job goes: plain lines on standard error, and `job.log` for good, without secrets.

`pier.job.live` shows it on a terminal, `pier.job.report` what has come of it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from pier.job.ledger import now
from pier.job.outcome import Outcome
from pier.job.plan import PlannedTrial
from pier.job.results import Totals
from pier.redact import Redactor

PLAIN_PAUSE = 5.0
"""Without a terminal, at most one line in this many seconds once a job has many trials."""


class Progress:
    """Counts what happens and shows it. A `Watcher` of the schedule, and of the phases of each trial."""

    def __init__(self, total: int, finished: Iterable[Outcome] | None = None) -> None:
        self.total = total
        self.totals = Totals.of(finished or ())
        self.before = self.done
        self.retries = 0
        self.began = time.monotonic()
        self.stopping = False
        self.running: dict[str, tuple[str, float]] = {}
        """By trial name: its phase and when it began."""
        self.details: dict[str, str] = {}
        """By trial name: how far the work of its phase is, where that is known."""

    @property
    def done(self) -> int:
        return self.totals.done

    def started(self, trial: PlannedTrial, number: int) -> None:
        self.running[trial.name] = ("prepare", time.monotonic())

    def phase(self, name: str, phase: str) -> None:
        """A trial came to a new phase."""
        if name in self.running:
            self.running[name] = (phase, self.running[name][1])
            self.details.pop(name, None)

    def detail(self, name: str, text: str) -> None:
        """A trial waits for long work, such as the build of its image, and this is how far it is."""
        if name in self.running:
            self.details[name] = first_line(text)

    def ended(self, trial: PlannedTrial, outcome: Outcome) -> None:
        self._forget(trial)
        if not outcome.cancelled:
            self.totals.add(outcome)

    def retrying(self, trial: PlannedTrial, outcome: Outcome, wait: float) -> None:
        self._forget(trial)
        self.retries += 1

    def _forget(self, trial: PlannedTrial) -> None:
        self.running.pop(trial.name, None)
        self.details.pop(trial.name, None)

    def stop_noticed(self) -> None:
        """The user asked for an end."""
        self.stopping = True

    @property
    def seconds(self) -> float:
        """How long this run has taken so far."""
        return time.monotonic() - self.began

    @property
    def per_minute(self) -> float:
        return (self.done - self.before) * 60 / max(self.seconds, 1e-3)

    @property
    def seconds_left(self) -> float | None:
        rate = self.per_minute
        return (self.total - self.done) * 60 / rate if self.done - self.before >= 3 else None

    def line(self) -> str:
        """Where the job stands, in one line."""
        parts = [f"{self.done}/{self.total} trials"]
        if (mean := self.totals.mean.value) is not None:
            parts.append(f"mean reward {mean:.3f}")
        if errors := self.totals.errors.total():
            parts.append(f"{errors} with errors")
        if self.retries:
            parts.append(f"{self.retries} retries")
        if self.totals.cost.known:
            parts.append(str(self.totals.cost))
        if self.done > self.before:
            parts.append(f"{self.per_minute:.0f}/min")
        left = self.seconds_left
        if left is not None and self.done < self.total:
            parts.append(f"{duration(left)} left")
        return " · ".join(parts)

    @contextmanager
    def show(self) -> Iterator[None]:
        """Show it while the context lasts. This one shows nothing."""
        yield


class PlainProgress(Progress):
    """One line per finished trial; many quick ones are summed up in one line every few seconds. Where nothing was said
    for that long, how the work of some trial goes."""

    def __init__(self, total: int, finished: Iterable[Outcome] | None = None, stream: TextIO | None = None) -> None:
        super().__init__(total, finished)
        self._stream = stream or sys.stderr
        self._last = 0.0
        self._printed = self.began
        self._chatty = total <= 50

    def ended(self, trial: PlannedTrial, outcome: Outcome) -> None:
        super().ended(trial, outcome)
        if self._chatty:
            self._print(f"[{self.done}/{self.total}] {trial.name}: {describe_outcome(outcome)}")
        elif time.monotonic() - self._last > PLAIN_PAUSE or self.done == self.total:
            self._last = time.monotonic()
            self._print(self.line())

    def detail(self, name: str, text: str) -> None:
        super().detail(name, text)
        if name in self.details and time.monotonic() - self._printed > PLAIN_PAUSE:
            self._print(f"{name}: {self.running[name][0]}: {self.details[name]}")

    def retrying(self, trial: PlannedTrial, outcome: Outcome, wait: float) -> None:
        super().retrying(trial, outcome, wait)
        self._print(f"{trial.name}: {describe_outcome(outcome)}; again in {wait:.1f} s")

    def stop_noticed(self) -> None:
        super().stop_noticed()
        self._print(STOPPING)

    def _print(self, text: str) -> None:
        self._printed = time.monotonic()
        print(text, file=self._stream, flush=True)


STOPPING = "stopping: no new trials, cleaning up those that run; press Ctrl-C again to hurry"


def describe_outcome(outcome: Outcome) -> str:
    """How a try ended, in a few words."""
    words: list[str] = []
    if outcome.rewards is not None:
        words.append(", ".join(f"{key} {value:g}" for key, value in outcome.rewards.items()) or "no rewards")
    if outcome.steps is not None:
        words.append(f"{outcome.steps[0]} of {outcome.steps[1]} steps graded")
    if outcome.fault is not None:
        words.append(f"{outcome.fault.type} ({outcome.fault.blame}): {first_line(outcome.fault.message)}")
    return "; ".join(words) or ("cancelled" if outcome.cancelled else "no verdict")


def first_line(text: str) -> str:
    """The first line of a message, or all of one that goes on behind a colon, cut to what a terminal holds."""
    first = text.strip().partition("\n")[0]
    if first.endswith(":"):
        rest = [row.strip().removeprefix("- ") for row in text.strip()[:1000].splitlines()[1:]]
        line = f"{first} {'; '.join(rest)}"
    else:
        line = first
    line = "".join(each if each.isprintable() else "?" for each in line)
    return line if len(line) <= 160 else line[:157] + "..."


def duration(seconds: float) -> str:
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


class JobLog:
    """An open `job.log`. A `Watcher` of the schedule."""

    def __init__(self, path: Path, redactor: Redactor) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._redactor = redactor

    def write(self, text: str) -> None:
        """Add a line."""
        os.write(self._fd, f"{now()} {self._redactor.text(text)}\n".encode(errors="replace"))

    def started(self, trial: PlannedTrial, number: int) -> None:
        if number > 1:
            self.write(f"{trial.name}: try {number} starts")

    def ended(self, trial: PlannedTrial, outcome: Outcome) -> None:
        self.write(f"{trial.name}: {describe_outcome(outcome)}")

    def retrying(self, trial: PlannedTrial, outcome: Outcome, wait: float) -> None:
        self.write(f"{trial.name}: {describe_outcome(outcome)}; again in {wait:.1f} s")

    def close(self) -> None:
        os.close(self._fd)
