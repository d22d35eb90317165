"""`pier trial`: look at single trials."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from pier.trial.result import Integrity, TrialResult


@click.group()
def trial() -> None:
    """Look at single trials."""


@trial.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
def show(directory: Path, as_json: bool) -> None:
    """Show how a trial ended: its rewards, what went wrong, how far the verdict can be trusted, where files are."""
    from pier.trial.result import read_result

    result = read_result(directory)
    if as_json:
        click.echo(json.dumps(result.model_dump(mode="json"), indent=2))
        return
    from pier.trial.record import printable

    for line in _lines(result, directory):
        click.echo(printable(line))


def _lines(result: TrialResult, directory: Path) -> list[str]:
    model = result.agent_info.model_info
    agent = result.agent_info.name + (f" on {model.name}" if model else "")
    lines = [f"trial    {result.trial_name}", f"task     {result.task_name}", f"agent    {agent}"]
    lines.append(f"reward   {_rewards(result.rewards) if result.has_verdict else 'none: there is no verdict'}")
    if result.pier is not None and result.pier.n_steps is not None:
        lines.append(f"steps    {result.pier.graded_steps or 0} of {result.pier.n_steps} graded")
    for step in result.step_results or ():
        rewards = step.verifier_result.rewards if step.verifier_result else None
        lines.append(f"  step   {step.step_name}: {_rewards(rewards) if rewards is not None else 'no verdict'}")
    if (error := result.exception_info) is not None:
        blame = f" (blame: {error.blame}, in the phase {error.phase})" if error.blame else ""
        first, *rest = error.exception_message.strip().splitlines() or [""]
        lines.append(f"error    {error.exception_type}{blame}: {first}")
        lines += [f"         {line.rstrip()}" for line in rest]
    if (told := _advice(result, directory)) is not None:
        lines.append(f"  try    {told}")
    parts = [result.integrity, *(step.integrity for step in result.step_results or ())]
    for integrity in parts:
        lines += _integrity_lines(integrity)
    if result.pier is not None:
        spent = ", ".join(f"{name} {seconds:.2f}" for name, seconds in result.pier.phases.items())
        lines.append(f"seconds  {spent}")
        lines += [f"warning  {warning}" for warning in result.pier.warnings]
    return [*lines, f"files    {directory}"]


def _rewards(rewards: dict[str, float] | None) -> str:
    """The reward of a task that has one is enough; several have names."""
    return str(rewards["reward"]) if rewards is not None and [*rewards] == ["reward"] else json.dumps(rewards)


def _advice(result: TrialResult, directory: Path) -> str | None:
    """Where to look next, if the trial did not pass: at what the error says, else at what the tests printed."""
    if result.exception_info is not None and result.exception_info.hint:
        return result.exception_info.hint
    passed = result.has_verdict and any((result.rewards or {}).values())
    printed = directory / "verifier" / "test-stdout.txt"
    return None if passed or not printed.exists() else f"less {printed}"


def _integrity_lines(integrity: Integrity | None) -> list[str]:
    if integrity is None:
        return []
    where = "the agent's sandbox" if integrity.mode == "shared" else "a sandbox that the agent never saw"
    lines = [f"grading  {integrity.mode}: the tests ran in {where}"]
    for note in integrity.notes:
        undone = " (undone before grading)" if note.stopped else ""
        lines.append(f"note     {note.kind}: {note.path + ': ' if note.path else ''}{note.detail}{undone}")
    for run in integrity.runs:
        found = f"{run.code}: {run.message}" if run.rewards is None else _rewards(run.rewards)
        lines.append(f"  run    {run.state} state ({run.logs}): {found}")
    return lines
