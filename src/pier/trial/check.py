"""Proves a task by running it: its own solution must earn 1, doing nothing must not, and both every time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from pier.task import Task
from pier.trial.model import TrialResult
from pier.trial.run import run_trial
from pier.trial.spec import AgentChoice, SandboxChoice, TrialServices, TrialSpec


@dataclass(frozen=True, slots=True)
class Proof:
    """What the runs of one agent on one task gave, in order; None for a run without a verdict."""

    task: str
    agent: str
    rewards: tuple[dict[str, float | int] | None, ...]
    problems: tuple[str, ...] = ()
    directories: tuple[Path, ...] = ()

    @property
    def flaky(self) -> bool:
        return any(rewards != self.rewards[0] for rewards in self.rewards)

    @property
    def ok(self) -> bool:
        if self.flaky or any(rewards is None for rewards in self.rewards):
            return False
        full = [_is_full(rewards) for rewards in self.rewards]
        return all(full) if self.agent == "oracle" else not any(full)


def _is_full(rewards: dict[str, float | int] | None) -> bool:
    return bool(rewards) and all(value >= 1 for value in (rewards or {}).values())


async def prove(
    tasks: Iterable[Task],
    services: TrialServices,
    directory: Path,
    *,
    attempts: int = 1,
    sandbox: SandboxChoice | None = None,
    concurrency: int = 4,
    on_done: Callable[[Proof], None] | None = None,
) -> list[Proof]:
    """Run oracle and nop `attempts` times on each task; the trials' files go below `directory`."""
    limit = asyncio.Semaphore(concurrency)

    async def run(task: Task, place: str, agent: str, attempt: int) -> TrialResult:
        spec = TrialSpec(
            f"{task.short_name}-{agent}-{attempt}",
            task,
            directory / place / f"{agent}-{attempt}",
            AgentChoice(agent),
            sandbox=sandbox or SandboxChoice(),
            attempt=attempt,
        )
        async with limit:
            return await run_trial(spec, services)

    async def prove_one(task: Task, place: str, agent: str) -> Proof:
        async with asyncio.TaskGroup() as group:
            runs = [group.create_task(run(task, place, agent, attempt)) for attempt in range(1, attempts + 1)]
        proof = _proof(task, agent, [each.result() for each in runs])
        if on_done is not None:
            on_done(proof)
        return proof

    places = [(task, f"{number}-{task.short_name}") for number, task in enumerate(tasks, 1)]
    async with asyncio.TaskGroup() as group:
        proving = [group.create_task(prove_one(*each, agent)) for each in places for agent in ("oracle", "nop")]
    return [each.result() for each in proving]


def _proof(task: Task, agent: str, results: list[TrialResult]) -> Proof:
    rewards = tuple(result.rewards for result in results)
    problems = dict.fromkeys(
        result.exception_info.exception_message for result in results if result.exception_info is not None
    )
    directories = tuple(Path(result.trial_uri.removeprefix("file://")) for result in results)
    return Proof(task.name, agent, rewards, tuple(problems), directories)
