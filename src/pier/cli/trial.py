"""`pier trial`: inspect single trials."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pier.cli.main import JSON, echo
from pier.cli.run import JOBS_DIR, JobPath

if TYPE_CHECKING:
    from pier.job.view import TrialView
    from pier.trial.result import Integrity, TrialResult

_NO_VERDICT = "none: no verdict"


@click.group()
def trial() -> None:
    """Inspect single trials."""


@trial.command()
@click.argument("directory", metavar="TRIAL", type=JobPath())
@JOBS_DIR
@JSON
def show(directory: Path, as_json: bool) -> None:
    """Show the outcome of a trial. This includes rewards, errors, the integrity of the verdict, and paths of files.

    TRIAL is a directory, or JOB/NAME in --jobs-dir.
    """
    from pier.job.view import TrialView
    from pier.trial.record import printable

    view = TrialView.open(directory)
    echo(_data(view), as_json, map(printable, _lines(view)))


def _data(view: TrialView) -> dict[str, Any]:
    """Return the result, if any, with the state and the files of the trial."""
    files = {kind: [str(path) for path in paths] for kind, paths in asdict(view.files).items()}
    if view.result is not None:
        result = view.result.model_dump(mode="json")
    else:
        rewards = view.outcome.rewards if view.outcome else None
        graded = {"verifier_result": {"rewards": rewards}} if rewards is not None else {}
        result = {"trial_name": view.name, "task_name": view.task, **graded}
    return {**result, "state": view.state, "problem": view.problem, "files": files}


def _lines(view: TrialView) -> list[str]:
    agent = view.agent + (f" on {view.model}" if view.model else "")
    lines = [f"trial    {view.name}", f"task     {view.task}", f"agent    {agent}"]
    if view.state != "done":
        lines.append(f"state    {view.state}")
    lines += _result_lines(view, view.result) if view.result else _journal_lines(view)
    if view.outcome is not None and any(count is not None for count in view.outcome.tokens):
        names = zip(("input", "cached", "output"), view.outcome.tokens, strict=True)
        lines.append("tokens   " + ", ".join(f"{count} {name}" for name, count in names if count is not None))
    if view.outcome is not None and view.model:
        lines.append(f"cost     {'unknown' if view.outcome.cost is None else f'${view.outcome.cost:.4f}'}")
    if view.phases:
        lines.append("seconds  " + ", ".join(f"{name} {seconds:.2f}" for name, seconds in view.phases.items()))
    if view.result is not None and view.result.pier is not None:
        lines += [f"warning  {warning}" for warning in view.result.pier.warnings]
    lines += [f"trace    {path}" for path in view.files.trajectories]
    return [*lines, f"files    {view.directory}"]


def _journal_lines(view: TrialView) -> list[str]:
    """Describe a trial whose result cannot be read."""
    if view.outcome is None:
        return [f"problem  {view.problem}"]
    rewards, fault = view.outcome.rewards, view.outcome.fault
    lines = [f"reward   {_NO_VERDICT if rewards is None else _rewards(rewards)}"]
    lines += _error_lines(f"{fault.type} (blame: {fault.blame})", fault.message) if fault else []
    return [*lines, f"note     from the job's journal, since the result cannot be read: {view.problem}"]


def _result_lines(view: TrialView, result: TrialResult) -> list[str]:
    lines = [f"reward   {_rewards(result.rewards) if result.has_verdict else _NO_VERDICT}"]
    if result.pier is not None and result.pier.n_steps is not None:
        lines.append(f"steps    {result.pier.graded_steps or 0} of {result.pier.n_steps} graded")
    for step in result.step_results or ():
        shown = _rewards(step.rewards) if step.rewards is not None else "no verdict"
        lines.append(f"  step   {step.step_name}: {shown}")
    if (error := result.exception_info) is not None:
        blame = f" (blame: {error.blame}, in the phase {error.phase})" if error.blame else ""
        lines += _error_lines(error.exception_type + blame, error.exception_message)
    if (advice := _advice(view, result)) is not None:
        lines.append(f"  try    {advice}")
    parts = [result.integrity, *(step.integrity for step in result.step_results or ())]
    return [*lines, *(line for integrity in parts for line in _integrity_lines(integrity))]


def _error_lines(kind: str, message: str) -> list[str]:
    first, *rest = message.strip().splitlines() or [""]
    return [f"error    {kind}: {first}", *(f"         {line.rstrip()}" for line in rest)]


def _rewards(rewards: dict[str, float] | None) -> str:
    """Format rewards; the name `reward` is omitted if it is the only one."""
    return str(rewards["reward"]) if rewards is not None and [*rewards] == ["reward"] else json.dumps(rewards)


def _advice(view: TrialView, result: TrialResult) -> str | None:
    """Suggest the next step for a trial that did not pass: the hint of the error, else the log of the failed phase."""
    error, fault = result.exception_info, view.outcome.fault if view.outcome else None
    if error is not None and error.hint:
        return error.hint
    if result.has_verdict and any((result.rewards or {}).values()):
        return None
    phase = (error.phase if error else None) or ("agent" if fault and fault.blame == "agent" else "verify")
    if phase in ("setup", "agent"):
        own = "install.txt" if phase == "setup" else f"{result.agent_info.name}.txt"
        logs = [path for path in view.files.logs if path.parent.name == "agent" and path.stat().st_size]
        logs.sort(key=lambda path: path.name == own)
    else:
        name = "test-stdout.txt" if phase == "verify" else "trial.log"
        logs = [path for path in view.files.logs if path.name == name]
    return f"less {logs[-1]}" if logs else None


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
