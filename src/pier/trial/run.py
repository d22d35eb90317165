"""Runs one trial: prepare, start sandbox, health check, set up agent, run agent, collect, verify, seal.

Each phase has its own clock, network policy and blame. The sandbox is removed in any case. `result.json` is written
last; a trial that was cancelled or killed has none, so a later run repeats it. An infrastructure fault leaves a trial
without a reward, never with a zero.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pier import __version__
from pier.agent.contract import AGENT_LOGS, Agent
from pier.agent.oracle import OracleAgent
from pier.agent.packed import install
from pier.endpoint import GATEWAY_PORT, Endpoint
from pier.errors import AgentError, SandboxError, StorageError, UsageError
from pier.image.model import OnProgress
from pier.network.policy import PUBLIC, NetworkPolicy
from pier.record import RECORDING, About
from pier.redact import Redactor
from pier.sandbox.contract import Mount, Sandbox
from pier.secret import looks_secret, secret_values, secrets_in, secrets_in_text
from pier.task import TaskStep, resolve_env
from pier.task.model import wanted_in_headers
from pier.trial.agent import (
    check_session,
    describe_run,
    find_fault,
    home_of,
    make_agent,
    mcp_tables,
    prepare_agent,
    run_agent,
    run_until_accepted,
    sampling_of,
    usage_of,
)
from pier.trial.collect import STATE, collect, keep_state, seal_artifacts, take_logs
from pier.trial.diff import CHANGES, keep_diff
from pier.trial.environment import TaskSandbox, open_environment, task_secrets
from pier.trial.plan import NetworkPlan, plan_network
from pier.trial.record import Clock, TrialRecord, limit, now, resolved, task_reference, trial_config, trial_lock
from pier.trial.result import (
    AgentInfo,
    ModelInfo,
    PierInfo,
    StepResult,
    TimingInfo,
    TrialResult,
    VerifierResult,
    captured,
    combined_rewards,
    exception_info,
    finally_do,
    judge_as_harbor,
    stops_after,
    storage_fault,
)
from pier.trial.spec import OnPhase, TrialServices, TrialSpec, user_text
from pier.trial.trajectory import add_native_trajectory, add_trajectory, live_trajectory
from pier.trial.verify import grade

if TYPE_CHECKING:
    from pier.gateway.session import Session
    from pier.trajectory.calls import Generation

_SETUP_SECONDS = 1800.0
"""Default time limit for building an agent's pack, which happens once for all trials."""


async def run_trial(
    spec: TrialSpec,
    services: TrialServices,
    on_phase: OnPhase | None = None,
    on_progress: OnProgress | None = None,
) -> TrialResult:
    """Run one trial. `on_progress` receives updates on long work, such as the build of its image. Failures are recorded
    in the result; only a cancellation or an unusable trial directory raises."""
    return await TrialRun(spec, services, on_phase, on_progress).run()


def trial_secrets(spec: TrialSpec, environ: Mapping[str, str]) -> Iterable[str]:
    """The secrets of the run and the task, without those whose variables are missing."""
    config = spec.task.config
    for table in (spec.agent.env, spec.verifier.env, spec.sandbox.settings.env):
        yield from secret_values(table, environ, given=True)
    yield from task_secrets(spec.task, environ)
    servers = (*config.environment.mcp_servers, *mcp_tables(spec.agent))
    known = [spec.agent.kwargs, spec.sandbox.settings.kwargs, *(server.model_dump(mode="json") for server in servers)]
    yield from secrets_in(known, environ)
    for server in servers:
        templates = {name: f"${{{name}}}" for name in wanted_in_headers(server.headers)}
        yield from secret_values(templates, environ, given=True)
    yield from secrets_in_text(spec.task.origin.git_url or "")


def _ignore(_: Generation) -> None:
    """Discard a model call."""


