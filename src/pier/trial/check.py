"""Checks of `pier task check` that need more than the task's files: services, solvability, and repository history.

Compose files are read without an engine. A solvable task gives its own solution 1, and doing nothing less, in every
attempt. History is everything of a repository that is not an ancestor of its HEAD: other branches and tags, reflogs and
stashes, unreachable objects, a copy under another name, a bundle. It is searched in a sandbox of the task's image, as
the agent's user, with the image's git.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pier.agent.contract import AGENT_LOGS
from pier.errors import SandboxError, TaskError
from pier.redact import Redactor
from pier.sandbox.compose import MAIN, Compose
from pier.sandbox.compose.read import read_compose
from pier.task import Task, load_task
from pier.task.check import Problem
from pier.task.model import Environment, wanted_variables
from pier.trial.config import AgentConfig
from pier.trial.environment import TaskSandbox, open_environment, task_secrets
from pier.trial.plan import compose_variables
from pier.trial.record import TrialRecord
from pier.trial.result import TrialResult, captured
from pier.trial.run import run_trial
from pier.trial.spec import SandboxChoice, TrialServices, TrialSpec, user_text


@dataclass(frozen=True, slots=True)
class Proof:
    """The rewards of the runs of one agent on one task, in order; None for a run without a verdict."""

    task: str
    agent: str
    rewards: tuple[dict[str, float | int] | None, ...]
    problems: tuple[str, ...] = ()

    @property
    def flaky(self) -> bool:
        return any(rewards != self.rewards[0] for rewards in self.rewards)

    @property
    def ok(self) -> bool:
        if self.flaky or any(rewards is None for rewards in self.rewards):
            return False
        full = [rewards and all(value >= 1 for value in rewards.values()) for rewards in self.rewards]
        return all(full) if self.agent == "oracle" else not any(full)


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
            AgentConfig(name=agent),
            sandbox=sandbox or SandboxChoice(),
            attempt=attempt,
        )
        async with limit:
            return await run_trial(spec, services)

    async def prove_one(task: Task, place: str, agent: str) -> Proof:
        async with asyncio.TaskGroup() as group:
            runs = [group.create_task(run(task, place, agent, attempt)) for attempt in range(1, attempts + 1)]
        results = [each.result() for each in runs]
        errors = (result.exception_info for result in results)
        proof = Proof(
            task.name,
            agent,
            tuple(result.rewards for result in results),
            tuple(dict.fromkeys(error.exception_message for error in errors if error is not None)),
        )
        if on_done is not None:
            on_done(proof)
        return proof

    places = [(task, f"{number}-{task.short_name}") for number, task in enumerate(tasks, 1)]
    async with asyncio.TaskGroup() as group:
        proving = [group.create_task(prove_one(*each, agent)) for each in places for agent in ("oracle", "nop")]
    return [each.result() for each in proving]


_STAND_IN = "1"
"""Placeholder for a variable that is not set: a valid text, number and size."""


def lint_services(path: Path) -> list[Problem]:
    """The problems of a task's services; none if the task itself cannot be read."""
    try:
        task = load_task(path)
    except TaskError:
        return []
    problems: list[Problem] = []
    own = _read(task.compose, task.config.environment, problems) if task.compose else None
    for step in task.steps:
        verifier = step.verifier_environment
        if step.verifier_mode == "separate" and verifier.compose and verifier.compose != task.compose:
            _read(verifier.compose, verifier.table, problems)
    if own is not None or task.compose is None:
        problems += _lint_names(task, own)
    return list(dict.fromkeys(problems))


def _read(file: Path, table: Environment, problems: list[Problem]) -> Compose | None:
    environ = dict.fromkeys(wanted_variables(table.env), _STAND_IN) | dict(os.environ)
    try:
        compose = read_compose(file, compose_variables(table, file.parent, environ))
    except TaskError as error:
        problems.append(_problem(file, error))
        return None
    problems += [
        Problem("warning", "compose-note", str(file), note.removeprefix(f"{file.name}: ")) for note in compose.notes
    ]
    return compose


def _problem(file: Path, error: TaskError) -> Problem:
    where, _, rest = error.message.partition(": ")
    key, _, message = rest.partition(": ")
    if where == str(file) and message and " " not in key:
        return Problem("error", "invalid-compose", f"{file}: {key}", message)
    return Problem("error", "invalid-compose", where, rest)


def _lint_names(task: Task, compose: Compose | None) -> Iterator[Problem]:
    known = set(compose.services) if compose else {MAIN}
    for step in task.steps:
        for key, rows in (("artifacts", step.artifacts), ("verifier.collect", step.collect)):
            for name in sorted({row.service for row in rows if row.service} - known):
                where = f"{task.path / 'task.toml'}: {key}"
                yield Problem("error", "unknown-service", where, f"unknown service {name!r}")


_REPORT = "history.tsv"
_SECONDS = 300.0
_REPORT_LIMIT = 16 * 1024 * 1024
_MESSAGES = {
    "commits": "holds commits that are not ancestors of HEAD ({}); the solution may be among them",
    "files": "holds files that no commit of HEAD has ({}), left over from other commits",
    "bundle": "is a bundle of commits{}",
    "pack": "is a pack of git objects outside of a repository{}",
    "unseen": "is a repository, and the image has no git to look into it{}",
}
_SCRIPT = Path(__file__).with_name("history.sh")


async def find_history(
    task: Task, services: TrialServices, directory: Path, sandbox: SandboxChoice | None = None
) -> list[Problem]:
    """The problems of repository history in a task's sandbox."""
    record = TrialRecord(directory, Redactor(task_secrets(task, services.environ)))
    record.open()
    problems: list[Problem] = []
    try:
        with captured() as failure:
            async with open_environment(task, services, record, choice=sandbox) as environment:
                for index, step in enumerate(task.steps):
                    await environment.begin_step(index)
                    problems += await _search(environment, user_text(step.agent.user))
    finally:
        record.close()
    if failure.error is not None:
        message = f"could not be searched for a repository's history: {failure.error}"
        return [Problem("warning", "history", str(task.path), message)]
    return list(dict.fromkeys(problems))


async def _search(environment: TaskSandbox, user: str | None) -> list[Problem]:
    script = ["/bin/sh", "-c", _SCRIPT.read_text()]
    result = await environment.sandbox.exec(script, cwd=environment.workdir, user=user, timeout=_SECONDS)
    if not result.ok:
        how = f"took longer than {_SECONDS:g} s" if result.timed_out else f"ended with exit code {result.exit_code}"
        raise SandboxError(f"the search {how}: {result.error_text.strip()[-500:]}", retryable=False)
    try:
        text = await environment.sandbox.read_file(f"{AGENT_LOGS}/{_REPORT}", max_bytes=_REPORT_LIMIT)
    except FileNotFoundError:
        return []
    rows = (line.split("\t") for line in text.decode(errors="replace").splitlines())
    return [
        Problem("warning", "history", f"{environment.task.path}: {row[1]}", _MESSAGES[row[0]].format(row[2]))
        for row in rows
        if len(row) == 3 and row[0] in _MESSAGES
    ]
