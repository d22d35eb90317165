"""Turns planned trials into specs that can be run: the task is loaded again and must match its planned digest.

Regrading jobs are planned here too: their trials restore the state that earlier agents left and run only the verifier.
The earlier job is never changed. Its tasks are loaded in their present form, since a fixed verifier is the usual reason
for regrading; trials keep their names, so that the two jobs can be compared.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

from pydantic import TypeAdapter, ValidationError

from pier.agent.contract import AGENTS, Agent, AgentRun, Launch, find_agent
from pier.endpoint import Endpoint
from pier.errors import AgentError, ImageError, JobError, PierError, TaskError, UsageError
from pier.image.model import parse
from pier.job.config import AgentConfig, EnvironmentConfig, JobConfig
from pier.job.ledger import Ledger
from pier.job.load import fill, job_secrets
from pier.job.plan import Plan, PlannedTrial
from pier.lease import Lease
from pier.plugin import find, load
from pier.redact import Redactor
from pier.sandbox import BACKENDS, open_backend
from pier.sandbox.contract import Backend, Mount, OnOutput, Result, Sandbox
from pier.task import Task, load_task
from pier.task.load import Origin, describe
from pier.task.model import Artifact
from pier.task.sources import check_out
from pier.trial.agent import check_settings, make_agent, mcp_tables, sampling_of
from pier.trial.collect import STATE, has_state, restore_state
from pier.trial.images import ImageRequest
from pier.trial.plan import agent_plan, check_images, check_support, needs_support
from pier.trial.result import MULTIPLIERS
from pier.trial.spec import SandboxChoice, TrialSpec

AGENT = "pier.job.specs:KeptState"
REVIEW = "pier.review.order:as_review"
"""Extends the spec of a review's trial by the mount of the reviewed trial and the check of the output."""


class KeptState(Agent):
    """Replaces the agent in a regrading: restores the kept state of each step in the sandbox."""

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


def plan_regrade(source: Path, config: JobConfig) -> tuple[Plan, int]:
    """Return the plan for regrading the job in `source`, and the number of finished trials without a kept state."""
    ledger = Ledger.read(source)
    loaded = [load_task(task.path, strict=config.strict) for task in ledger.plan.tasks]
    both = zip(ledger.plan.tasks, loaded, strict=True)
    tasks = [replace(old, name=task.name, digest=task.digest) for old, task in both]
    finished = [trial for trial in ledger.plan.trials if trial.id in ledger.outcomes]
    kept = [trial for trial in finished if all(map(has_state, _states(source / trial.name, loaded[trial.task])))]
    if not kept:
        composed = sorted({task.name for task in loaded if task.compose is not None})
        why = f"; the state of tasks with several services is not kept: {', '.join(composed)}" if composed else ""
        raise JobError(
            f"nothing to regrade: no finished trial of {source} has kept its state{why}",
            hint="run the job again" if len(composed) == len(loaded) else "run the job with --keep-state",
            code="no-state",
        )
    trials = [
        replace(trial, id=hashlib.sha256(f"regrade/{trial.id}/{tasks[trial.task].digest}".encode()).hexdigest()[:16])
        for trial in kept
    ]
    return Plan(tuple(tasks), ledger.plan.agents, tuple(trials)), len(finished) - len(kept)


def _states(trial: Path, task: Task) -> list[Path]:
    return [(trial / "steps" / step.name if step.name else trial) / STATE for step in task.steps]


