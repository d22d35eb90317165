"""Rollouts: groups of trials of each task on your own model, as a stream of rewards and exact samples.

A rollout is a trial of a job, with the job's schedule, retries and blame; its samples are made in memory as calls end.
Without `jobs_dir` the job has a temporary directory, and each trial's files are removed once it ended.

- Faults of the infrastructure are retried. A rollout that still fails, or that the policy or its provider failed, has
  no reward and no trainable sample. Neither is ever a zero.
- Back-pressure: while `ahead` finished rollouts wait for the consumer, no further one starts.
- Members of a group that still run at its deadline are cancelled, as are those whose first call is more than
  `max_staleness` versions of the policy old. The others are delivered, and the group is `partial`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pier import beneath
from pier.errors import JobError, UsageError
from pier.gateway.policy import Upstream, version_of
from pier.job.config import AgentConfig, BudgetConfig, DatasetConfig, EnvironmentConfig, JobConfig, RetryConfig
from pier.job.ledger import Fault, Outcome
from pier.job.plan import PlannedTrial
from pier.record import RECORDING
from pier.redact import Redactor
from pier.rollout.export import Report, Row, is_trainable, rows_of
from pier.rollout.samples import (
    Counts,
    Sample,
    SampleBuilder,
    SampleOrigin,
    group_id,
    origin_of,
    read_samples,
)
from pier.rollout.sandboxes import leased_directory
from pier.trajectory.calls import Generation
from pier.trial.result import TrialResult, read_result
from pier.trial.run import trial_secrets
from pier.trial.spec import TrialSpec
from pier.wire.turn import Sampling

if TYPE_CHECKING:
    from pier.gateway.budget import Budget
    from pier.job.directory import OpenJob
    from pier.job.runner import RunSpec

KINDS = ("main", "sub_agent")
POLICY = "policy"
"""The model name of a policy object."""


@dataclass(slots=True)
class Group:
    """The rollouts of one agent on one task. `finished` counts the members that ended, `graded` those with a reward."""

    id: str
    task: str
    size: int
    finished: int = 0
    graded: int = 0
    ends_at: float | None = None
    """Its deadline, by the event loop's clock."""

    @property
    def closed(self) -> bool:
        """Whether all members ended."""
        return self.finished >= self.size

    @property
    def partial(self) -> bool:
        """Whether it is closed and a member has no reward."""
        return self.closed and self.graded < self.size


@dataclass(frozen=True, slots=True)
class RolloutPart:
    """The samples of one session of a rollout; a task with steps has one session per step."""

    origin: SampleOrigin
    samples: tuple[Sample, ...]
    counts: Counts


@dataclass(frozen=True, slots=True)
class Rollout:
    """One finished trial. `reward` is None without a verdict, which is not a zero; `fault` is the blame then (infra,
    provider, task or user)."""

    id: str
    group: Group
    attempt: int
    parts: tuple[RolloutPart, ...]
    reward: float | None
    rewards: Mapping[str, float] | None
    termination_reason: str
    fault: str | None = None
    error: str | None = None
    seconds: float = 0.0
    result: TrialResult | None = None
    directory: Path | None = None
    redactor: Redactor = field(default_factory=Redactor, repr=False)

    @property
    def task(self) -> str:
        return self.group.task

    @property
    def samples(self) -> list[Sample]:
        return [sample for part in self.parts for sample in part.samples]

    @property
    def trainable(self) -> list[Sample]:
        """The samples with a reward that the agent earned, and something to train."""
        return [sample for part in self.parts for sample in part.samples if is_trainable(sample, part.origin)]

    @property
    def counts(self) -> Counts:
        """The counts of its calls: prefix-match rate, trained share, breaks."""
        total = Counts()
        for part in self.parts:
            total.add(part.counts)
        return total

    @property
    def turns(self) -> int:
        return sum(part.counts.generations - part.counts.unanswered for part in self.parts)

    @property
    def versions(self) -> tuple[str, ...]:
        """The versions of the weights that sampled it, oldest first."""
        return tuple(dict.fromkeys(version for sample in self.samples for version in sample.weights))

    def rows(self, form: str = "pier", *, trainable_only: bool = False) -> list[Row]:
        """Its samples as rows of an export, with secrets redacted."""
        rows = (rows_of(part.samples, part.origin, form, trainable_only=trainable_only) for part in self.parts)
        return [self.redactor.value(row) for part in rows for row in part]

    def report_to(self, report: Report) -> None:
        """Add it to the report of an export."""
        for part in self.parts:
            report.recordings += 1
            report.counts.add(part.counts)
            for sample in part.samples:
                report.add(sample, part.origin)


