"""The agent's part of a trial: its inputs, its model, its clock, and how its end is judged."""

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
"""Seconds that an agent's own handling of its deadline may take, before the trial goes on without it."""

_FLOOD = 32
"""An agent with more model calls at once than this may have caused a rate limit itself, so it is graded."""


def make_agent(settings: AgentConfig) -> Agent:
    """The agent that was chosen; options it does not take are refused by name."""
    kind = find_agent(settings.kind)
    check_options(kind, settings.kwargs)
    return kind()


def check_settings(agent: Agent, settings: AgentConfig) -> None:
    """Refuse ways of running an agent that it does not have."""
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
    """An agent that is ready to be mounted, and its version; pier's own agents have pier's."""

    mounts: tuple[Mount, ...]
    version: str


async def prepare_agent(agent: Agent, settings: AgentConfig, say: Callable[[str], None]) -> ReadyAgent:
    """What must be mounted for the agent: its pack, built now if it is not there yet, and what its options ask for.
    `say` receives progress of a build."""
    mounts = agent.mounts(settings.kwargs)
    if agent.pack is None:
        return ReadyAgent(mounts, agent.version or __version__)
    if settings.install_in_sandbox:
        return ReadyAgent(mounts, agent.pack.version or "latest")
    from pier.agent.pack.store import ensure_pack

    pack = await ensure_pack(agent.pack, lambda line: say(f"pack of {agent.name}: {line}"))
    return ReadyAgent((Mount(PACK_PATH, pack.path), *mounts), pack.version)


def phase_seconds(own: float | None, task: float | None, maximum: float | None, factor: float) -> float | None:
    """How long a phase may take: the run's own value or the task's, cut at a maximum, times the phase's factor."""
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
    """The agent's inputs for one step, with templates filled from `environ`; the model's endpoint is added when its
    session is open."""
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
"""Checks values of a type; making one takes as long as a part of a trial."""


def mcp_tables(settings: AgentConfig) -> tuple[McpServerTable, ...]:
    """The MCP servers that the run adds to the task's."""
    try:
        return _adapter(tuple[McpServerTable, ...]).validate_python(settings.mcp_servers)
    except ValidationError as error:
        raise UsageError(f"agents.mcp_servers{describe(error)}", code="job-config") from error


def sampling_of(settings: AgentConfig) -> Sampling | None:
    """The sampling parameters that replace the agent's own; one stop sequence may be given as text."""
    if not (given := settings.sampling):
        return None
    from pier.wire.turn import Sampling

    known = Sampling.__dataclass_fields__
    for name in given.keys() - known.keys():
        raise UsageError(f"invalid value '{name}={given[name]}' for --sampling: expected one of {', '.join(known)}")
    values = {name: [value] if name == "stop" and isinstance(value, str) else value for name, value in given.items()}
    try:
        return _adapter(Sampling).validate_python(values)
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        shown, expected = f"{name}={given[name]}", f"a value of the type {known[name].type}"
        raise UsageError(f"invalid value {shown!r} for --sampling: expected {expected}") from None


def _mcp_servers(task: Task, settings: AgentConfig, environ: Mapping[str, str]) -> tuple[McpServerTable, ...]:
    tables = (*task.config.environment.mcp_servers, *mcp_tables(settings))
    filled = (resolve_headers(table.headers, where=f"the MCP server {table.name}", environ=environ) for table in tables)
    return tuple(table.model_copy(update={"headers": headers}) for table, headers in zip(tables, filled, strict=True))


async def home_of(sandbox: Sandbox, user: str | None) -> str:
    """The home directory of a user of the sandbox, as its own passwd file says."""
    wanted = user or sandbox.spec.user or sandbox.spec.image.config.user or "root"
    name = wanted.partition(":")[0]
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
    """Run the agent to its end or deadline. An error that is given back, rather than raised, leaves the trial to be
    graded: the agent ran, however it ended."""
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
    """Run the agent, and again as long as `accept` asks for more; all runs share the agent's time. Output that is
    accepted counts, however the agent ended; an agent that failed is not run again."""
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


