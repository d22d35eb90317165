"""One step of a trial inside its sandbox: prepare, health check, agent, collect, verify."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pier.agent.contract import AGENT_LOGS, Agent
from pier.errors import SandboxError, StorageError
from pier.network.policy import NetworkPolicy
from pier.sandbox.compose import MAIN
from pier.sandbox.contract import Change, Sandbox
from pier.task import TaskStep, resolve_env
from pier.trial.agent import (
    Told,
    add_native_trajectory,
    add_trajectory,
    check_job_budget,
    check_recording,
    describe_run,
    endpoint_of,
    followed,
    home_of,
    judge,
    model_session,
    outside_of,
    run_agent,
    usage_of,
    user_text,
)
from pier.trial.collect import DISK_FAULTS, STATE, Collected, collect_artifacts, keep_state, seal_artifacts, take_logs
from pier.trial.environment import StepNetwork, prepare_step
from pier.trial.record import Clock, TrialRecord
from pier.trial.result import StepOutcome, captured, exception_info, finally_do, storage_fault
from pier.trial.spec import TrialServices, TrialSpec
from pier.trial.verify import Graded, GradingPlace, SeparateTests, SharedTests, reach_verdict
from pier.verifier.folders import ARTIFACTS, TESTS, VERIFIER_LOGS, make_folders

SHELL = ("/bin/sh", "-c", 'command -v bash >/dev/null 2>&1 && exec bash -c "$0"; exec sh -c "$0"')
"""Runs the next argument as a shell line: in bash where the image has one, since tasks are written for it."""

_PRE_ARTIFACTS = "/tmp/.pier-pre-artifacts.sh"
_PRE_ARTIFACTS_SECONDS = 300.0


@dataclass(slots=True)
class Stage:
    """What all steps of a trial share."""

    spec: TrialSpec
    services: TrialServices
    record: TrialRecord
    clock: Clock
    agent: Agent
    agent_version: str
    environ: Mapping[str, str]
    sandbox: Sandbox
    workdir: str
    network: NetworkPolicy
    grading: GradingPlace

    async def switch_network(self, policy: NetworkPolicy) -> None:
        if policy != self.network:
            await self.sandbox.set_network(policy)
            self.network = policy


async def run_step(stage: Stage, index: int, network: StepNetwork, directory: Path) -> StepOutcome:
    """Run one step to its verdict. What goes wrong is in the outcome; only a cancellation is raised."""
    step = stage.spec.task.steps[index]
    outcome = StepOutcome(step.name)
    baseline = stage.network
    with captured() as failure:
        await _prepare(stage, step, index)
        before = await stage.sandbox.changes()
        await _run_agent(stage, step, outcome, network.agent, directory / "agent", before)
        await stage.switch_network(baseline)
        async with finally_do(partial(seal_artifacts, directory / "artifacts", stage.record)):
            with stage.clock.phase("collect"):
                collected = await _collect(stage, step, directory)
                if stage.spec.keep_state:
                    await _keep_state(stage, directory / STATE)
                if step.verifier_mode != "separate":
                    await seal_artifacts(directory / "artifacts", stage.record)
            if stage.spec.verifier.enabled:
                await _verify(stage, index, outcome, before, collected, network, baseline, directory)
                await stage.switch_network(baseline)
    if failure.error is not None:
        if storage_fault(failure.error) is not None:
            outcome.rewards = None
        outcome.error = exception_info(failure.error, stage.clock.current, stage.record.redactor)
        stage.record.log(f"error: {failure.error}")
    return outcome


async def _prepare(stage: Stage, step: TaskStep, index: int) -> None:
    sandbox = stage.sandbox
    if not (index or step.workdir or step.healthcheck):
        return
    with stage.clock.phase("health"):
        if index:
            for path in (TESTS, VERIFIER_LOGS, AGENT_LOGS, ARTIFACTS):
                await sandbox.remove(path)
            await make_folders(sandbox, {VERIFIER_LOGS: 0o777, AGENT_LOGS: 0o777, ARTIFACTS: 0o777})
        await prepare_step(stage.spec, step, sandbox, stage.workdir)


async def _run_agent(
    stage: Stage,
    step: TaskStep,
    outcome: StepOutcome,
    policy: NetworkPolicy,
    logs: Path,
    before: list[Change] | None,
) -> None:
    spec, agent, sandbox, environ = stage.spec, stage.agent, stage.sandbox, stage.environ
    with stage.clock.phase("setup") as outcome.agent_setup:
        env = resolve_env(spec.agent.env, where="the agent's variables", environ=environ)
        solution = resolve_env(spec.task.config.solution.env, where="solution.env", environ=environ)
        home = await home_of(sandbox, user_text(step.agent.user), before)
        run = describe_run(spec, step, agent, workdir=stage.workdir, home=home, env=env, solution_env=solution)
        await stage.switch_network(policy)
    told = Told(agent.name, stage.agent_version, spec.agent.model, spec.name)

    async def keep_logs() -> None:
        outcome.agent_result = await add_trajectory(logs, told, outcome.agent_result, stage.record)
        await take_logs(sandbox, AGENT_LOGS, logs, stage.record)
        if spec.agent.direct:
            outcome.agent_result = await add_native_trajectory(logs, told, outcome.agent_result, stage.record)

    async with finally_do(keep_logs):
        with stage.clock.phase("agent") as outcome.agent_execution:
            closed, redactor = policy.mode != "public", stage.record.redactor
            async with (
                model_session(
                    spec, stage.services, agent, sandbox, logs, closed_book=closed, redactor=redactor
                ) as session,
                followed(logs, told, recorded=session is not None),
            ):
                with stage.record.output(logs / f"{agent.name}.txt") as output:
                    outside = await outside_of(session, stage.services, agent)
                    informed = replace(run, endpoint=endpoint_of(session), outside=outside, warn=stage.record.warn)
                    failed = await judge(agent, await run_agent(agent, sandbox, informed, output), session)
                outcome.agent_result = usage_of(session)
    check_job_budget(session)
    check_recording(session)
    if (counts := session.counts if session else None) and counts.retries:
        stage.record.log(
            f"model: {counts.retries} retries after faults of the provider, {counts.waited:.1f} s of waiting"
        )
    if failed is not None and failed.blame in ("provider", "infra"):
        raise failed  # the agent could not go on, so what it left is not graded
    if failed is not None:
        stage.record.log(f"agent: {failed}")
        outcome.error = exception_info(failed, "agent", stage.record.redactor)


async def _collect(stage: Stage, step: TaskStep, directory: Path) -> list[Collected]:
    """Run the hooks, then take the artifacts out. Of these only faults of a disk fail the trial."""
    sandbox, record = stage.sandbox, stage.record
    if (script := stage.spec.task.pre_artifacts) is not None:
        await _hook(stage, sandbox, ["bash", _PRE_ARTIFACTS], script.name, None, _PRE_ARTIFACTS_SECONDS, script)
    for hook in sorted(step.collect, key=lambda hook: hook.service != MAIN):
        place = sandbox.service(hook.service)
        if place is None:
            record.warn(f"collect hook {hook.command!r}: there is no service {hook.service!r}")
            continue
        await _hook(stage, place, [*SHELL, hook.command], hook.command, user_text(hook.user), hook.timeout_sec)
    artifacts = (*step.artifacts, *stage.spec.artifacts)
    return await collect_artifacts(sandbox, artifacts, directory / "artifacts", workdir=stage.workdir, record=record)


async def _hook(
    stage: Stage,
    sandbox: Sandbox,
    argv: list[str],
    name: str,
    user: str | None,
    seconds: float,
    script: Path | None = None,
) -> None:
    cwd = stage.workdir if sandbox is stage.sandbox else None
    try:
        if script is not None:
            await sandbox.upload(script, _PRE_ARTIFACTS)
        result = await sandbox.exec(argv, cwd=cwd, user=user, timeout=seconds)
    except SandboxError as error:
        if error.code in DISK_FAULTS:
            raise StorageError(f"collect hook {name!r}: cannot be uploaded: {error}") from error
        stage.record.warn(f"collect hook {name!r}: {error}")
        return
    if not result.ok:
        how = "took too long" if result.timed_out else f"ended with exit code {result.exit_code}"
        stage.record.warn(f"collect hook {name!r} {how}: {result.error_text.strip()[-300:]}")


async def _keep_state(stage: Stage, directory: Path) -> None:
    if others := [name for name in stage.sandbox.services() if name != MAIN]:
        stage.record.warn(f"no state is kept: what other services hold ({', '.join(others)}) cannot be brought back")
        return
    try:
        await keep_state(stage.sandbox, directory)
    except SandboxError as error:
        stage.record.warn(str(error))


async def _verify(
    stage: Stage,
    index: int,
    outcome: StepOutcome,
    before: list[Change] | None,
    collected: list[Collected],
    network: StepNetwork,
    baseline: NetworkPolicy,
    directory: Path,
) -> None:
    place = stage.grading
    with stage.clock.phase("verify") as outcome.verifier:
        if stage.spec.task.steps[index].verifier_mode == "separate":
            graded = Graded(mode="separate")
            tests = SeparateTests(place, index, network.verifier, collected, directory / "artifacts")
        else:
            graded = Graded(mode="shared")
            tests = SharedTests(
                place, index, stage.sandbox, before, stage.workdir, network, baseline, stage.switch_network
            )
        try:
            await reach_verdict(tests, graded, directory, stage.record)
            outcome.rewards = graded.rewards
        finally:
            outcome.integrity = graded.integrity(stage.record.redactor)
