"""The agent's part of a trial: its inputs, its model, its clock, how its end is judged, and its trajectory.

The trajectory is derived from the recording of the agent's model calls, else from its own session log. It is kept up to
date while the agent runs, so that it can be watched and a run that is killed leaves one. Deriving takes time off the
interpreter that serves the agents' models, so all trials of this process together spend at most a tenth of it on this.
A recording that takes more memory is read in another process, whose memory is limited.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pier import __version__
from pier.agent.contract import PACK_PATH, Agent, AgentRun, McpServer, check_options, find_agent
from pier.agent.oracle import OracleAgent
from pier.endpoint import GATEWAY_PORT, Endpoint
from pier.errors import AgentError, JobError, PierError, ProviderError, StorageError, UsageError
from pier.record import RECORDING
from pier.redact import Redactor
from pier.sandbox.contract import Mount, OnOutput, Result, Sandbox
from pier.task import Task, TaskStep
from pier.task.model import resolve_headers
from pier.trajectory import TrajectoryHeader
from pier.tree import Tree
from pier.trial.bounded import read_back, run_bounded
from pier.trial.record import TrialRecord
from pier.trial.result import AgentResult, captured, storage_fault
from pier.trial.spec import Accept, AgentChoice, TrialServices, TrialSpec, user_text

if TYPE_CHECKING:
    from pier.gateway.session import Session
    from pier.trajectory.calls import Generation
    from pier.trajectory.derive import TrajectorySummary

R = TypeVar("R")
log = logging.getLogger(__name__)

_GRACE = 60.0
"""Seconds that an agent's own handling of its deadline may take, before the trial goes on without it."""

_FLOOD = 32
"""An agent with more model calls at once than this may have caused a rate limit itself, so it is graded."""


def make_agent(choice: AgentChoice) -> Agent:
    """The agent that was chosen; options it does not take are refused by name."""
    kind = find_agent(choice.name)
    check_options(kind, choice.options)
    return kind()


def check_choice(agent: Agent, choice: AgentChoice) -> None:
    """Refuse ways of running an agent that it does not have."""
    if choice.direct and not agent.direct:
        raise UsageError(
            f"the agent {agent.name} cannot be run with --direct: "
            + ("it calls no model" if agent.dialect is None else "it is set up for models behind the gateway alone"),
            hint="leave out --direct; the gateway takes -m PROVIDER/MODEL and your key",
            code="no-direct",
        )
    if choice.install and agent.pack is None:
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


async def prepare_agent(agent: Agent, choice: AgentChoice, say: Callable[[str], None]) -> ReadyAgent:
    """What must be mounted for the agent: its pack, built now if it is not there yet, and what its options ask for.
    `say` receives progress of a build."""
    mounts = agent.mounts(choice.options)
    if agent.pack is None:
        return ReadyAgent(mounts, agent.version or __version__)
    if choice.install:
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
    env: Mapping[str, str],
    solution_env: Mapping[str, str],
    environ: Mapping[str, str] | None = None,
) -> AgentRun:
    """The agent's inputs for one step; the model's endpoint is added when its session is open."""
    seconds = phase_seconds(spec.agent.timeout, step.agent.timeout_sec, spec.agent.max_timeout, spec.factor("agent"))
    is_oracle = isinstance(agent, OracleAgent)
    environment = spec.task.config.environment
    return AgentRun(
        instruction="\n\n".join((step.instruction, *spec.extra_instructions)),
        workdir=workdir,
        user=user_text(step.agent.user),
        home=home,
        env={**env, **solution_env} if is_oracle else dict(env),
        options=dict(spec.agent.options),
        mcp_servers=_mcp_servers(spec.task, spec.agent, environ),
        skills_dir=environment.skills_dir,
        seconds=seconds,
        solution=step.solution if is_oracle else None,
        budget={name: limit for name, limit in spec.agent.budget.items() if limit is not None},
    )