class Specs:
    """Creates the specs of a job's trials. Templates outside of `env` tables are filled here, in memory only. Any
    template that cannot be filled raises a `UsageError` at once."""

    def __init__(self, config: JobConfig, plan: Plan, job_id: str, env: Mapping[str, str]) -> None:
        dumped = config.model_dump(mode="json")
        fill(dumped, env)
        self._plan = plan
        self._job_id = job_id
        self._config, self._env = config, env
        self._task = lru_cache(64)(self._load_task)  # trials of one task follow each other in the plan
        self._agents = [_agent(agent, env) for agent in config.agents]
        for settings in self._agents:
            agent = _check_agent(settings, job_budget=bool(config.budget.model_dump(exclude_none=True)))
            if agent.options and config.regrade_of is None and settings.kind.partition("@")[0] in AGENTS:
                _check_options(agent, settings)
        self._sandbox = replace(_sandbox(config, env), hidden=_hidden(config, plan))
        self._multipliers = {name: getattr(config, name) for name in MULTIPLIERS}
        self.builds = config.n_concurrent_builds
        try:
            self._artifacts = TypeAdapter(tuple[Artifact, ...]).validate_python(config.artifacts)
        except ValidationError as error:
            raise UsageError(f"artifacts{describe(error)}", code="job-config") from error
        self._secrets = tuple(sorted(set(job_secrets(dumped, env))))
        self.redactor = Redactor(self._secrets)

    def spec(self, trial: PlannedTrial, directory: Path) -> TrialSpec:
        """Return the spec of `trial` in `directory`. Raises `TaskError` if the task changed since it was planned."""
        task, agent = self._task(trial.task), self._agents[trial.agent]
        if self._config.regrade_of is not None:
            states = _states(Path(self._config.regrade_of, trial.name), task)
            agent = AgentConfig(name=AGENT, kwargs={"states": [str(state) for state in states]})
        spec = TrialSpec(
            name=trial.name,
            task=task,
            directory=directory,
            agent=agent,
            verifier=self._config.verifier,
            sandbox=self._sandbox,
            multipliers=self._multipliers,
            attempt=trial.attempt,
            job_id=self._job_id,
            artifacts=self._artifacts,
            extra_instructions=tuple(self._config.extra_instructions),
            keep_state=self._config.keep_state or not self._config.environment.delete,
            secrets=self._secrets,
        )
        return load(REVIEW)(spec) if self._config.review else spec

    def check_tasks(self) -> None:
        """Refuse a job of which every task is refused for a reason that is known before anything starts."""
        refused: PierError | None = None
        for place in range(len(self._plan.tasks)):
            try:
                task = self._task(place)
                if needs_support(task, self._sandbox):
                    asyncio.run(self._check_support(task))
                check_images(task, self._sandbox, self._env, verify=not self._config.verifier.disable)
            except PierError as error:
                refused = refused or error
            else:
                return
        if refused is not None and (count := len(self._plan.tasks)) > 1:
            message = f"none of the {count} tasks can run, the first because {refused.message}"
            raise UsageError(message, hint=refused.hint, code=refused.code) from refused
        if refused is not None:
            raise refused

    async def _check_support(self, task: Task) -> None:
        environment = self._config.environment
        with Lease(label="check") as lease:
            async with open_backend(environment.backend, lease, environment.kwargs) as backend:
                await check_support(task, backend, self._sandbox)

    def build_request(self, place: int) -> ImageRequest | None:
        """Return the request for building a task's image; None if nothing needs to be built."""
        if self._sandbox.image or not Path(self._plan.tasks[place].path, "environment", "Dockerfile").is_file():
            return None
        request = agent_plan(self._task(place), self._sandbox).image
        return request if request.is_build else None

    def _load_task(self, place: int) -> Task:
        planned = self._plan.tasks[place]
        path, url, commit = Path(planned.path), planned.git_url, planned.git_commit_id
        if url and not path.exists():
            check_out(url, commit)
        origin = Origin(path, planned.source, url, commit, planned.git_path)
        verify = not self._config.verifier.disable
        task = load_task(path, strict=self._config.strict, verify=verify, origin=origin)
        if task.digest != planned.digest:
            raise TaskError(
                f"the task {planned.name} in {planned.path} has changed since the job was planned",
                hint="start a new job with the changed task",
                code="task_changed",
            )
        return task


def _agent(agent: AgentConfig, env: Mapping[str, str]) -> AgentConfig:
    """Fill the templates of an agent's settings, except in `env`."""
    model = fill(agent.model_name, env, "agents.model_name")
    options = fill(agent.kwargs, env, "agents.kwargs")
    if agent.direct and model and "model" in find_agent(agent.kind).options:
        options = {"model": model, **options}
    update = {"model_name": model, "kwargs": options, **fill(agent.connection, env, "agents")}
    filled = agent.model_copy(update=update)
    mcp_tables(filled)
    sampling_of(filled)
    return filled


