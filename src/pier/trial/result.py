"""`result.json` of a trial: the fields of Harbor's models and pier's additional ones, how errors and rewards get into
them, and reading them back.

Harbor and datacurve pier pass over fields that they do not know, so what pier adds (`integrity`, `pier`) does not keep
them from loading the files. Reading is lenient in the same way: a file of theirs loads here. A missing, torn or invalid
file is a typed error.
"""

from __future__ import annotations

import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pier.errors import Blame, JobError, PierError, StorageError
from pier.figures import means
from pier.redact import Redactor
from pier.task import TaskStep
from pier.task.load import describe
from pier.tree import FAULTS, TreeError, open_regular


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", protected_namespaces=(), defer_build=True)


class TimingInfo(_Part):
    started_at: datetime | None = None
    finished_at: datetime | None = None


class ExceptionInfo(_Part):
    """An error of a trial; the last fields hold blame, hint and phase, which other programs ignore."""

    exception_type: str
    exception_message: str
    exception_traceback: str
    occurred_at: datetime
    code: str | None = None
    blame: Blame | None = None
    retryable: bool | None = None
    hint: str | None = None
    phase: str | None = None


class ModelInfo(_Part):
    name: str
    provider: str | None = None

    @classmethod
    def of(cls, model: str | None) -> ModelInfo | None:
        """A model by its name, which may begin with its provider and a slash."""
        if model is None:
            return None
        provider, slash, name = model.partition("/")
        return cls(name=name, provider=provider) if slash else cls(name=model)


class AgentInfo(_Part):
    name: str
    version: str = "unknown"
    model_info: ModelInfo | None = None


class AgentResult(_Part):
    """The usage of the agent. None is unknown, which is not zero."""

    n_input_tokens: int | None = None
    n_cache_tokens: int | None = None
    n_output_tokens: int | None = None
    cost_usd: float | None = None
    model_usage: dict[str, Any] | None = None
    peak_context_tokens: int | None = None
    summarization_count: int | None = None
    n_agent_steps: int | None = None
    metadata: dict[str, Any] | None = None


class VerifierResult(_Part):
    rewards: dict[str, float | int] | None = None


class IntegrityNote(_Part):
    """Something that could have steered the verdict. `stopped`: it was undone before the verifier ran."""

    kind: str
    detail: str
    path: str | None = None
    stopped: bool = False


class GradingRun(_Part):
    """One run of the tests, in what the agent left (`agent`) or without it (`pristine`). `logs` is relative to the
    directory of the trial or step."""

    state: Literal["agent", "pristine"]
    logs: str
    rewards: dict[str, float | int] | None = None
    code: str | None = None
    message: str | None = None


class Integrity(_Part):
    """How far the verdict can be trusted. `compared`: the sandbox could say which files the agent changed. `runs`: the
    runs of the tests, if the first of them gave no reward."""

    mode: str
    compared: bool = False
    notes: list[IntegrityNote] = Field(default_factory=list)
    runs: list[GradingRun] = Field(default_factory=list)


class StepResult(_Part):
    step_name: str
    agent_result: AgentResult | None = None
    verifier_result: VerifierResult | None = None
    exception_info: ExceptionInfo | None = None
    agent_setup: TimingInfo | None = None
    agent_execution: TimingInfo | None = None
    verifier: TimingInfo | None = None
    integrity: Integrity | None = None

    @property
    def rewards(self) -> dict[str, float | int] | None:
        return self.verifier_result.rewards if self.verifier_result else None


class PierInfo(_Part):
    """The fields that pier adds to Harbor's."""

    version: str = ""
    attempt: int = 1
    backend: str = ""
    image: str | None = None
    image_digest: str | None = None
    task_digest: str = ""
    n_steps: int | None = None
    """How many steps the task has, and how many of them have a verdict; None for a task without steps."""
    graded_steps: int | None = None
    phases: dict[str, float] = Field(default_factory=dict)
    """Seconds that each phase took."""
    warnings: list[str] = Field(default_factory=list)
    network_refused: dict[str, int] = Field(default_factory=dict)
    """How often each thing was tried that the network policy refused: the hundred most frequent."""