def _mcp_servers(task: Task, choice: AgentChoice, environ: Mapping[str, str] | None) -> tuple[McpServer, ...]:
    tables = (*task.config.environment.mcp_servers, *choice.mcp_servers)
    return tuple(
        McpServer(
            table.name,
            table.transport,
            table.url,
            table.command,
            table.args,
            resolve_headers(table.headers, where=f"the MCP server {table.name}", environ=environ),
        )
        for table in tables
    )


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


@asynccontextmanager
async def model_session(
    spec: TrialSpec,
    services: TrialServices,
    agent: Agent,
    sandbox: Sandbox,
    logs: Path,
    *,
    closed_book: bool = False,
    redactor: Redactor | None = None,
    step: str | None = None,
) -> AsyncIterator[Session | None]:
    """A session at the gateway, served inside the sandbox while the agent runs; None if no model is asked for, or the
    agent calls its provider itself.

    With `closed_book` the model has no internet either. `redactor` removes secrets from the recording.
    """
    if spec.agent.model is None or spec.agent.direct:
        yield None
        return
    if services.gateway is None:
        if agent.dialect is not None:
            raise UsageError(f"the agent {agent.name!r} needs a model, and this run has no gateway")
        yield None
        return
    from pier.gateway.budget import Budget

    labels = {"trial": spec.name, "task": spec.task.name}
    budget = Budget(**spec.agent.budget)
    model, upstream = spec.agent.model, spec.agent.policy
    if spec.agent.connection:
        target = services.gateway.directory.connected(model, services.environ, **spec.agent.connection)
        model, upstream = target.model, target.provider
    session = services.gateway.session(
        model,
        upstream=upstream,
        budget=budget,
        pool=services.pool,
        recording=logs / RECORDING if spec.recorded else None,
        closed_book=closed_book,
        labels=labels,
        redactor=redactor,
        sampling=spec.agent.sampling,
        on_generation=_watcher(spec, step),
    )
    try:
        listener = await sandbox.listen(GATEWAY_PORT, services.gateway.protocol_factory(session))
        try:
            yield session
        finally:
            await asyncio.shield(listener.close())
    finally:
        await asyncio.shield(session.close())


def _watcher(spec: TrialSpec, step: str | None) -> Callable[[Generation], None] | None:
    """What is called with each generation; without a recording the session must keep them, to judge the agent by."""
    if (watch := spec.on_generation) is not None:
        return lambda generation: watch(step, generation)
    return None if spec.recorded else lambda generation: None


async def outside_endpoint(session: Session | None, services: TrialServices, agent: Agent) -> Endpoint | None:
    """The session as an agent reaches it that calls its model from outside the sandbox."""
    if session is None or services.gateway is None or not agent.outside:
        return None
    return replace(session.endpoint(), url=await services.gateway.serve(session=session))


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


TRAJECTORY = "trajectory.json"


async def add_native_trajectory(
    logs: Path, header: TrajectoryHeader, result: AgentResult | None, record: TrialRecord
) -> AgentResult | None:
    """The same for an agent that called its provider itself, from the session log that it kept, if it is one whose logs
    can be read. A trajectory that the agent left itself is kept."""
    from pier.trajectory.native.convert import READERS

    with Tree(logs) as tree:
        own = tree.find(TRAJECTORY)
    if header.agent not in READERS or (own is not None and own.kind == "file"):
        return result
    with captured() as failure:
        known = await run_bounded(convert_logs, logs, header.agent)
        return (result or AgentResult()).model_copy(update=known) if known else result
    _raise_storage_fault(failure.error)
    record.warn(f"no trajectory could be made from the logs of {header.agent}: {failure.error}")
    return result


