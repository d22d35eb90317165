"""What a person sees while a job runs: plain lines, or nothing with `-q`.

What is said when a job has ended: a table, the cost, where the files are, and what to type next.

`job.log`: what happened in a job, one line each, without secrets. Only ever appended to.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import TextIO

import click

from pier.home import pier_home
from pier.job.directory import cost_of, groups_of
from pier.job.ledger import Ledger, Outcome, now
from pier.job.plan import PlannedTrial
from pier.job.results import Cost, Mean, Summary, calls_of, in_words
from pier.redact import Redactor
from pier.sizes import size_text

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


_HEADINGS = ("agent", "model", "dataset", "verdicts", "mean reward (95%)", "pass@k")
_STEPS = "steps graded"


def print_report(
    directory: Path,
    ledger: Ledger,
    *,
    seconds: float | None = None,
    interrupted: bool = False,
    stopped: str | None = None,
) -> None:
    """Print the report of a job to standard output."""
    _print_table(ledger)
    _print_faults(ledger)
    done = [ledger.outcomes[id] for id in ledger.plan.by_id if id in ledger.outcomes]
    words = [f"{len(done)} of {len(ledger.plan.trials)} trials done"]
    if seconds is not None:
        words.append(f"in {seconds:.1f} s")
    if any(agent.get("model_name") for agent in ledger.plan.agents):
        cost = cost_of(done)
        words.append(f"cost {cost}" + (f" (unknown for {cost.unknown} trials)" if cost.unknown and cost.known else ""))
    click.echo(", ".join(words))
    if calls := calls_of(directory):
        click.echo(in_words(calls))
    click.echo(f"files: {directory}")
    _print_store()
    if stopped:
        click.secho(f"stopped: {stopped}; allow more with --job-max-*", fg="red")
    click.echo(f"next:  {next_command(directory, ledger, interrupted=interrupted)}")


def _print_store() -> None:
    """Print the size of the image store if it is over its budget."""
    if not (pier_home() / "images").is_dir():
        return
    from pier.image.collect import default_budget, layers_size
    from pier.image.store import ImageStore

    store = ImageStore()
    size, budget = layers_size(store), default_budget(store)
    if size > budget:
        click.echo(f"images: {size_text(size)}, over the budget of {size_text(budget)}; free space with: pier gc")


def _print_table(ledger: Ledger) -> None:
    rows: list[tuple[str, ...]] = []
    groups = groups_of(ledger)
    has_steps = any(group.steps for group in groups)
    for group in groups:
        summary = group.summary()
        verdicts = f"{summary.n_verdicts}/{summary.n_trials}"
        row = (group.agent, group.model or "-", group.dataset, verdicts, _means(summary), _passes(summary))
        steps = "/".join(map(str, group.steps)) if group.steps else "-"
        rows.append((*row, steps) if has_steps else row)
    print_columns(rows, (*_HEADINGS, _STEPS) if has_steps else _HEADINGS)


def print_columns(rows: list[tuple[str, ...]], headings: tuple[str, ...] = ()) -> None:
    """Print rows one below the other; a cell may have several lines."""
    everything = [headings, *rows] if headings else rows
    widths = [
        max(len(line) for cell in column for line in cell.split("\n")) for column in zip(*everything, strict=True)
    ]
    for row in everything:
        for line in zip_longest(*(cell.split("\n") for cell in row), fillvalue=""):
            shown = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            click.secho(shown, bold=row is headings)


def _means(summary: Summary) -> str:
    rows: list[str] = []
    for key, mean in summary.mean.items():
        found = summary.interval.get(key)
        sure = f" ({found.low:.3f}–{found.high:.3f})" if found else ""
        rows.append(f"{'' if len(summary.mean) == 1 else key + ' '}{mean:.3f}{sure}")
    return "\n".join(rows) or "-"


def _passes(summary: Summary) -> str:
    shown = [k for k in summary.pass_at_k if k.bit_count() == 1][:3]
    return "  ".join(f"{k}: {summary.pass_at_k[k]:.3f}" for k in shown) or "-"


def _print_faults(ledger: Ledger) -> None:
    faults: Counter[tuple[str, str]] = Counter()
    example: dict[tuple[str, str], tuple[str, str]] = {}
    for trial in ledger.plan.trials:
        outcome = ledger.outcomes.get(trial.id)
        if outcome is not None and outcome.fault is not None:
            key = (outcome.fault.type, outcome.fault.blame)
            faults[key] += 1
            example.setdefault(key, (trial.name, in_short(outcome.fault.message)))
    for (type, blame), count in faults.most_common():
        trial, message = example[type, blame]
        told = f"{count} × {type} (blame: {blame}), e.g. {trial}: {message}"
        click.secho(told, fg="red")


def next_command(directory: Path, ledger: Ledger, *, interrupted: bool = False) -> str:
    """The one command that most likely comes next."""
    if interrupted or any(True for _ in ledger.owed()):
        return f"pier job resume {directory}"
    broken = [(t, o.fault) for t in ledger.plan.trials if (o := ledger.outcomes[t.id]).fault and o.rewards is None]
    if any(fault is not None and fault.blame in ("infra", "provider") for _, fault in broken):
        return f"pier job retry {directory} --only infra"
    if broken:
        return f"pier trial show {directory / broken[0][0].name}"
    failed = next((t for t in ledger.plan.trials if not any((ledger.outcomes[t.id].rewards or {}).values())), None)
    if failed is not None:
        return f"pier trial show {directory / failed.name}"
    return f"pier job show {directory}"


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