def _check_options(agent: Agent, settings: AgentConfig) -> None:
    """Raise `UsageError` for option values that a built-in agent cannot be started with, by creating its command."""
    model = None if settings.direct else settings.model_name
    endpoint = Endpoint("http://127.0.0.1", "", model) if model else None
    agent.mounts(settings.kwargs)
    with contextlib.suppress(AgentError, TaskError):  # some need more than options
        agent.launch(AgentRun("", "/", endpoint, options=settings.kwargs))


def _check_agent(settings: AgentConfig, *, job_budget: bool) -> Agent:
    """Create the agent. Raises `UsageError` for an unknown agent or option, a missing model, and limits that cannot be
    enforced."""
    agent = make_agent(settings)
    check_settings(agent, settings)
    if agent.dialect is not None and settings.model_name is None and not settings.direct:
        raise UsageError(f"the agent {settings.kind} needs a model", hint="add -m MODEL", code="no-model")
    if settings.connection and (settings.direct or (settings.model_name or "").startswith(("script:", "replay:"))):
        raise UsageError(
            f"{', '.join(settings.connection)}: the gateway calls no provider for the agent {settings.kind}",
            hint="pass the address and the key with --ae" if settings.direct else "leave it out",
            code="no-provider",
        )
    if settings.direct and (settings.budget.model_dump(exclude_none=True) or job_budget):
        raise UsageError(
            f"cannot enforce a budget: the agent {settings.kind} calls its provider directly",
            hint="leave out --direct, or the limits",
            code="direct-budget",
        )
    return agent


def _sandbox(config: JobConfig, env: Mapping[str, str]) -> SandboxChoice:
    environment, image = config.environment, fill(config.image, env, "image")
    if image is not None:
        try:
            parse(image)
        except ImageError as error:
            raise UsageError(error.message, code=error.code) from error
    backend = find("backend", environment.backend, BACKENDS)
    options = getattr(backend, "options", ())
    for name in ("cpu", "memory"):
        policy = getattr(environment, f"{name}_enforcement_policy")
        if policy not in ("auto", "limit"):
            where = f"environment.{name}_enforcement_policy"
            raise UsageError(f"invalid value {policy!r} for {where}: expected auto or limit", code="not-done")
    if unknown := [name for name in environment.kwargs if name not in options]:
        known = f"known options: {', '.join(options)}" if options else "it has no options"
        raise UsageError(
            f"environment.kwargs: the backend {environment.backend} has no option {unknown[0]!r}; {known}", code="usage"
        )
    if environment.override_gpus and getattr(backend, "has_gpus", None) is Backend.has_gpus:
        raise UsageError(f"the backend {environment.backend} has no GPUs", hint="leave out --override-gpus")
    return SandboxChoice(environment, image, mounts=_mounts(environment))


def _hidden(config: JobConfig, plan: Plan) -> tuple[Path, ...]:
    """Return the paths to hide from agents: the results of all jobs, and all tasks. Hiding a dataset's directory hides
    its tasks, except if a mount may be inside of it."""
    datasets = [Path(each.path).resolve() for each in config.datasets if each.path]
    tasks = [Path(task.path) for task in plan.tasks]
    if not config.environment.mounts and not any("mount" in agent.kwargs for agent in config.agents):
        tasks = [path for path in tasks if not any(path.is_relative_to(dataset) for dataset in datasets)]
    return (Path(config.jobs_dir).resolve(), *datasets, *tasks)


def _mounts(environment: EnvironmentConfig) -> tuple[Mount, ...]:
    found: list[Mount] = []
    for index, row in enumerate(environment.mounts):
        where, kind = f"environment.mounts[{index}]", row.get("type", "bind")
        unknown = row.keys() - {"type", "source", "target", "read_only"}
        if unknown or kind not in ("bind", "tmpfs") or not isinstance(row.get("target"), str):
            raise UsageError(f"{where}: expected type bind or tmpfs, source, target and read_only, got {sorted(row)}")
        if kind == "tmpfs":
            found.append(Mount(row["target"], read_only=False))
            continue
        source = Path(str(row.get("source", ""))).expanduser()
        if not source.is_absolute() or not source.exists():
            raise UsageError(f"{where}: the source {str(source)!r} must be an absolute path that exists")
        found.append(Mount(row["target"], source, read_only=bool(row.get("read_only", False))))
    return tuple(found)