class TrialResult(_Part):
    id: str = Field(default_factory=lambda: str(uuid4()))
    task_name: str
    trial_name: str
    trial_uri: str
    task_id: dict[str, Any]
    source: str | None = None
    task_checksum: str
    config: dict[str, Any]
    agent_info: AgentInfo
    agent_result: AgentResult | None = None
    verifier_result: VerifierResult | None = None
    verifier_environment_mode: str | None = None
    exception_info: ExceptionInfo | None = None
    failure_cause: str | None = None
    """The cause of a failure as Harbor's `FailureCause` names it; ours is `exception_info.blame`."""
    reward_valid: bool | None = None
    """Whether Harbor takes the reward for a valid measurement of the agent."""
    environment_type: str | None = None
    """The backend that the trial ran on."""
    started_at: datetime | None = None
    finished_at: datetime | None = None
    environment_setup: TimingInfo | None = None
    agent_setup: TimingInfo | None = None
    agent_execution: TimingInfo | None = None
    verifier: TimingInfo | None = None
    n_agent_steps: int | None = None
    step_results: list[StepResult] | None = None
    integrity: Integrity | None = None
    pier: PierInfo | None = None

    @property
    def rewards(self) -> dict[str, float | int] | None:
        """The verdict; None if there is none, which is not zero."""
        return self.verifier_result.rewards if self.verifier_result else None

    @property
    def has_verdict(self) -> bool:
        return self.rewards is not None


_HARBOR = {
    "agent_timeout": ("AgentTimeoutError", "agent_exhausted_budget"),
    "agent_exit": ("NonZeroAgentExitCodeError", "unclassified"),
    "agent_setup_timeout": ("AgentSetupTimeoutError", "sandbox_failed"),
    "environment_timeout": ("EnvironmentStartTimeoutError", "sandbox_failed"),
    "healthcheck": ("HealthcheckError", "sandbox_failed"),
    "verifier_timeout": ("VerifierTimeoutError", "verifier_failed"),
    "reward_missing": ("RewardFileNotFoundError", "verifier_failed"),
    "reward_empty": ("RewardFileEmptyError", "verifier_failed"),
    "reward_invalid": ("VerifierOutputParseError", "verifier_failed"),
    "verifier": ("VerifierError", "verifier_failed"),
}
"""By our codes, the class names that Harbor's statistics and filters know, and what it then says ended a trial."""
_HARBOR_CAUSES = {**dict(_HARBOR.values()), "CancelledError": "cancelled"}
_CAUSE_BY_BLAME = {
    "infra": "sandbox_failed",
    "provider": "model_provider_failed",
    "task": "harbor_failed",
    "user": "harbor_failed",
}
_MEASURED = ("agent_exhausted_budget",)
"""Causes with which Harbor takes a reward for a valid measurement of the agent."""

_MESSAGE_LIMIT = 20_000


@dataclass(slots=True)
class Captured:
    """The error that a guarded part of a trial raised, if any."""

    error: Exception | None = field(default=None)


@contextmanager
def captured() -> Iterator[Captured]:
    """The boundary of a trial: whatever goes wrong inside is its outcome, and no other trial's business."""
    found = Captured()
    try:
        yield found
    except Exception as error:  # noqa: BLE001 - this is the capture of a trial's outcome
        found.error = error