class TrialRun:
    """Runs one trial: creates its directory, captures failures and seals the result. Subclasses may override `work`,
    which produces the outcomes of the steps."""

    def __init__(
        self, spec: TrialSpec, services: TrialServices, on_phase: OnPhase | None, on_progress: OnProgress | None
    ) -> None:
        self.spec = spec
        self.services = services
        self.on_progress = on_progress
        self.environ = services.environ
        self.redactor = Redactor((*spec.secrets, *trial_secrets(spec, self.environ)))
        self.record = TrialRecord(spec.directory, self.redactor, kept=spec.recorded)
        self.clock = Clock(self.record, on_phase)
        self.outcomes: list[StepResult] = []
        config = trial_config(spec, self.environ)
        self.config = self.redactor.value(config) if self.redactor else config
        self.result = TrialResult(
            task_name=spec.task.name,
            trial_name=spec.name,
            trial_uri=(resolved(spec.directory.parent) / spec.directory.name).as_uri(),
            task_id=self.redactor.value(task_reference(spec.task.origin)),
            source=spec.task.origin.source,
            task_checksum=spec.task.digest.removeprefix("sha256:"),
            config=self.config,
            agent_info=AgentInfo(name=spec.agent.kind, model_info=ModelInfo.of(spec.agent.model_name)),
            environment_type=services.backend.name,
            started_at=now(),
        )

    async def run(self) -> TrialResult:
        self.record.open()
        try:
            if self.record.kept:
                self.record.write("config.json", self.config)
                self.record.write("lock.json", trial_lock(self.spec, self.config))
            with captured() as failure:
                await self.work()
            if failure.error is not None:
                self.result.exception_info = exception_info(failure.error, self.clock.current, self.redactor)
                self.record.log(f"error: {failure.error}")
            with self.clock.phase("seal"):
                self._seal()
            return self.result
        except BaseException as error:
            self.record.log(f"ended without a result: {type(error).__name__}")
            raise
        finally:
            self.record.close()

    async def work(self) -> None:
        """Start the task's sandbox, run each step in it and append to `outcomes`."""
        spec = self.spec
        with self.clock.phase("prepare"):
            agent = make_agent(spec.agent)
            network = self._plan_network(agent)
        async with open_environment(
            spec.task,
            self.services,
            self.record,
            name=spec.name,
            choice=spec.sandbox,
            network=network,
            get_mounts=partial(self._prepare_agent, agent),
            factor=spec.factor("environment_build"),
            clock=self.clock,
            on_progress=self.on_progress,
        ) as environment:
            if spec.on_sandbox is not None:
                spec.on_sandbox(environment.sandbox)
            if spec.agent.install_in_sandbox:
                await self._install(agent, environment)
            for index, step in enumerate(spec.task.steps):
                outcome = await self._run_step(agent, environment, index)
                self.outcomes.append(outcome)
                reason = stops_after(step, outcome, not spec.verifier.disable)
                if reason and step.name:
                    self.record.log(f"step {step.name!r} is the last one: {reason}")
                    break

    def _plan_network(self, agent: Agent) -> NetworkPlan:
        spec, settings = self.spec, self.spec.agent
        reach = agent.reach(settings.kwargs, settings.env, direct=settings.direct or settings.model_name is None)
        return plan_network(
            spec.task.config.environment,
            spec.task.steps,
            override=spec.sandbox.network,
            hosts=spec.sandbox.hosts,
            agent_hosts=(*reach, *settings.extra_allowed_hosts),
            verifier_hosts=tuple(spec.verifier.extra_allowed_hosts),
            setup=PUBLIC if settings.install_in_sandbox else None,
        )

    @property
    def _setup_seconds(self) -> float:
        return (self.spec.agent.override_setup_timeout_sec or _SETUP_SECONDS) * self.spec.factor("agent_setup")

    async def _prepare_agent(self, agent: Agent) -> tuple[Mount, ...]:
        """The agent's mounts. Its pack is built first if it is missing."""
        seconds = self._setup_seconds
        message = f"setting up the agent {agent.name!r} took longer than {seconds:g} s"
        async with limit(
            seconds, lambda: AgentError(message, code="agent_setup_timeout", blame="infra", retryable=True)
        ):
            ready = await prepare_agent(agent, self.spec.agent, lambda line: self.record.report(line, self.on_progress))
        self._set_version(agent, ready.version)
        return ready.mounts

    async def _install(self, agent: Agent, environment: TaskSandbox) -> None:
        """Install the agent in the sandbox with a public network. The agent's keys are left out of the environment,
        since packages of a registry run code."""
        assert agent.pack is not None
        variables = resolve_env(self.spec.agent.env, where="the agent's variables", environ=self.environ)
        env = {
            name: value
            for name, value in variables.items()
            if name.lower().startswith(("npm_", "pip_")) or not looks_secret(name)
        }
        baseline, path = environment.network, self.spec.directory / "agent" / "install.txt"
        with self.clock.phase("setup"), self.record.output(path) as output:
            await environment.switch_network(PUBLIC)
            version = await install(environment.sandbox, agent.pack, env, self._setup_seconds, output)
            await environment.switch_network(baseline)
        self._set_version(agent, version)

    def _set_version(self, agent: Agent, version: str) -> None:
        info = AgentInfo(name=agent.name, version=version, model_info=ModelInfo.of(self.spec.agent.model_name))
        self.result.agent_info = info

    async def _run_step(self, agent: Agent, environment: TaskSandbox, index: int) -> StepResult:
        """Run one step to its verdict. Failures are recorded in the outcome; only a cancellation raises."""
        step, baseline = self.spec.task.steps[index], environment.network
        directory = self.spec.directory / "steps" / step.name if step.name else self.spec.directory
        outcome = StepResult(step_name=step.name)
        with captured() as failure:
            with self.clock.phase("health"):
                await environment.begin_step(index)
            await self._run_agent(agent, environment, index, outcome, directory / "agent")
            await environment.switch_network(baseline)
            async with finally_do(partial(seal_artifacts, directory / "artifacts", self.record)):
                await self._collect_and_grade(environment, index, outcome, directory)
        if failure.error is not None:
            if storage_fault(failure.error) is not None:
                outcome.verifier_result = None
            outcome.exception_info = exception_info(failure.error, self.clock.current, self.redactor)
            self.record.log(f"error: {failure.error}")
        return outcome

    async def _collect_and_grade(
        self, environment: TaskSandbox, index: int, outcome: StepResult, directory: Path
    ) -> None:
        spec, steps = self.spec, self.spec.task.steps
        with self.clock.phase("collect"):
            collected = await collect(environment, index, directory / "artifacts", spec.artifacts)
            if self.result.agent_info.name not in ("oracle", "nop") and spec.recorded:
                await keep_diff(environment, index, directory / CHANGES)
            if spec.keep_state:
                try:
                    await keep_state(environment.sandbox, directory / STATE)
                except SandboxError as error:
                    self.record.warn(str(error))
            if steps[index].verifier_mode != "separate":
                await seal_artifacts(directory / "artifacts", self.record)
        if spec.verifier.disable:
            return
        with self.clock.phase("verify") as outcome.verifier:
            graded = await grade(
                environment,
                directory,
                index=index,
                settings=spec.verifier,
                factor=spec.factor("verifier"),
                collected=collected,
                last=index == len(steps) - 1,
            )
            if graded.rewards is not None:
                outcome.verifier_result = VerifierResult(rewards=dict(graded.rewards))
            outcome.integrity = graded.integrity(self.redactor)
            if graded.error is not None:
                raise graded.error

    async def _run_agent(
        self, agent: Agent, environment: TaskSandbox, index: int, outcome: StepResult, logs: Path
    ) -> None:
        spec, sandbox, record = self.spec, environment.sandbox, self.record
        policy, step, workdir = environment.plan.steps[index].agent, spec.task.steps[index], environment.workdir
        with self.clock.phase("setup") as outcome.agent_setup:
            home = "" if isinstance(agent, OracleAgent) else await home_of(sandbox, user_text(step.agent.user))
            run = describe_run(spec, step, agent, workdir=workdir, home=home, environ=self.environ)
            await environment.switch_network(policy)
        about = About(agent.name, self.result.agent_info.version, spec.agent.model_name, spec.name)

        async def keep_logs() -> None:
            if (logs / RECORDING).is_file():
                outcome.agent_result = await add_trajectory(logs, about, outcome.agent_result, record)
            if spec.recorded or spec.agent.direct:
                await take_logs(sandbox, AGENT_LOGS, logs, record)
            if spec.agent.direct:
                outcome.agent_result = await add_native_trajectory(logs, about, outcome.agent_result, record)

        async with finally_do(keep_logs), AsyncExitStack() as stack:
            outcome.agent_execution = stack.enter_context(self.clock.phase("agent"))
            session = await stack.enter_async_context(self._model_session(agent, sandbox, logs, policy, step))
            run = replace(run, warn=record.warn)
            if session is not None:
                if spec.recorded:
                    await stack.enter_async_context(live_trajectory(logs, about))
                if session.served_by:
                    record.log(f"model {spec.agent.model_name}: {session.served_by}")
                run = replace(run, endpoint=session.endpoint(), outside=await self._outside(session, agent))
            with record.output(logs / f"{agent.name}.txt") as output:
                if spec.accept is None:
                    failed = await run_agent(agent, sandbox, run, output)
                else:
                    failed = await run_until_accepted(agent, sandbox, run, output, spec.accept)
                failed = await find_fault(agent, failed, session)
            outcome.agent_result = usage_of(session)
        if session is not None:
            check_session(session)
            if (counts := session.counts).retries:
                waited = f"{counts.waited:.1f} s of waiting"
                record.log(f"model: {counts.retries} retries after faults of the provider, {waited}")
        if failed is not None and failed.blame in ("provider", "infra"):
            raise failed  # the agent could not continue, so its work is not graded
        if failed is not None:
            record.log(f"agent: {failed}")
            outcome.exception_info = exception_info(failed, "agent", self.redactor)

    @asynccontextmanager
    async def _model_session(
        self, agent: Agent, sandbox: Sandbox, logs: Path, policy: NetworkPolicy, step: TaskStep
    ) -> AsyncIterator[Session | None]:
        """A session at the gateway, which listens inside the sandbox; None without a model, or if the agent calls its
        provider itself. Unless the network is public, the model gets no internet access either."""
        spec, gateway, settings = self.spec, self.services.gateway, self.spec.agent
        needs_gateway = settings.model_name is not None and not settings.direct
        if needs_gateway and gateway is None and agent.dialect is not None:
            raise UsageError(f"the agent {agent.name!r} needs a model, and this run has no gateway")
        if not needs_gateway or gateway is None:
            yield None
            return
        from pier.gateway.budget import Budget

        model, upstream = settings.model_name, spec.policy
        if settings.connection:
            target = gateway.directory.connected(model or "", self.environ, **settings.connection)
            model, upstream = target.model, target.provider
        watch = None
        if spec.on_generation is not None:
            watch = partial(spec.on_generation, step.name or None)
        elif not spec.recorded:  # makes the session keep its calls in memory, which `find_fault` needs
            watch = _ignore
        session = gateway.session(
            model,
            upstream=upstream,
            budget=Budget(**settings.budget.model_dump()),
            pool=self.services.pool,
            recording=logs / RECORDING if spec.recorded else None,
            closed_book=policy.mode != "public",
            labels={"trial": spec.name, "task": spec.task.name},
            redactor=self.redactor,
            sampling=sampling_of(settings),
            on_generation=watch,
        )
        try:
            listener = await sandbox.listen(GATEWAY_PORT, gateway.protocol_factory(session))
            try:
                yield session
            finally:
                await asyncio.shield(listener.close())
        finally:
            await asyncio.shield(session.close())

    async def _outside(self, session: Session, agent: Agent) -> Endpoint | None:
        """The session's endpoint for an agent that calls its model from outside the sandbox."""
        if not agent.outside or self.services.gateway is None:
            return None
        return replace(session.endpoint(), url=await self.services.gateway.serve(session=session))

    def _seal(self) -> None:
        """Complete the result and write it, which finishes the trial."""
        result, spec = self.result, self.spec
        errors = (outcome.exception_info for outcome in self.outcomes if outcome.exception_info)
        result.exception_info = result.exception_info or next(errors, None)
        if spec.task.is_multi_step:
            strategy = spec.task.config.multi_step_reward_strategy or "mean"
            rewards = combined_rewards(self.outcomes, strategy)
            result.verifier_result = VerifierResult(rewards=rewards) if rewards is not None else None
            result.step_results = self.outcomes
        elif self.outcomes:
            (outcome,) = self.outcomes
            result.agent_result = outcome.agent_result
            result.n_agent_steps = outcome.agent_result.n_agent_steps if outcome.agent_result else None
            result.agent_setup = outcome.agent_setup
            result.verifier_result = outcome.verifier_result
            result.agent_execution = outcome.agent_execution
            result.verifier = outcome.verifier
            result.integrity = outcome.integrity
            result.verifier_environment_mode = spec.task.steps[0].verifier_mode if not spec.verifier.disable else None
        if self.record.fault is not None:
            lost = StorageError(f"the trial's log could not be written: {self.record.fault}")
            result.exception_info = exception_info(lost, self.clock.current, self.redactor)
            for graded in (result, *self.outcomes):
                graded.verifier_result = None
        if result.exception_info is not None:
            self.record.write_exception(result.exception_info.exception_traceback)
        judge_as_harbor(result)
        image, timings = self.record.image, self.clock.timings
        if "health" in timings:
            result.environment_setup = TimingInfo(
                started_at=timings["prepare"].started_at, finished_at=timings["start"].finished_at
            )
        result.finished_at = now()
        result.pier = PierInfo(
            version=__version__,
            attempt=spec.attempt,
            backend=self.services.backend.name,
            image=image.reference if image else None,
            image_digest=image.digest if image else None,
            task_digest=spec.task.digest,
            n_steps=len(spec.task.steps) if spec.task.is_multi_step else None,
            graded_steps=sum(o.rewards is not None for o in self.outcomes) if spec.task.is_multi_step else None,
            phases=dict(self.clock.seconds),
            warnings=list(self.record.warnings),
            network_refused=dict(self.record.refused.most_common(100)),
        )
        self.record.log(f"rewards {result.rewards}")
        self.record.write("result.json", result)
