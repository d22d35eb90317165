"""One trial from its spec to its sealed result: prepare, start sandbox, health check, set up agent, run agent, collect,
verify, seal.

Each phase has its own clock, network policy and blame. Whatever happens, the sandbox is gone and `result.json` is
written last; a trial that was cancelled or killed has none, which is how a later run knows that it is still owed. An
infrastructure fault leaves a trial without a reward, never with a zero.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Awaitable, Iterable
from pathlib import Path
from typing import TypeVar

from pier import __version__
from pier.agent.contract import Agent
from pier.agent.install import install
from pier.errors import AgentError, SandboxError, StorageError
from pier.image.model import Image, OnProgress
from pier.network.decision import Decision, OnDecision
from pier.network.policy import PUBLIC, NetworkPolicy
from pier.redact import Redactor
from pier.sandbox.compose import Composition
from pier.sandbox.contract import Mount, Sandbox
from pier.secret import looks_secret, secret_values, secrets_in, secrets_in_text
from pier.task import resolve_env
from pier.trial.agents import Brought, bring_agent, make_agent
from pier.trial.clock import Clock, limit, now
from pier.trial.compose import SERVICES, ServiceLogs, service_images
from pier.trial.configfile import trial_config, trial_lock
from pier.trial.environment import Room, agent_room, check_support, furnish, sandbox_limits, start_room
from pier.trial.grading import GradingPlace
from pier.trial.health import wait_until_healthy
from pier.trial.images import ImageWish
from pier.trial.model import AgentInfo, ModelInfo, PierInfo, TimingInfo, TrialResult, VerifierResult
from pier.trial.network import NetworkPlan, check_network, plan_network
from pier.trial.outcome import StepOutcome, captured, combined_rewards, exception_info, judge_as_harbor, stops_after
from pier.trial.record import TrialRecord
from pier.trial.spec import OnPhase, TrialServices, TrialSpec
from pier.trial.steps import Stage, run_step

T = TypeVar("T")

_SETUP_SECONDS = 1800.0
"""How long an agent's pack may take to be built, unless the run says otherwise. It is built once, not once a trial."""


async def run_trial(
    spec: TrialSpec,
    services: TrialServices,
    on_phase: OnPhase | None = None,
    on_progress: OnProgress | None = None,
) -> TrialResult:
    """Run one trial; `on_progress` receives updates on long work for it, such as the build of its image. Failures are
    in the result; what is raised is a cancellation, or that the trial's own directory cannot be used."""
    return await _Trial(spec, services, on_phase, on_progress).run()