def make_rollout(
    name: str,
    group: Group,
    attempt: int,
    result: TrialResult | Mapping[str, Any],
    sessions: Mapping[str | None, tuple[Sequence[Sample], Counts, Path | None]],
    **more: Any,
) -> Rollout:
    """Make a rollout from its trial's result (or the known part of one) and, by step, the samples, counts and recording
    of its sessions."""
    fields = result.model_dump(mode="json") if isinstance(result, TrialResult) else result
    parts = tuple(
        RolloutPart(origin_of(fields, step, name, place), tuple(samples), counts)
        for step, (samples, counts, place) in sessions.items()
    )
    whole = origin_of(fields, None, name)
    return Rollout(
        id=name,
        group=group,
        attempt=attempt,
        parts=parts,
        reward=whole.reward,
        rewards=whole.rewards,
        termination_reason=parts[-1].origin.termination_reason,
        fault=whole.fault,
        result=result if isinstance(result, TrialResult) else None,
        **more,
    )


@dataclass(frozen=True, slots=True)
class RolloutLimits:
    """`deadline` is in seconds from the start of a group's first member."""

    deadline: float | None = None
    max_staleness: int | None = None
    kinds: Collection[str] = KINDS


class _Attempt:
    """One attempt at a rollout: its calls and its timeout."""

    def __init__(self, spec: TrialSpec, environ: Mapping[str, str]) -> None:
        self.builders: dict[str | None, SampleBuilder] = {}
        self.result: TrialResult | None = None
        self.cut: str | None = None
        self.version: str | None = None
        """Version of the policy in its first call."""
        self.clock: asyncio.Timeout | None = None
        self.redactor = Redactor((*spec.secrets, *trial_secrets(spec, environ)))

    def cut_off(self, reason: str) -> None:
        self.cut = self.cut or reason
        if self.clock is not None and not self.clock.expired():
            self.clock.reschedule(asyncio.get_running_loop().time())