@asynccontextmanager
async def finally_do(last: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Do `last` when a block has ended, however it did. An error of the block goes before one of `last`."""
    try:
        yield
    except BaseException:
        with captured():
            await last()
        raise
    await last()


def storage_fault(error: BaseException | None) -> StorageError | None:
    """An error of this machine's files as a fault of the infrastructure; None if it is another."""
    if isinstance(error, StorageError):
        return error
    if isinstance(error, OSError) and error.errno in FAULTS:
        return StorageError(f"a file of the trial could not be written or read: {error}")
    return None


def exception_info(error: Exception, phase: str, redactor: Redactor) -> ExceptionInfo:
    """An error as it goes into the result."""
    known = error if isinstance(error, PierError) else storage_fault(error) or PierError(str(error), code="internal")
    own, trace = error if type(known) is PierError else known, "".join(traceback.format_exception(error))
    return ExceptionInfo(
        exception_type=_HARBOR[known.code][0] if known.code in _HARBOR else type(own).__name__,
        exception_message=redactor.text(str(error))[:_MESSAGE_LIMIT],
        exception_traceback=redactor.text(trace)[-_MESSAGE_LIMIT:],
        occurred_at=datetime.now(UTC),
        code=known.code,
        blame=known.blame,
        retryable=known.retryable,
        hint=redactor.text(known.hint) if known.hint else None,
        phase=phase,
    )


def failure_cause(error: ExceptionInfo) -> str:
    """Harbor's word for what ended a trial; errors that Harbor has no name for go by their blame."""
    return _HARBOR_CAUSES.get(error.exception_type) or _CAUSE_BY_BLAME.get(error.blame or "", "unclassified")


def judge_as_harbor(result: TrialResult) -> None:
    """Fill in what Harbor derives from a result: what ended the trial, and whether its reward measures the agent."""
    errors = [result.exception_info, *(step.exception_info for step in result.step_results or ())]
    causes = [failure_cause(error) for error in errors if error is not None]
    result.failure_cause = causes[0] if causes else None
    result.reward_valid = bool(result.rewards) and all(cause in _MEASURED for cause in causes)


def stops_after(step: TaskStep, outcome: StepResult, verify: bool) -> str | None:
    """Why no further step is run after this one; None to go on."""
    if outcome.exception_info is not None and outcome.rewards is None:
        return "it failed and has no verdict"
    if step.min_reward is None or not verify:
        return None
    wanted = step.min_reward if isinstance(step.min_reward, dict) else {"reward": step.min_reward}
    rewards = outcome.rewards or {}
    for key, least in wanted.items():
        if (value := rewards.get(key)) is None or value < least:
            return f"its {key} is {value}, and {least:g} is needed to go on"
    return None


def combined_rewards(outcomes: Sequence[StepResult], strategy: str) -> dict[str, float | int] | None:
    """The trial's rewards from those of its steps. Steps that never began do not count. A step that began and has no
    verdict, which is not the agent's fault, leaves the whole trial without one: the other steps are not the task."""
    failed = (each.exception_info for each in outcomes if each.rewards is None)
    if any(error is not None and error.blame != "agent" for error in failed):
        return None
    if strategy == "final":
        last = outcomes[-1].rewards if outcomes else None
        return dict(last) if last is not None else None
    graded = [each.rewards for each in outcomes if each.rewards is not None]
    if not graded:
        return None
    keys = dict.fromkeys(key for rewards in graded for key in rewards)
    return means({key: rewards.get(key, 0) for key in keys} for rewards in graded)


ALL_CLOCKS = "timeout_multiplier"
_CLOCKS = ("agent", "verifier", "agent_setup", "environment_build")
MULTIPLIERS = (ALL_CLOCKS, *(f"{clock}_{ALL_CLOCKS}" for clock in _CLOCKS))
"""The names of the factors for the clocks of the phases, as Harbor has them."""
_LOCKED = (*MULTIPLIERS, "agent", "environment", "verifier")
"""The keys that a lock copies from the configuration of a trial."""


def lock_row(
    name: str, digest: str, source: str | None, reference: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, Any]:
    """The inputs of a trial, as in `lock.json` of a trial and in each row of that of a job."""
    kind = "git" if reference.get("git_url") else "local"
    return {
        "schema_version": 2,
        "task": {"name": name, "type": kind, "digest": digest, "source": source, **reference},
        **{key: config[key] for key in _LOCKED},
    }


def read_result(directory: Path) -> TrialResult:
    """The result of the trial in `directory`, which is not read through a link. `JobError` with code `no_trial`,
    `unfinished` or `broken_result` if there is none."""
    path = directory / "result.json"
    try:
        with open_regular(path) as stream:
            return TrialResult.model_validate_json(stream.read())
    except (OSError, TreeError, ValidationError) as error:
        raise _unreadable(directory, path, error) from error


def _unreadable(directory: Path, path: Path, error: Exception) -> JobError:
    if not directory.exists():
        return JobError(f"{directory}: no such directory", code="no_trial")
    if not directory.is_dir():
        return JobError(f"{directory} is a file, not a trial", code="no_trial")
    if (directory / "journal.jsonl").exists():
        hint = f"pier job show {directory} --trials"
        return JobError(f"{directory} is a job, not a trial", code="no_trial", hint=hint)
    if isinstance(error, FileNotFoundError):
        return JobError(f"{path}: missing, so the trial did not finish", code="unfinished")
    if isinstance(error, ValidationError):
        return JobError(f"{path}: not a trial's result: {describe(error)}", code="broken_result")
    return JobError(f"{path}: cannot be read: {error}", code="broken_result")