def check_job_budget(session: Session | None) -> None:
    """`JobError` if the budget of the whole job cut the agent off: what it left is not a result."""
    if session is not None and session.pool_ended:
        raise JobError(f"the trial was cut off ({session.ended}), so it is not graded", code="job-budget")


def check_recording(session: Session | None) -> None:
    """`StorageError` if calls of the agent failed because they could not be recorded."""
    if session is not None and session.recorder.lost is not None:
        raise StorageError(f"the recording of the model calls could not be written: {session.recorder.lost}")


async def find_fault(agent: Agent, failed: AgentError | None, session: Session | None) -> PierError | None:
    """Why the agent's run does not count as a sound one, in view of what its model did; None if it does.

    Only the wire is asked, never the agent's words: some exit with 0 when their provider is gone. Failed side calls (a
    title, a summary) do not count.
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
    """The fault that the agent's work ended with, if that is not the agent's own."""
    counts = session.counts
    if not any(fault != "agent" for fault in counts.faults):
        return None
    from pier.trajectory.lineage import Ending, how_work_ended

    try:
        ending = await _judge_calls(session, how_work_ended)
    except MemoryError as error:
        log.warning("the recording of session %s is not asked for faults of its provider: %s", session.id, error)
        return None
    fault, status, error = astuple(ending or Ending(*counts.last, None))
    said = f"status {status}{f': {error}' if error else ''}{how}"
    match fault:
        case "rate_limit" if counts.most <= _FLOOD:
            return ProviderError(f"the agent's last model call met a rate limit: {said}", code="provider_rate_limit")
        case "quota":
            said = f"the agent's provider refused its last model call, since a quota is used up: {said}"
            return ProviderError(said, code="provider_quota", retryable=False)
        case "provider":
            passing = status >= 500 or status in (408, 499)
            said = f"the agent's last model call failed: {said}"
            return ProviderError(said, code="provider_error", retryable=passing)
        case "gateway":
            return PierError(f"the gateway failed in the agent's last model call: {said}", code="gateway")
        case _:
            return None


async def unanswered_fault(session: Session, how: str = "", *, killed: bool = True) -> PierError | None:
    """The provider's fault if an agent that failed, or was `killed` at its deadline, had waited for a hung model."""
    from pier.trajectory.lineage import waited_without_answer

    try:
        waited = await _judge_calls(session, partial(waited_without_answer, until=time.time(), killed=killed))
    except MemoryError:
        return None
    if not waited:
        return None
    return ProviderError(f"the model no longer answered{how}", code="provider_no_answer", retryable=True)


async def _judge_calls(session: Session, judge: Callable[[list[Generation]], R]) -> R:
    """Apply a function to the session's calls that are over, from memory or from its recording. `MemoryError` if the
    recording cannot be read within the limits, which is the agent's doing."""
    recording = session.terms.recording
    if session.terms.on_generation is not None or recording is None:
        return await asyncio.to_thread(judge, session.generations)
    return await read_back(_judge_recording, recording, judge)


def _judge_recording(recording: Path, judge: Callable[[list[Generation]], R], *, most: int | None = None) -> R:
    from pier.trajectory.calls import generations_of

    return judge(generations_of(recording, most))


def usage_of(session: Session | None) -> AgentResult:
    """What the agent used, as the gateway counted it; nothing is known without one."""
    if session is None:
        return AgentResult()
    meter = session.meter
    known: dict[str, Any] = {"n_agent_steps": meter.turns}
    known["cost_usd"] = 0.0
    if meter.turns:
        known |= {"n_input_tokens": meter.input_tokens, "n_output_tokens": meter.output_tokens}
        known["cost_usd"] = None  # the meter counts what it knows; the trajectory says whether that is all
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
