"""What is said when a job has ended: a table, the cost, where the files are, and what to type next."""

from __future__ import annotations

from collections import Counter
from itertools import zip_longest
from pathlib import Path

import click

from pier.home import pier_home
from pier.job.layout import cost_of, groups_of
from pier.job.ledger import Ledger
from pier.job.metrics import Summary
from pier.job.numbers import calls_of, in_words
from pier.job.progress import in_short
from pier.sizes import size_text

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