def convert_logs(logs: Path, agent: str) -> dict[str, Any]:
    """Write the longest session log of an agent as its trajectory; the fields of an `AgentResult` that it knows."""
    from pier.trajectory.model import read
    from pier.trajectory.native.convert import convert, find_sessions

    longest = max(find_sessions(logs, agent), key=lambda session: session.path.stat().st_size)
    convert(longest, logs / TRAJECTORY)
    if (final := read(logs / TRAJECTORY).final_metrics) is None:
        return {}
    return {
        "n_input_tokens": final.total_prompt_tokens,
        "n_output_tokens": final.total_completion_tokens,
        "n_cache_tokens": final.total_cached_tokens,
        "cost_usd": final.total_cost_usd,
    }


def _raise_storage_fault(error: Exception | None) -> None:
    """A trajectory that this machine could not write is a fault of the infrastructure, not a warning."""
    if (fault := storage_fault(error)) is not None:
        raise fault from error


def derive(logs: Path, header: TrajectoryHeader, *, durable: bool = True, most: int | None = None) -> TrajectorySummary:
    """Write the trajectory next to the recording, from what was recorded so far; `RecordingTooLarge` beyond `most`."""
    from pier.trajectory.derive import write_trajectory

    return write_trajectory(logs / RECORDING, logs / TRAJECTORY, header, durable=durable, most=most)


def summary_usage(summary: TrajectorySummary) -> dict[str, Any]:
    """The fields of an `AgentResult` that a derivation knows. A cost that is only known in part is not known."""
    known = {
        "n_input_tokens": summary.prompt_tokens,
        "n_output_tokens": summary.completion_tokens,
        "n_cache_tokens": summary.cached_tokens,
        "peak_context_tokens": summary.peak_context_tokens,
        "summarization_count": summary.summarization_count,
        "n_agent_steps": summary.agent_steps,
    }
    return {name: value for name, value in known.items() if value is not None} | {"cost_usd": summary.cost_usd}


async def add_trajectory(
    logs: Path, header: TrajectoryHeader, result: AgentResult | None, record: TrialRecord
) -> AgentResult | None:
    """Write the trajectory next to the recording, and add what it knows to the result.

    A trajectory that cannot be derived is a warning: the recording is still there, and the verdict does not need it.
    """
    if not (logs / RECORDING).is_file():
        return result
    with captured() as failure:
        summary = await read_back(derive, logs, header)
        if summary.path is None:
            return result
        return (result or AgentResult()).model_copy(update=summary_usage(summary))
    _raise_storage_fault(failure.error)
    record.warn(f"no trajectory could be derived from {logs / RECORDING}: {failure.error}")
    return result


_PAUSE = 2.0
_REST = 9.0
"""How many times as long as a derivation took, none is made after it."""


@dataclass(slots=True)
class _Pace:
    """Whose turn it is. One for the process, since what it shares out is the interpreter."""

    busy: bool = False
    free_at: float = 0.0

    def take(self) -> bool:
        if self.busy or time.monotonic() < self.free_at:
            return False
        self.busy = True
        return True

    def give_back(self, seconds: float) -> None:
        self.busy = False
        self.free_at = time.monotonic() + _REST * seconds


_pace = _Pace()


@asynccontextmanager
async def live_trajectory(logs: Path, header: TrajectoryHeader, *, recorded: bool) -> AsyncIterator[None]:
    """Derive the trajectory now and then while the context lasts; none is under way when it is left."""
    if not recorded:
        yield
        return
    over = asyncio.Event()
    task = asyncio.create_task(_follow(logs, header, over))
    try:
        yield
    finally:
        over.set()
        await task


async def _follow(logs: Path, header: TrajectoryHeader, over: asyncio.Event) -> None:
    known = 0
    while not await _is_set_within(over, _PAUSE):
        size = _size(logs / RECORDING)
        if size == known or not _pace.take():
            continue
        began = time.monotonic()
        try:
            # What cannot be derived now is reported by the derivation at the end.
            with captured():
                await read_back(derive, logs, header, durable=False)
        finally:
            _pace.give_back(time.monotonic() - began)
        known = size


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
