"""The agent's part of a trial: its inputs, its run, and who is to blame for its failure."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from pier import __version__
from pier.agent.contract import PACK_PATH, Agent, AgentRun, check_options, find_agent
from pier.agent.oracle import OracleAgent
from pier.errors import AgentError, JobError, PierError, ProviderError, StorageError, UsageError
from pier.sandbox.contract import Mount, OnOutput, Result, Sandbox
from pier.task import Task, TaskStep, resolve_env
from pier.task.load import describe
from pier.task.model import McpServerTable, resolve_headers
from pier.trial.bounded import read_back
from pier.trial.config import AgentConfig
from pier.trial.result import AgentResult
from pier.trial.spec import Accept, TrialSpec, user_text

if TYPE_CHECKING:
    from pier.gateway.session import Session
    from pier.trajectory.calls import Generation
    from pier.wire.turn import Sampling

R = TypeVar("R")
log = logging.getLogger(__name__)

_GRACE = 60.0
"""Seconds after its deadline at which the trial stops waiting for an agent."""

_FLOOD = 32
"""An agent with more concurrent model calls may have caused a rate limit itself, so it is graded."""


def make_agent(settings: AgentConfig) -> Agent:
    """The agent of the settings. Raises `UsageError` for an option that it does not have."""
    kind = find_agent(settings.kind)
    check_options(kind, settings.kwargs)
    return kind()


def check_settings(agent: Agent, settings: AgentConfig) -> None:
    """Raise `UsageError` for modes that the agent does not support."""
    if settings.direct and not agent.direct:
        raise UsageError(
            f"the agent {agent.name} cannot be run with --direct: "
            + ("it calls no model" if agent.dialect is None else "it is set up for models behind the gateway alone"),
            hint="leave out --direct; the gateway takes -m PROVIDER/MODEL and your key",
            code="no-direct",
        )
    if settings.install_in_sandbox and agent.pack is None:
        raise UsageError(
            f"the agent {agent.name} comes from no registry, so there is nothing to install",
            hint="leave out --install-in-sandbox",
            code="no-install",
        )


@dataclass(frozen=True, slots=True)
class ReadyAgent:
    """The mounts and the version of an agent; pier's own agents have pier's version."""

    mounts: tuple[Mount, ...]
    version: str


async def prepare_agent(agent: Agent, settings: AgentConfig, say: Callable[[str], None]) -> ReadyAgent:
    """Build the agent's pack if it is missing. `say` receives the progress."""
    mounts = agent.mounts(settings.kwargs)
    if agent.pack is None:
        return ReadyAgent(mounts, agent.version or __version__)
    if settings.install_in_sandbox:
        return ReadyAgent(mounts, agent.pack.version or "latest")
    from pier.agent.pack.store import ensure_pack

    pack = await ensure_pack(agent.pack, lambda line: say(f"pack of {agent.name}: {line}"))
    return ReadyAgent((Mount(PACK_PATH, pack.path), *mounts), pack.version)


def phase_seconds(own: float | None, task: float | None, maximum: float | None, factor: float) -> float | None:
    """Time limit of a phase: the run's own value, else the task's, up to a maximum, times the phase's factor."""
    value = task if own is None else own
    if maximum is not None:
        value = maximum if value is None else min(value, maximum)
    return None if value is None or math.isinf(value) else value * factor


def describe_run(
    spec: TrialSpec,
    step: TaskStep,
    agent: Agent,
    *,
    workdir: str,
    home: str,
    environ: Mapping[str, str],
) -> AgentRun:
    """The agent's inputs for one step, with templates filled from `environ` and without the model's endpoint."""
    settings, own = spec.agent, step.agent.timeout_sec
    seconds = phase_seconds(settings.override_timeout_sec, own, settings.max_timeout_sec, spec.factor("agent"))
    is_oracle = isinstance(agent, OracleAgent)
    environment = spec.task.config.environment
    env = resolve_env(settings.env, where="the agent's variables", environ=environ)
    if is_oracle:
        env |= resolve_env(spec.task.config.solution.env, where="solution.env", environ=environ)
    return AgentRun(
        instruction="\n\n".join((step.instruction, *spec.extra_instructions)),
        workdir=workdir,
        user=user_text(step.agent.user),
        home=home,
        env=env,
        options=dict(settings.kwargs),
        mcp_servers=_mcp_servers(spec.task, settings, environ),
        skills_dir=environment.skills_dir,
        seconds=seconds,
        solution=step.solution if is_oracle else None,
        budget=settings.budget.model_dump(exclude_none=True),
    )


