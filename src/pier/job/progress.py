"""What a person sees while a job runs: plain lines, or nothing with `-q`. `pier.job.live` is the view for terminals."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TextIO

from pier.job.ledger import Outcome
from pier.job.metrics import Cost, Mean
from pier.job.plan import PlannedTrial

PLAIN_PAUSE = 5.0
"""Without a terminal, at most one line in this many seconds once a job has many trials."""


class Progress:
    """Counts what happens and shows it. A `Watcher` of the schedule, and of the phases of each trial."""

    def __init__(self, total: int, finished: Iterable[Outcome] | None = None) -> None:
        self.total = total
        self.done = self.faults = self.verdicts = self.retries = 0
        self.mean = Mean()
        self.cost = Cost()
        self.before = 0
        self.began = time.monotonic()
        self.stopping = False
        self.running: dict[str, tuple[str, float]] = {}
        """By trial name: its phase and when it began."""
        self.details: dict[str, str] = {}
        """By trial name: how long work of its phase goes, if it says."""
        for outcome in finished or ():
            self._count(outcome)
        self.before = self.done

    def _count(self, outcome: Outcome) -> None:
        self.done += 1
        self.faults += outcome.fault is not None
        self.verdicts += outcome.rewards is not None
        self.mean.add(outcome.rewards)
        self.cost.add(outcome.cost)

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
            self.details[name] = in_short(text)

    def ended(self, trial: PlannedTrial, outcome: Outcome) -> None:
        self._forget(trial)
        if not outcome.cancelled:
            self._count(outcome)

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
        if self.mean.value is not None:
            parts.append(f"mean reward {self.mean.value:.3f}")
        if self.faults:
            parts.append(f"{self.faults} with errors")
        if self.retries:
            parts.append(f"{self.retries} retries")
        if self.cost.known:
            parts.append(str(self.cost))
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
        self._told = self.began
        self._chatty = total <= 50

    def ended(self, trial: PlannedTrial, outcome: Outcome) -> None:
        super().ended(trial, outcome)
        if self._chatty:
            self._print(f"[{self.done}/{self.total}] {trial.name}: {tell(outcome)}")
        elif time.monotonic() - self._last > PLAIN_PAUSE or self.done == self.total:
            self._last = time.monotonic()
            self._print(self.line())

    def detail(self, name: str, text: str) -> None:
        super().detail(name, text)
        if name in self.details and time.monotonic() - self._told > PLAIN_PAUSE:
            self._print(f"{name}: {self.running[name][0]}: {self.details[name]}")

    def retrying(self, trial: PlannedTrial, outcome: Outcome, wait: float) -> None:
        super().retrying(trial, outcome, wait)
        self._print(f"{trial.name}: {tell(outcome)}; again in {wait:.1f} s")

    def stop_noticed(self) -> None:
        super().stop_noticed()
        self._print(STOPPING)

    def _print(self, text: str) -> None:
        self._told = time.monotonic()
        print(text, file=self._stream, flush=True)


STOPPING = "stopping: no new trials, cleaning up those that run; press Ctrl-C again to hurry"


def tell(outcome: Outcome) -> str:
    """How a try ended, in a few words."""
    words: list[str] = []
    if outcome.rewards is not None:
        words.append(", ".join(f"{key} {value:g}" for key, value in outcome.rewards.items()) or "no rewards")
    if outcome.steps is not None:
        words.append(f"{outcome.steps[0]} of {outcome.steps[1]} steps graded")
    if outcome.fault is not None:
        words.append(f"{outcome.fault.type} ({outcome.fault.blame}): {in_short(outcome.fault.message)}")
    return "; ".join(words) or ("cancelled" if outcome.cancelled else "no verdict")


def in_short(text: str) -> str:
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
