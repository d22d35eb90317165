"""Grading again: a job whose trials bring back what earlier agents left behind, and run only the verifier on it.

The earlier job is read and never changed. Its tasks are read as they are now, since a fixed verifier is the usual
reason; trials keep their names, so that the two jobs can be laid side by side.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, ClassVar

from pier.agent.contract import Agent, AgentRun, Launch
from pier.errors import JobError
from pier.job.config import JobConfig
from pier.job.ledger import Ledger
from pier.job.plan import Plan, PlannedTask, PlannedTrial
from pier.sandbox.contract import OnOutput, Result, Sandbox
from pier.task import Task, load_task
from pier.trial.spec import AgentChoice
from pier.trial.state import STATE, has_state, restore_state

AGENT = "pier.job.regrade:KeptState"


class KeptState(Agent):
    """Stands in for an agent: puts what it left behind into the sandbox, step after step."""

    name: ClassVar[str] = "kept-state"
    options: ClassVar[tuple[str, ...]] = ("states",)

    def __init__(self) -> None:
        self._step = 0

    def launch(self, run: AgentRun) -> Launch:
        return Launch(("true",))

    async def run(self, sandbox: Sandbox, run: AgentRun, on_output: OnOutput | None = None) -> Result:
        await restore_state(sandbox, Path(run.options["states"][self._step]))
        self._step += 1
        return Result(0)


def stand_in(source: Path, trial: str, task: Task) -> AgentChoice:
    """The choice of agent for grading `trial` of the job in `source` again."""
    return AgentChoice(AGENT, options={"states": [str(state) for state in _states(source / trial, task)]})


def plan_regrade(source: Path, config: JobConfig) -> tuple[Plan, int]:
    """The plan for grading what is kept of the job in `source`, and how many finished trials keep no state."""
    ledger = Ledger.read(source)
    read = [load_task(task.path, strict=config.strict) for task in ledger.plan.tasks]
    tasks = [_planned(old, task) for old, task in zip(ledger.plan.tasks, read, strict=True)]
    finished = [trial for trial in ledger.plan.trials if trial.id in ledger.outcomes]
    kept = [trial for trial in finished if all(map(has_state, _states(source / trial.name, read[trial.task])))]
    if not kept:
        several = sorted({task.name for task in read if task.compose is not None})
        why = f"; tasks with several services keep none: {', '.join(several)}" if several else ""
        raise JobError(
            f"no finished trial of {source} has kept its state, so there is nothing to grade{why}",
            hint="run the job again" if len(several) == len(read) else "run the job with --keep-state",
            code="no-state",
        )
    trials = [
        PlannedTrial(_id(trial, tasks[trial.task]), trial.name, trial.task, trial.agent, trial.attempt)
        for trial in kept
    ]
    return Plan(tuple(tasks), ledger.plan.agents, tuple(trials)), len(finished) - len(kept)


def _states(trial: Path, task: Task) -> list[Path]:
    return [(trial / "steps" / step.name if step.name else trial) / STATE for step in task.steps]


def _planned(old: PlannedTask, task: Task) -> PlannedTask:
    fields: dict[str, Any] = {key: getattr(old, key) for key in PlannedTask.__slots__}
    return PlannedTask(**{**fields, "name": task.name, "digest": task.digest})


def _id(trial: PlannedTrial, task: PlannedTask) -> str:
    return hashlib.sha256(f"regrade/{trial.id}/{task.digest}".encode()).hexdigest()[:16]