class RolloutCollector:
    """A hook of a job (`pier.job.runner.TrialHook`) that emits a `Rollout` for each trial. `policy` replaces the models
    of all agents."""

    def __init__(
        self,
        emit: Callable[[Rollout], None],
        *,
        policy: Upstream | None = None,
        limits: RolloutLimits = RolloutLimits(),  # noqa: B008 - it is frozen
        recorded: bool = True,
        window: asyncio.Semaphore | None = None,
    ) -> None:
        self._emit = emit
        self._policy = policy
        self._limits = limits
        self._recorded = recorded
        self._window = window
        """Acquired by each rollout until its consumer takes it."""
        self._attempts: dict[str, _Attempt] = {}
        self._groups: dict[tuple[int, int], Group] = {}
        self._versions: list[str] = []
        self._env: Mapping[str, str] = {}
        self._job: OpenJob | None = None

    def opened(self, job: OpenJob, env: Mapping[str, str]) -> None:
        """Collect the groups, and emit the rollouts that an earlier run of the job finished."""
        self._job, self._env = job, env
        plan = job.ledger.plan
        for trial in plan.trials:
            self._group(trial).size += 1
        for trial in plan.trials:
            if trial.id in job.ledger.outcomes:
                self._read(trial, job.ledger.outcomes[trial.id])

    def _group(self, trial: PlannedTrial) -> Group:
        assert self._job is not None
        place = (trial.task, trial.agent)
        if place not in self._groups:
            plan = self._job.ledger.plan
            task, agent = plan.tasks[trial.task], plan.agents[trial.agent]
            words = (agent.get("name") or agent.get("import_path"), agent.get("model_name"))
            self._groups[place] = Group(group_id(task.name, task.digest, *words), task.name, 0)
        return self._groups[place]

    async def run(self, trial: PlannedTrial, spec: TrialSpec, go: RunSpec) -> TrialResult:
        """Run one attempt within the limits of its group."""
        if self._window is not None:
            await self._window.acquire()
        current, group, loop = _Attempt(spec, self._env), self._group(trial), asyncio.get_running_loop()
        self._attempts[trial.id] = current
        if group.ends_at is None and self._limits.deadline is not None:
            group.ends_at = loop.time() + self._limits.deadline

        def watch(step: str | None, generation: Generation) -> None:
            current.builders.setdefault(step, SampleBuilder()).add(generation)
            self._check_age(current, generation)

        spec = replace(spec, policy=self._policy, on_generation=watch, recorded=self._recorded)
        current.clock = asyncio.timeout_at(group.ends_at)
        try:
            async with current.clock:
                current.result = await go(spec)
        except TimeoutError:
            if not current.clock.expired():
                raise
            code = current.cut or "deadline"
            reasons = {"deadline": "its group's deadline passed", "stale": "its policy is too old"}
            raise JobError(f"the rollout was cut off: {reasons[code]}", code=f"rollout-{code}") from None
        return current.result

    def _check_age(self, current: _Attempt, generation: Generation) -> None:
        """Cancel a rollout whose first call is too many versions old."""
        tokens = generation.node.turn.tokens if generation.node.turn else None
        version = tokens.weights if tokens else None
        for known in (version, version_of(self._policy)):
            if known is not None and known not in self._versions:
                self._versions.append(known)
        current.version = current.version or version
        if self._limits.max_staleness is None or current.version is None:
            return
        if len(self._versions) - 1 - self._versions.index(current.version) > self._limits.max_staleness:
            current.cut_off("stale")

    def started(self, trial: PlannedTrial, number: int) -> None: ...

    def retrying(self, trial: PlannedTrial, outcome: Outcome, wait: float) -> None:
        if self._attempts.pop(trial.id, None) is not None and self._window is not None:
            self._window.release()

    def ended(self, trial: PlannedTrial, outcome: Outcome) -> None:
        if outcome.cancelled:
            self.retrying(trial, outcome, 0)
            return
        current = self._attempts.pop(trial.id, None)  # None if it failed before its start
        builders = (current.builders if current else None) or {None: SampleBuilder()}
        sessions = {step: (*builder.samples(self._limits.kinds), None) for step, builder in builders.items()}
        self._add(
            trial, outcome, current.result if current else None, sessions, current.redactor if current else Redactor()
        )
        if not self._recorded and self._job is not None:
            with contextlib.suppress(OSError):
                beneath.remove(str(self._job.trial_path(trial)))

    def _read(self, trial: PlannedTrial, outcome: Outcome) -> None:
        """Emit a rollout of an earlier run, read from its directory."""
        assert self._job is not None
        directory, result, sessions = self._job.trial_path(trial), None, {}
        with contextlib.suppress(JobError):
            result = read_result(directory)
        steps = [each.step_name for each in result.step_results or ()] if result else []
        for step in steps or [None]:
            place = (directory / "steps" / step if step else directory) / "agent" / RECORDING
            sessions[step] = (*read_samples(place, self._limits.kinds), place)
        self._add(trial, outcome, result, sessions, Redactor())

    def _add(
        self,
        trial: PlannedTrial,
        outcome: Outcome,
        result: TrialResult | None,
        sessions: Mapping[str | None, tuple[Sequence[Sample], Counts, Path | None]],
        redactor: Redactor,
    ) -> None:
        assert self._job is not None
        group = self._group(trial)
        rollout = make_rollout(
            trial.name,
            group,
            trial.attempt,
            result or _without_result(trial, outcome),
            sessions,
            error=outcome.fault.message if outcome.fault else None,
            seconds=outcome.seconds,
            directory=self._job.trial_path(trial) if self._recorded else None,
            redactor=redactor,
        )
        group.finished += 1
        group.graded += rollout.reward is not None
        self._emit(rollout)


def _without_result(trial: PlannedTrial, outcome: Outcome) -> dict[str, Any]:
    """The fields of a result for a trial without one."""
    fault = outcome.fault or Fault("PierError", "unknown", "infra", False, "")
    return {
        "trial_name": trial.name,
        "pier": {"attempt": trial.attempt},
        "exception_info": {"code": fault.code, "blame": fault.blame, "exception_type": fault.type},
    }


