"""Progress of a running job (a live view on a terminal, else plain lines), `job.log`, and the final report."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click

from pier.figures import Summary, Totals
from pier.home import pier_home
from pier.job.ledger import Outcome, now
from pier.job.plan import PlannedTrial
from pier.job.view import JobView
from pier.redact import Redactor
from pier.sizes import columns, size_text
from pier.trial.record import printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_log = logging.getLogger(__name__)
_ROWS = 12
"""Maximum number of running trials that the live view lists."""

PLAIN_PAUSE = 5.0
"""Minimum number of seconds between two lines for jobs with many trials, without a terminal."""


class Progress:
    """Counts the events of a job without showing them. A `Watcher` of the schedule and of the phases of trials."""

    def __init__(self, total: int, finished: Iterable[Outcome] | None = None) -> None:
        self.total = total
        self.totals = Totals.of(finished or ())
        self.before = self.done
        self.retries = 0
        self.began = time.monotonic()
        self.stopping = False
        self.running: dict[str, tuple[str, float]] = {}
        """Phase and start time by trial name."""
        self.details: dict[str, str] = {}
        """Progress within the phase by trial name, if known."""

    @property
    def done(self) -> int:
        return self.totals.done

    def started(self, trial: PlannedTrial, number: int) -> None:
        self.running[trial.name] = ("prepare", time.monotonic())

    def phase(self, name: str, phase: str) -> None:
        _log.debug("%s: %s", name, phase)
        if name in self.running:
            self.running[name] = (phase, self.running[name][1])
            self.details.pop(name, None)

    def detail(self, name: str, text: str) -> None:
        """Report the progress of long work that a trial waits for, such as its image build."""
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
        self.stopping = True

    @property
    def seconds(self) -> float:
        """Duration of this run so far."""
        return time.monotonic() - self.began

    @property
    def per_minute(self) -> float:
        return (self.done - self.before) * 60 / max(self.seconds, 1e-3)

    @property
    def seconds_left(self) -> float | None:
        rate = self.per_minute
        return (self.total - self.done) * 60 / rate if self.done - self.before >= 3 else None

    def line(self) -> str:
        """Summarise the state of the job in one line."""
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
        """Show the progress while the context lasts."""
        yield


class PlainProgress(Progress):
    """Prints one line per finished trial, or a summary every few seconds for many trials. If nothing was printed for
    that long, prints progress details of trials."""

    def __init__(self, total: int, finished: Iterable[Outcome] | None = None, stream: TextIO | None = None) -> None:
        super().__init__(total, finished)
        self._stream = stream or sys.stderr
        self._last = 0.0
        self._printed = self.began
        self._each_trial = total <= 50

    def ended(self, trial: PlannedTrial, outcome: Outcome) -> None:
        super().ended(trial, outcome)
        if self._each_trial:
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
        self._print(f"{trial.name}: {describe_outcome(outcome)}; retrying in {wait:.1f} s")

    def stop_noticed(self) -> None:
        super().stop_noticed()
        self._print(STOPPING)

    def _print(self, text: str) -> None:
        self._printed = time.monotonic()
        print(text, file=self._stream, flush=True)


class LiveProgress(Progress):
    """A progress bar, the running trials with their phases, and the summary line, redrawn a few times a second."""

    def __init__(self, total: int, console: Console, finished: Iterable[Outcome] | None = None) -> None:
        super().__init__(total, finished)
        self._console = console

    @contextmanager
    def show(self) -> Iterator[None]:
        from rich.live import Live

        with Live(get_renderable=self._draw, console=self._console, refresh_per_second=4, transient=True):
            yield

    def _draw(self) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        now = time.monotonic()
        running = list(self.running.items())
        for name, (phase, since) in running[:_ROWS]:
            detail = Text(self.details.get(name, ""), style="dim", overflow="ellipsis", no_wrap=True)
            table.add_row(Text(name), Text(phase, style="cyan"), Text(duration(now - since), style="dim"), detail)
        bar = Table.grid()
        bar.add_row(ProgressBar(total=max(self.total, 1), completed=self.done, width=60))
        rows: list[RenderableType] = [bar, table]
        if len(running) > _ROWS:
            phases = Counter(phase for _, (phase, _) in running[_ROWS:])
            rest = ", ".join(f"{count} in {phase}" for phase, count in phases.most_common())
            rows.append(Text(f"and {len(running) - _ROWS} more: {rest}", style="dim"))
        rows.append(Text(STOPPING if self.stopping else self.line(), style="yellow" if self.stopping else "bold"))
        return Group(*rows)


STOPPING = "stopping: no new trials start, running ones are cleaned up; press Ctrl-C again to limit the clean-up"


def describe_outcome(outcome: Outcome) -> str:
    """Describe the outcome of a try in a few words."""
    words: list[str] = []
    if outcome.rewards is not None:
        words.append(", ".join(f"{key} {value:g}" for key, value in outcome.rewards.items()) or "no rewards")
    if outcome.steps is not None:
        words.append(f"{outcome.steps[0]} of {outcome.steps[1]} steps graded")
    if outcome.fault is not None:
        words.append(f"{outcome.fault.type} ({outcome.fault.blame}): {first_line(outcome.fault.message)}")
    return "; ".join(words) or ("cancelled" if outcome.cancelled else "done, not graded")


def first_line(text: str) -> str:
    """Shorten a message to its first line, or to all lines if the first ends in a colon, of at most 160 characters."""
    line = text.strip().partition("\n")[0]
    if line.endswith(":"):
        line += " " + "; ".join(row.strip().removeprefix("- ") for row in text.strip()[:1000].splitlines()[1:])
    line = "".join(each if each.isprintable() else "?" for each in line)
    return line if len(line) <= 160 else line[:157] + "..."


def duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


class JobLog:
    """An open `job.log`. A `Watcher` of the schedule."""

    def __init__(self, path: Path, redactor: Redactor) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._redactor = redactor

    def write(self, text: str) -> None:
        os.write(self._fd, f"{now()} {self._redactor.text(text)}\n".encode(errors="replace"))

    def started(self, trial: PlannedTrial, number: int) -> None:
        if number > 1:
            self.write(f"{trial.name}: try {number} started")

    def ended(self, trial: PlannedTrial, outcome: Outcome) -> None:
        self.write(f"{trial.name}: {describe_outcome(outcome)}")

    def retrying(self, trial: PlannedTrial, outcome: Outcome, wait: float) -> None:
        self.write(f"{trial.name}: {describe_outcome(outcome)}; retrying in {wait:.1f} s")

    def close(self) -> None:
        os.close(self._fd)


_FAULTS = 8
"""Number of kinds of errors that a report lists."""


def print_report(
    view: JobView, *, seconds: float | None = None, interrupted: bool = False, stopped: str | None = None
) -> None:
    """Print the report of a job to standard output."""
    _print_table(view)
    print_faults(view)
    words = [f"{view.totals.done} of {view.n_trials} trials done"]
    if seconds is not None:
        words.append(f"in {seconds:.1f} s")
    if any(row.model for row in view.trials):
        words.append(f"cost {view.totals.cost}")
    click.echo(", ".join(words))
    click.echo(f"files: {view.directory}")
    _print_store()
    if stopped:
        click.secho(f"stopped: {stopped}; raise the limit with --job-max-*", fg="red")
    if command := next_command(view, interrupted=interrupted):
        click.echo(f"next:  {command}")


def _print_store() -> None:
    """Print the size of the image store if it is over its budget."""
    if not (pier_home() / "images").is_dir():
        return
    from pier.image.store import ImageStore, default_budget, layers_size

    store = ImageStore()
    size, budget = layers_size(store), default_budget(store)
    if size > budget:
        click.echo(f"images: {size_text(size)}, over the budget of {size_text(budget)}; free space with: pier gc")


def _print_table(view: JobView) -> None:
    headings = ("agent", "model", "dataset", "verdicts", "mean reward (95%)", "pass@k", "steps graded")
    rows: list[tuple[str, ...]] = []
    for group in view.groups:
        summary, steps = group.summary, group.totals.steps
        verdicts = f"{summary.n_verdicts}/{summary.n_trials}"
        shown = [k for k in summary.pass_at_k if k.bit_count() == 1][:3]
        passes = "  ".join(f"{k}: {summary.pass_at_k[k]:.3f}" for k in shown) or "-"
        graded = "/".join(map(str, steps)) if steps else "-"
        rows.append((group.agent, group.model or "-", group.dataset, verdicts, means(summary), passes, graded))
    if rows:
        width = len(headings) - (view.totals.steps is None)
        print_columns([row[:width] for row in rows], headings[:width])


def print_columns(rows: list[tuple[str, ...]], headings: tuple[str, ...] = ()) -> None:
    """Print a table; a cell may have several lines."""
    for number, line in enumerate(columns(headings, *rows) if headings else columns(*rows)):
        click.secho(printable(line), bold=bool(headings) and number == 0)


def means(summary: Summary) -> str:
    rows: list[str] = []
    for key, mean in summary.mean.items():
        found = summary.interval.get(key)
        between = f" ({found.low:.3f}–{found.high:.3f})" if found else ""
        rows.append(f"{'' if len(summary.mean) == 1 else key + ' '}{mean:.3f}{between}")
    return "\n".join(rows) or "-"


def print_faults(view: JobView, *, to_stderr: bool = False, ungraded: bool = False) -> None:
    """Print the errors of trials with their hints, the most frequent first. With `ungraded`, only those of
    trials without a verdict."""
    found = [(row.name, row.outcome) for row in view.trials if row.outcome is not None]
    counts: Counter[tuple[str, str, str | None]] = Counter()
    example: dict[tuple[str, str, str | None], tuple[str, str]] = {}
    for name, outcome in found:
        if (fault := outcome.fault) is not None and not (ungraded and outcome.rewards is not None):
            key = (fault.type, fault.blame, fault.hint)
            counts[key] += 1
            example.setdefault(key, (name, first_line(fault.message)))
    for key, count in counts.most_common(_FAULTS):
        (type, blame, hint), (trial, message) = key, example[key]
        click.secho(f"{count} × {type} (blame: {blame}), e.g. {trial}: {message}", fg="red", err=to_stderr)
        if hint:
            click.echo(f"      hint: {printable(hint)}", err=to_stderr)
    if rest := sum(count for _, count in counts.most_common()[_FAULTS:]):
        click.echo(f"{rest} more errors; see: pier job show --trials {view.directory}", err=to_stderr)


def next_command(view: JobView, *, interrupted: bool = False) -> str | None:
    """Return the most likely next command."""
    path = view.directory
    if view.owner:
        return f"pier job logs -f {path}"
    if view.is_ours and (interrupted or view.totals.done < view.n_trials):
        return f"pier job resume {path}"
    ended = [(row.name, row.outcome) for row in view.trials if row.outcome is not None]
    broken = [(name, outcome.fault) for name, outcome in ended if outcome.fault and outcome.rewards is None]
    if view.is_ours and any(fault.blame in ("infra", "provider") for _, fault in broken):
        return f"pier job retry {path} --only infra"
    failed = [name for name, outcome in ended if not any((outcome.rewards or {}).values())]
    if broken or failed:
        return f"pier trial show {path / (broken[0][0] if broken else failed[0])}"
    return f"pier job show {path} --trials" if ended else None