class _Trial:
    def __init__(
        self, spec: TrialSpec, services: TrialServices, on_phase: OnPhase | None, on_progress: OnProgress | None
    ) -> None:
        self.spec = spec
        self.services = services
        self.on_progress = on_progress
        self.environ = os.environ if services.environ is None else services.environ
        self.redactor = Redactor((*spec.secrets, *self._secrets()))
        self.record = TrialRecord(spec.directory, self.redactor)
        self.logs = ServiceLogs(spec.directory / SERVICES, self.record)
        self.clock = Clock(self.record, on_phase)
        self.outcomes: list[StepOutcome] = []
        self.image: Image | None = None
        self.images: dict[ImageWish, Image] = {}
        config = trial_config(spec, self.environ)
        self.config = self.redactor.value(config) if self.redactor else config
        self.result = TrialResult(
            task_name=spec.task.name,
            trial_name=spec.name,
            trial_uri=(_resolved(spec.directory.parent) / spec.directory.name).as_uri(),
            task_id={key: value for key, value in self.config["task"].items() if key != "source"},
            source=spec.task.origin.source,
            task_checksum=spec.task.digest.removeprefix("sha256:"),
            config=self.config,
            agent_info=AgentInfo(name=spec.agent.name, model_info=_model_info(spec.agent.model)),
            environment_type=services.backend.name,
            started_at=now(),
        )

    def _secrets(self) -> Iterable[str]:
        """The secrets of the run and the task, as far as they can be filled in."""
        spec, config = self.spec, self.spec.task.config
        for table in (spec.agent.env, spec.verifier.env, spec.sandbox.env):
            yield from secret_values(table, self.environ, given=True)
        tables = [config.environment.env, config.solution.env]
        for step in spec.task.steps:
            tables += [step.verifier.env, step.verifier_environment.table.env]
        for table in tables:
            yield from secret_values(table, self.environ)
        servers = (*config.environment.mcp_servers, *spec.agent.mcp_servers)
        known = [dict(spec.agent.options), *(server.model_dump(mode="json") for server in servers)]
        yield from secrets_in(known, self.environ)
        yield from secrets_in_text(spec.task.origin.git_url or "")

    async def run(self) -> TrialResult:
        self.record.open()
        try:
            self.record.write_config(self.config)
            self.record.write_lock(trial_lock(self.spec, self.config))
            with captured() as failure:
                await self._run()
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
            self.logs.close()
            self.record.close()

    async def _run(self) -> None:
        with self.clock.phase("prepare") as preparing:
            agent, plan, room = await self._prepare()
            await self._within_build_time(self._get_image(room))
        with self.clock.phase("start") as starting:
            brought = await self._set_up(agent)
            mounts = (*brought.mounts, *self.spec.sandbox.mounts)
            self.result.agent_info = self._agent_info(agent, brought.version)
            sandbox = await self._start(room, plan.baseline, self.spec.name, mounts)
            try:
                furnished = await furnish(sandbox, room)
            except BaseException:
                await asyncio.shield(sandbox.stop())
                raise
        async with sandbox:
            self.result.environment_setup = TimingInfo(
                started_at=preparing.started_at, finished_at=starting.finished_at
            )
            with self.clock.phase("health"):
                if room.table.healthcheck is not None:
                    await wait_until_healthy(sandbox, room.table.healthcheck, cwd=furnished.workdir)
            stage = Stage(
                self.spec,
                self.services,
                self.record,
                self.clock,
                agent,
                self.result.agent_info.version,
                self.environ,
                sandbox,
                furnished.workdir,
                plan.baseline,
                GradingPlace(self.spec, self.record, self.environ, self._start),
            )
            if self.spec.agent.install:
                await self._install(stage)
            await self._run_steps(stage, plan)

    async def _prepare(self) -> tuple[Agent, NetworkPlan, Room]:
        spec, backend = self.spec, self.services.backend
        agent = make_agent(spec.agent)
        capabilities = await backend.capabilities()
        await check_support(spec.task, backend, spec.sandbox)
        reach = agent.reach(spec.agent.options, spec.agent.env, direct=spec.agent.direct or spec.agent.model is None)
        plan = plan_network(
            spec.task.config.environment,
            spec.task.steps,
            override=spec.sandbox.network,
            hosts=spec.sandbox.hosts,
            agent_hosts=(*reach, *spec.agent.hosts),
        )
        check_network(plan, capabilities, backend.name, also=(PUBLIC,) if spec.agent.install else ())
        for key in spec.task.unknown:
            self.record.warn(f"task.toml: {key}")
        if spec.keep_sandbox:
            self.record.warn("the sandbox is not kept: it ends with the trial")
        room = agent_room(spec.task, spec.sandbox, self.environ)
        for note in room.compose.notes if room.compose else ():
            self.record.warn(note)
        return agent, plan, room

    @property
    def _setup_seconds(self) -> float:
        return (self.spec.agent.setup_timeout or _SETUP_SECONDS) * self.spec.multipliers.of("agent_setup")

    async def _set_up(self, agent: Agent) -> Brought:
        seconds = self._setup_seconds
        async with limit(seconds, lambda: _setup_too_long(agent, seconds)):
            return await bring_agent(agent, self.spec.agent, self._tell)

    async def _get_services(self, room: Room, name: str) -> Composition | None:
        if room.compose is None:
            return None
        keep = self.logs.of("" if name == self.spec.name else name)
        return Composition(room.compose, await service_images(room.compose, room.wish, self._image), keep)

    async def _install(self, stage: Stage) -> None:
        """Install the agent in the sandbox, with the network open while that lasts; whatever a registry brings is run
        then, so the agent's own keys are not there."""
        assert stage.agent.pack is not None
        known = resolve_env(self.spec.agent.env, where="the agent's variables", environ=self.environ)
        env = {name: value for name, value in known.items() if _is_for_installers(name)}
        baseline, told = stage.network, self.spec.directory / "agent" / "install.txt"
        with self.clock.phase("setup"), self.record.output(told) as output:
            await stage.switch_network(PUBLIC)
            stage.agent_version = await install(stage.sandbox, stage.agent.pack, env, self._setup_seconds, output)
            await stage.switch_network(baseline)
        self.result.agent_info = self._agent_info(stage.agent, stage.agent_version)

    async def _image(self, wish: ImageWish) -> Image:
        return await self.services.images.get(wish, lambda line: self._tell(f"image: {line.strip()}"))

    def _tell(self, line: str) -> None:
        """Report progress to the log and to `on_progress`."""
        self.record.log(line)
        if self.on_progress is not None:
            self.on_progress(self.redactor.text(line))

    async def _get_image(self, room: Room) -> Image:
        if room.wish not in self.images:
            self.images[room.wish] = await self._image(room.wish)
        image = self.images[room.wish]
        self.image = self.image or image
        return image

    async def _within_build_time(self, work: Awaitable[T]) -> T:
        seconds = self.spec.task.config.environment.build_timeout_sec * self.spec.multipliers.of("environment_build")
        async with limit(seconds, lambda: _start_too_long(seconds)):
            return await work

    async def _start(
        self,
        room: Room,
        network: NetworkPolicy,
        name: str,
        mounts: Iterable[Mount] = (),
        watch: OnDecision | None = None,
    ) -> Sandbox:
        def note(decision: Decision) -> None:
            self.record.note_network(decision)
            if watch is not None:
                watch(decision)

        backend = self.services.backend
        image = await self._get_image(room)
        limits = await sandbox_limits(self.spec.task, room.table, self.spec.sandbox, backend, self.record)
        starting = start_room(
            room,
            image,
            backend,
            name=name,
            network=network,
            choice=self.spec.sandbox,
            environ=self.environ,
            limits=limits,
            mounts=mounts,
            hidden=(self.spec.task.path, self.spec.directory),
            on_progress=self._tell,
            on_decision=note,
            services=await self._within_build_time(self._get_services(room, name)),
        )
        return await self._within_build_time(starting)

    async def _run_steps(self, stage: Stage, plan: NetworkPlan) -> None:
        task = self.spec.task
        for index, step in enumerate(task.steps):
            directory = self._step_directory(step.name)
            outcome = await run_step(stage, index, plan.steps[index], directory)
            self.outcomes.append(outcome)
            reason = stops_after(step, outcome, self.spec.verifier.enabled)
            if reason and step.name:
                self.record.log(f"step {step.name!r} is the last one: {reason}")
                break

    def _step_directory(self, name: str) -> Path:
        return self.spec.directory / "steps" / name if name else self.spec.directory

    def _agent_info(self, agent: Agent, version: str) -> AgentInfo:
        return AgentInfo(name=agent.name, version=version, model_info=_model_info(self.spec.agent.model))

    def _seal(self) -> None:
        """Put the result together and write it; this is what makes the trial finished."""
        result, spec = self.result, self.spec
        errors = [outcome.error for outcome in self.outcomes if outcome.error]
        result.exception_info = result.exception_info or next(iter(errors), None)
        if spec.task.is_multi_step:
            strategy = spec.task.config.multi_step_reward_strategy or "mean"
            rewards = combined_rewards(self.outcomes, strategy)
            result.verifier_result = VerifierResult(rewards=rewards) if rewards is not None else None
            result.step_results = [outcome.result() for outcome in self.outcomes]
        elif self.outcomes:
            (outcome,) = self.outcomes
            result.agent_result = outcome.agent_result
            result.n_agent_steps = outcome.agent_result.n_agent_steps if outcome.agent_result else None
            result.agent_setup = outcome.agent_setup
            result.verifier_result = outcome.verdict
            result.agent_execution = outcome.agent_execution
            result.verifier = outcome.verifier
            result.integrity = outcome.integrity
            result.verifier_environment_mode = spec.task.steps[0].verifier_mode if spec.verifier.enabled else None
        if self.record.fault is not None:
            lost = StorageError(f"the trial's log could not be written: {self.record.fault}")
            result.exception_info = exception_info(lost, self.clock.current, self.redactor)
            result.verifier_result = None
        if result.exception_info is not None:
            self.record.write_exception(result.exception_info.exception_traceback)
        judge_as_harbor(result)
        result.finished_at = now()
        result.pier = PierInfo(
            version=__version__,
            attempt=spec.attempt,
            backend=self.services.backend.name,
            image=self.image.reference if self.image else None,
            image_digest=self.image.digest if self.image else None,
            task_digest=spec.task.digest,
            n_steps=len(spec.task.steps) if spec.task.is_multi_step else None,
            graded_steps=sum(o.rewards is not None for o in self.outcomes) if spec.task.is_multi_step else None,
            phases=dict(self.clock.seconds),
            warnings=list(self.record.warnings),
            network_refused=dict(self.record.refused.most_common(100)),
        )
        self.record.log(f"rewards {result.rewards}")
        self.record.write_result(result)


@functools.lru_cache(maxsize=16)
def _resolved(directory: Path) -> Path:
    """The directory of a job's trials, asked for by each of them."""
    return directory.resolve()


def _is_for_installers(name: str) -> bool:
    """Whether a variable of the agent may be seen while it is installed: all but keys that are not the installers'."""
    return name.lower().startswith(("npm_", "pip_")) or not looks_secret(name)


def _model_info(model: str | None) -> ModelInfo | None:
    if model is None:
        return None
    provider, slash, name = model.partition("/")
    return ModelInfo(name=name, provider=provider) if slash else ModelInfo(name=model)


def _setup_too_long(agent: Agent, seconds: float) -> AgentError:
    message = f"setting up the agent {agent.name!r} took longer than {seconds:g} s"
    return AgentError(message, code="agent_setup_timeout", blame="infra", retryable=True)


def _start_too_long(seconds: float) -> SandboxError:
    return SandboxError(
        f"getting the image and starting the sandbox took longer than {seconds:g} s", code="environment_timeout"
    )