class Rollouts:
    """A stream of rollouts, made by `rollouts`. Leaving the loop or the context cancels those that still run."""

    def __init__(
        self,
        config: JobConfig,
        policy: Upstream | None,
        limits: RolloutLimits,
        *,
        ahead: int,
        env: Mapping[str, str] | None = None,
        kept: bool = False,
        yes: bool = False,
    ) -> None:
        self.config = config
        self.report = Report()
        self._env = dict(os.environ if env is None else env)
        self._kept, self._yes = kept, yes
        self._window = asyncio.Semaphore(config.n_concurrent_trials + ahead)
        self._done: asyncio.Queue[Rollout | None] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._collector = RolloutCollector(self._emit, policy=policy, limits=limits, recorded=kept, window=self._window)

    def _emit(self, rollout: Rollout) -> None:
        rollout.report_to(self.report)
        self._done.put_nowait(rollout)

    async def _run(self) -> None:
        from pier.job.command import run_quietly

        try:
            if self._kept:
                await run_quietly(self.config, self._env, yes=self._yes, hook=self._collector)
                return
            with leased_directory("rollouts") as directory:
                config = self.config.model_copy(update={"jobs_dir": str(directory)})
                await run_quietly(config, self._env, yes=self._yes, hook=self._collector)
        finally:
            self._done.put_nowait(None)

    async def __aenter__(self) -> Rollouts:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancel running rollouts, and return once their sandboxes are removed. Idempotent."""
        task, self._task = self._task, None
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait({task})

    def __aiter__(self) -> AsyncIterator[Rollout]:
        return self._iterate()

    async def _iterate(self) -> AsyncGenerator[Rollout, None]:
        if self._task is not None:
            raise UsageError("these rollouts are already running", hint="call rollouts() again for others")
        self._task = task = asyncio.create_task(self._run())
        try:
            while (rollout := await self._done.get()) is not None:
                self._window.release()
                yield rollout
            await task
        finally:
            await asyncio.shield(self.aclose())

    async def groups(self) -> AsyncGenerator[list[Rollout], None]:
        """Yield whole groups, each as soon as its last member ended."""
        waiting: dict[int, list[Rollout]] = {}
        async with contextlib.aclosing(self._iterate()) as stream:
            async for rollout in stream:
                members = waiting.setdefault(id(rollout.group), [])  # tasks of two groups may have the same name
                members.append(rollout)
                if rollout.group.closed and len(members) == rollout.group.size:
                    yield waiting.pop(id(rollout.group))


def agent_on(
    policy: Upstream, agent: str | AgentConfig, sampling: Sampling | None, budget: Budget | None
) -> AgentConfig:
    """The settings of an agent with `policy` as its model. Limits that `budget` does not set stay."""
    settings = AgentConfig(name=agent) if isinstance(agent, str) else agent
    model = policy if isinstance(policy, str) else settings.model_name or POLICY
    update: dict[str, Any] = {"model_name": model}
    if sampling is not None:
        update["sampling"] = sampling.given()
    if budget is not None:
        limits = {name: limit for name, limit in asdict(budget).items() if limit is not None}
        update["budget"] = BudgetConfig(**settings.budget.model_dump() | limits)
    return settings.model_copy(update=update)


def rollouts(
    tasks: str | Path | Sequence[str | Path],
    *,
    policy: Upstream,
    agent: str | AgentConfig = "command",
    group: int = 1,
    concurrency: int = 64,
    sampling: Sampling | None = None,
    budget: Budget | None = None,
    deadline: float | None = None,
    max_staleness: int | None = None,
    retries: int = 2,
    ahead: int | None = None,
    kinds: Collection[str] = KINDS,
    backend: str | EnvironmentConfig = "local",
    image: str | None = None,
    jobs_dir: str | Path | None = None,
    job_name: str | None = None,
    env: Mapping[str, str] | None = None,
    yes: bool = False,
) -> Rollouts:
    """Run `agent` on each of `tasks`, `group` times, with `policy` as its model, and stream the finished rollouts.

    `policy` is a callable, `Replicas`, a provider, or a model's name as in `pier run -m`. `sampling` replaces the
    agent's own parameters. `deadline` is in seconds for each group, `max_staleness` in versions of the policy;
    `retries` apply to faults of the infrastructure. At most `ahead` finished rollouts (by default `concurrency`) wait
    for the consumer. With `jobs_dir` the run is a job there, resumed if it was interrupted. `yes` grants tasks the
    environment variables that they request.
    """
    named = isinstance(policy, str)
    places = [tasks] if isinstance(tasks, str | Path) else tasks
    config = JobConfig(
        datasets=[DatasetConfig(path=str(place)) for place in places],
        agents=[agent_on(policy, agent, sampling, budget)],
        environment=EnvironmentConfig(type=backend) if isinstance(backend, str) else backend,
        image=image,
        n_attempts=group,
        n_concurrent_trials=concurrency,
        retry=RetryConfig(max_retries=retries, blame=["infra"]),
        jobs_dir=str(jobs_dir or "jobs"),
        job_name=job_name,
        skip_credential_checks=not named,
    )
    limits = RolloutLimits(deadline, max_staleness, kinds)
    waiting = concurrency if ahead is None else ahead
    own = None if named else policy
    return Rollouts(config, own, limits, ahead=waiting, env=env, kept=jobs_dir is not None, yes=yes)