_adapter = cache(TypeAdapter)
"""Validator of a type, cached since it is expensive to create."""


def mcp_tables(settings: AgentConfig) -> tuple[McpServerTable, ...]:
    """The MCP servers that the run adds to the task's."""
    try:
        return _adapter(tuple[McpServerTable, ...]).validate_python(settings.mcp_servers)
    except ValidationError as error:
        raise UsageError(f"agents.mcp_servers{describe(error)}", code="job-config") from error


def sampling_of(settings: AgentConfig) -> Sampling | None:
    """The sampling parameters that replace the agent's own. `stop` may be a single text."""
    if not (values := dict(settings.sampling)):
        return None
    from pier.wire.turn import Sampling

    fields = Sampling.__dataclass_fields__
    for name in values.keys() - fields.keys():
        raise UsageError(f"invalid value '{name}={values[name]}' for --sampling: expected one of {', '.join(fields)}")
    if isinstance(stop := values.get("stop"), str):
        values["stop"] = [stop]
    try:
        return _adapter(Sampling).validate_python(values)
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        shown, expected = f"{name}={settings.sampling[name]}", f"a value of the type {fields[name].type}"
        raise UsageError(f"invalid value {shown!r} for --sampling: expected {expected}") from None


def _mcp_servers(task: Task, settings: AgentConfig, environ: Mapping[str, str]) -> tuple[McpServerTable, ...]:
    tables = (*task.config.environment.mcp_servers, *mcp_tables(settings))
    filled = (resolve_headers(table.headers, where=f"the MCP server {table.name}", environ=environ) for table in tables)
    return tuple(table.model_copy(update={"headers": headers}) for table, headers in zip(tables, filled, strict=True))


async def home_of(sandbox: Sandbox, user: str | None) -> str:
    """The home directory of a user in the sandbox's passwd file."""
    name = (user or sandbox.spec.user or sandbox.spec.image.config.user or "root").partition(":")[0]
    try:
        rows = (await sandbox.read_file("/etc/passwd")).decode(errors="replace").splitlines()
    except FileNotFoundError:
        rows = []
    for row in rows:
        fields = row.split(":")
        if len(fields) > 5 and name in (fields[0], fields[2]) and fields[5].startswith("/"):
            return fields[5]
    return "/root" if name in ("root", "0") else "/"


async def run_agent(agent: Agent, sandbox: Sandbox, run: AgentRun, on_output: OnOutput) -> AgentError | None:
    """Run the agent to its end or deadline, and return its failure. The trial is graded unless this raises."""
    scope = asyncio.timeout(None if run.seconds is None else run.seconds + _GRACE)
    try:
        async with scope:
            result = await agent.run(sandbox, run, on_output)
    except TimeoutError:
        if not scope.expired():
            raise
        result = Result(137, timed_out=True)
    if result.timed_out:
        return AgentError(f"the agent {agent.name!r} took longer than {run.seconds or 0:g} s", code="agent_timeout")
    if result.out_of_memory:
        return AgentError(f"the agent {agent.name!r} ran out of memory", code="agent_memory")
    if result.out_of_disk:
        return AgentError(f"the agent {agent.name!r} wrote more than its limit on disk", code="agent_disk")
    if result.exit_code and agent.exit_code_counts:
        tail = result.error_text.strip()[-500:]
        said = f": {tail}" if tail else ""
        return AgentError(f"the agent {agent.name!r} ended with exit code {result.exit_code}{said}", code="agent_exit")
    return None


async def run_until_accepted(
    agent: Agent, sandbox: Sandbox, run: AgentRun, on_output: OnOutput, accept: Accept
) -> AgentError | None:
    """Run the agent again until `accept` takes its output. All runs share the agent's time. Accepted output counts even
    if the agent failed; a failed agent does not run again."""
    began, number = time.monotonic(), 0
    while True:
        left = None if run.seconds is None else run.seconds - (time.monotonic() - began)
        if left is not None and left <= 0:
            return AgentError(f"the agent {agent.name!r} took longer than {run.seconds:g} s", code="agent_timeout")
        failed = await run_agent(agent, sandbox, replace(run, seconds=left), on_output)
        try:
            instruction = await accept(sandbox, number)
        except AgentError as error:
            return failed or error
        if instruction is None or failed is not None:
            return None if instruction is None else failed
        run, number = replace(run, instruction=instruction), number + 1
        run.warn(f"the agent's output was not accepted, so the agent runs again ({number})")


