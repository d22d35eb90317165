"""`result.json` of a trial: the fields of Harbor's models and pier's own, and how errors and rewards are recorded.

Harbor and datacurve pier ignore unknown fields, so they load files with pier's own (`integrity`, `pier`). Pier loads
theirs in the same way. A missing, torn or invalid file is a typed error.
"""

from __future__ import annotations

import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
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
from pier.verifier.changes import Note


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", protected_namespaces=(), defer_build=True)


class TimingInfo(_Part):
    started_at: datetime | None = None
    finished_at: datetime | None = None


class ExceptionInfo(_Part):
    """An error of a trial. Harbor ignores the fields from `code` on."""

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
        """The model `NAME` or `PROVIDER/NAME`."""
        if model is None:
            return None
        provider, slash, name = model.partition("/")
        return cls(name=name, provider=provider) if slash else cls(name=model)


class AgentInfo(_Part):
    name: str
    version: str = "unknown"
    model_info: ModelInfo | None = None


class AgentResult(_Part):
    """The agent's usage. None is unknown, which is not zero."""

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


class GradingRun(_Part):
    """One run of the tests, with the agent's work (`agent`) or without it (`pristine`). `logs` is relative to the
    directory of the trial or step."""

    state: Literal["agent", "pristine"]
    logs: str
    rewards: dict[str, float | int] | None = None
    code: str | None = None
    message: str | None = None


class Integrity(_Part):
    """Evidence on whether to trust the verdict. `compared`: the backend could list the files that the agent changed.
    `runs`: the runs of the tests, if the first one gave no reward."""

    mode: str
    compared: bool = False
    notes: list[Note] = Field(default_factory=list)
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
    """Number of steps, None for a task without steps; `graded_steps` is the number of those with a verdict."""
    graded_steps: int | None = None
    phases: dict[str, float] = Field(default_factory=dict)
    """Seconds of each phase."""
    warnings: list[str] = Field(default_factory=list)
    network_refused: dict[str, int] = Field(default_factory=dict)
    """Numbers of attempts that the network policy refused, for the hundred most frequent destinations."""


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
    """Harbor's `FailureCause`; pier's own is `exception_info.blame`."""
    reward_valid: bool | None = None
    """Whether the reward is a valid measurement of the agent by Harbor's rules."""
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
        """The verdict; None if the trial has none, which is not zero."""
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
"""Harbor's exception class and `FailureCause` for each of our codes. Its statistics and filters use the class names."""
_HARBOR_CAUSES = {**dict(_HARBOR.values()), "CancelledError": "cancelled"}
_CAUSE_BY_BLAME = {
    "infra": "sandbox_failed",
    "provider": "model_provider_failed",
    "task": "harbor_failed",
    "user": "harbor_failed",
}
_MEASURED = ("agent_exhausted_budget",)
"""Causes with which a reward is valid by Harbor's rules."""

_MESSAGE_LIMIT = 20_000


@dataclass(slots=True)
class Captured:
    """The error of a guarded block, if it raised one."""

    error: Exception | None = None


@contextmanager
def captured() -> Iterator[Captured]:
    """Capture any error of the block, which becomes the trial's outcome."""
    failure = Captured()
    try:
        yield failure
    except Exception as error:  # noqa: BLE001 - this is the capture of a trial's outcome
        failure.error = error


@asynccontextmanager
async def finally_do(last: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Run `last` at the end of the block. An error of the block takes precedence over one of `last`."""
    try:
        yield
    except BaseException:
        with captured():
            await last()
        raise
    await last()


def storage_fault(error: BaseException | None) -> StorageError | None:
    """The `StorageError` for a file error of this machine; None for other errors."""
    if isinstance(error, StorageError):
        return error
    if isinstance(error, OSError) and error.errno in FAULTS:
        return StorageError(f"a file of the trial could not be written or read: {error}")
    return None


def exception_info(error: Exception, phase: str, redactor: Redactor) -> ExceptionInfo:
    """An error as recorded in the result."""
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
    """Harbor's `FailureCause` for an error, by its class if Harbor knows it, else by its blame."""
    return _HARBOR_CAUSES.get(error.exception_type) or _CAUSE_BY_BLAME.get(error.blame or "", "unclassified")


def judge_as_harbor(result: TrialResult) -> None:
    """Set the fields that Harbor derives from a result: the cause of a failure, and whether the reward is valid."""
    errors = [result.exception_info, *(step.exception_info for step in result.step_results or ())]
    causes = [failure_cause(error) for error in errors if error is not None]
    result.failure_cause = causes[0] if causes else None
    result.reward_valid = bool(result.rewards) and all(cause in _MEASURED for cause in causes)


def stops_after(step: TaskStep, outcome: StepResult, verify: bool) -> str | None:
    """The reason to run no further step after this one; None to continue."""
    if outcome.exception_info is not None and outcome.rewards is None:
        return "it failed and has no verdict"
    if step.min_reward is None or not verify:
        return None
    minimums = step.min_reward if isinstance(step.min_reward, dict) else {"reward": step.min_reward}
    rewards = outcome.rewards or {}
    for key, minimum in minimums.items():
        if (value := rewards.get(key)) is None or value < minimum:
            return f"its {key} is {value}, and {minimum:g} is needed to go on"
    return None


def combined_rewards(outcomes: Sequence[StepResult], strategy: str) -> dict[str, float | int] | None:
    """The trial's rewards, from the steps that began. If one of them has no verdict, and not by the agent's fault, the
    trial has none: the other steps are not the whole task."""
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
"""Harbor's names of the factors for the phases' time limits."""
_LOCKED = (*MULTIPLIERS, "agent", "environment", "verifier")
"""The keys that a lock copies from the configuration of a trial."""


def lock_row(
    name: str, digest: str, source: str | None, reference: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, Any]:
    """The inputs of a trial, for its `lock.json` and for a row of the job's."""
    kind = "git" if reference.get("git_url") else "local"
    return {
        "schema_version": 2,
        "task": {"name": name, "type": kind, "digest": digest, "source": source, **reference},
        **{key: config[key] for key in _LOCKED},
    }


def read_result(directory: Path) -> TrialResult:
    """The result of the trial in `directory`. `JobError` with code `no_trial`, `unfinished` or `broken_result` if there
    is none. Links are not followed."""
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