def check_session(session: Session) -> None:
    """Raise `JobError` if the job's budget ended the session, and `StorageError` if calls could not be recorded. The
    agent's work is not graded then."""
    if session.pool_ended:
        raise JobError(f"the trial was cut off ({session.ended}), so it is not graded", code="job-budget")
    if session.recorder.lost is not None:
        raise StorageError(f"the recording of the model calls could not be written: {session.recorder.lost}")


async def find_fault(agent: Agent, failed: AgentError | None, session: Session | None) -> PierError | None:
    """The failure of the agent's run, with its blame; None if it succeeded.

    The blame is derived from the model calls, never from the agent's output: some agents exit with 0 when their
    provider fails. Failed side calls (a title, a summary) do not count.
    """
    if session is None:
        return failed
    await session.drain()
    how = f"; {failed}" if failed else ""
    if fault := await provider_fault(session, how):
        return fault
    killed = failed is not None and failed.code == "agent_timeout"
    if failed is not None and (fault := await unanswered_fault(session, how, killed=killed)):
        return fault
    if not session.counts.calls and agent.dialect is not None:
        return AgentError(f"the agent {agent.name!r} made no model call{how}", code="agent_no_calls")
    return failed


async def provider_fault(session: Session, how: str = "") -> PierError | None:
    """The fault of the last call of the agent's work, unless the agent is to blame."""
    counts = session.counts
    if not any(fault != "agent" for fault in counts.faults):
        return None
    from pier.trajectory.lineage import Ending, how_work_ended

    try:
        ending = await _judge_calls(session, how_work_ended)
    except MemoryError as error:
        log.warning("cannot look for provider faults in the recording of session %s: %s", session.id, error)
        return None
    fault, status, error = astuple(ending or Ending(*counts.last, None))
    detail = f"status {status}{f': {error}' if error else ''}{how}"
    match fault:
        case "rate_limit" if counts.most <= _FLOOD:
            message = f"the agent's last model call exceeded a rate limit: {detail}"
            return ProviderError(message, code="provider_rate_limit")
        case "quota":
            message = f"the agent's provider refused its last model call, since a quota is used up: {detail}"
            return ProviderError(message, code="provider_quota", retryable=False)
        case "provider":
            is_transient = status >= 500 or status in (408, 499)
            message = f"the agent's last model call failed: {detail}"
            return ProviderError(message, code="provider_error", retryable=is_transient)
        case "gateway":
            return PierError(f"the gateway failed in the agent's last model call: {detail}", code="gateway")
        case _:
            return None


async def unanswered_fault(session: Session, how: str = "", *, killed: bool = True) -> PierError | None:
    """The provider's fault if a model that stopped answering made the agent fail, or be `killed` at its deadline."""
    from pier.trajectory.lineage import waited_without_answer

    try:
        waited = await _judge_calls(session, partial(waited_without_answer, until=time.time(), killed=killed))
    except MemoryError:
        return None
    error = ProviderError(f"the model no longer answered{how}", code="provider_no_answer", retryable=True)
    return error if waited else None


async def _judge_calls(session: Session, judge: Callable[[list[Generation]], R]) -> R:
    """Apply a function to the session's finished calls, from memory or from its recording. `MemoryError` if the agent
    made the recording too large to be read."""
    recording = session.terms.recording
    if session.terms.on_generation is not None or recording is None:
        return await asyncio.to_thread(judge, session.generations)
    return await read_back(_judge_recording, recording, judge)


def _judge_recording(recording: Path, judge: Callable[[list[Generation]], R], *, most: int | None = None) -> R:
    from pier.trajectory.calls import generations_of

    return judge(generations_of(recording, most))


def usage_of(session: Session | None) -> AgentResult:
    """The agent's usage as counted by the gateway; unknown without a session."""
    if session is None:
        return AgentResult()
    meter = session.meter
    known: dict[str, Any] = {"n_agent_steps": meter.turns}
    known["cost_usd"] = 0.0
    if meter.turns:
        known |= {"n_input_tokens": meter.input_tokens, "n_output_tokens": meter.output_tokens}
        known["cost_usd"] = None  # the meter may miss some costs; the trajectory knows whether it does
    metadata: dict[str, Any] = {"model_calls": dict(session.counts.ends)}
    if session.counts.retries:
        metadata["model_retries"] = session.counts.retries
    if session.counts.waited:
        metadata["model_wait_seconds"] = round(session.counts.waited, 3)
    if session.ended:
        metadata["ended"] = session.ended
    if session.stop_reason:
        metadata["stop_reason"] = session.stop_reason
    return AgentResult(**known, metadata=metadata)
