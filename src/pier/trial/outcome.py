"""How things ended: errors as Harbor names them, rewards of several steps as one."""

from __future__ import annotations

import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime

from pier.errors import PierError, StorageError
from pier.redact import Redactor
from pier.task import Step
from pier.tree import FAULTS
from pier.trial.model import AgentResult, ExceptionInfo, Integrity, StepResult, TimingInfo, TrialResult, VerifierResult

_HARBOR_NAMES = {
    "agent_timeout": "AgentTimeoutError",
    "agent_exit": "NonZeroAgentExitCodeError",
    "agent_setup_timeout": "AgentSetupTimeoutError",
    "environment_timeout": "EnvironmentStartTimeoutError",
    "healthcheck": "HealthcheckError",
    "verifier_timeout": "VerifierTimeoutError",
    "reward_missing": "RewardFileNotFoundError",
    "reward_empty": "RewardFileEmptyError",
    "reward_invalid": "VerifierOutputParseError",
}
"""The class names that Harbor's statistics and filters know, by our codes."""

_HARBOR_CAUSES = {
    "AgentTimeoutError": "agent_exhausted_budget",
    "NonZeroAgentExitCodeError": "unclassified",
    "AgentSetupTimeoutError": "sandbox_failed",
    "EnvironmentStartTimeoutError": "sandbox_failed",
    "HealthcheckError": "sandbox_failed",
    "VerifierTimeoutError": "verifier_failed",
    "RewardFileNotFoundError": "verifier_failed",
    "RewardFileEmptyError": "verifier_failed",
    "VerifierOutputParseError": "verifier_failed",
    "VerifierError": "verifier_failed",
    "CancelledError": "cancelled",
}
"""What Harbor says ended a trial, by the type of its error."""

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
class StepOutcome:
    """What is known of one step so far."""

    name: str = ""
    agent_result: AgentResult | None = None
    rewards: Mapping[str, float | int] | None = None
    integrity: Integrity | None = None
    error: ExceptionInfo | None = None
    agent_setup: TimingInfo | None = None
    agent_execution: TimingInfo | None = None
    verifier: TimingInfo | None = None

    @property
    def verdict(self) -> VerifierResult | None:
        return VerifierResult(rewards=dict(self.rewards)) if self.rewards is not None else None

    def result(self) -> StepResult:
        return StepResult(
            step_name=self.name,
            agent_result=self.agent_result,
            verifier_result=self.verdict,
            exception_info=self.error,
            agent_execution=self.agent_execution,
            verifier=self.verifier,
            integrity=self.integrity,
        )


@dataclass(slots=True)
class Captured:
    """What a guarded part of a trial raised, if it did."""

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
    trace = "".join(traceback.format_exception(error))
    return ExceptionInfo(
        exception_type=_HARBOR_NAMES.get(known.code, type(error if type(known) is PierError else known).__name__),
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


def stops_after(step: Step, outcome: StepOutcome, verify: bool) -> str | None:
    """Why no further step is run after this one; None to go on."""
    if outcome.error is not None and outcome.rewards is None:
        return "it failed and has no verdict"
    if step.min_reward is None or not verify:
        return None
    wanted = step.min_reward if isinstance(step.min_reward, dict) else {"reward": step.min_reward}
    rewards = outcome.rewards or {}
    for key, least in wanted.items():
        if (value := rewards.get(key)) is None or value < least:
            return f"its {key} is {value}, and {least:g} is needed to go on"
    return None


def combined_rewards(outcomes: Iterable[StepOutcome], strategy: str) -> dict[str, float | int] | None:
    """The trial's rewards from those of its steps. Steps that never began do not count. A step that began and has no
    verdict, which is not the agent's fault, leaves the whole trial without one: the other steps are not the task."""
    outcomes = list(outcomes)
    if any(each.rewards is None and each.error and each.error.blame != "agent" for each in outcomes):
        return None
    if strategy == "final":
        last = outcomes[-1].rewards if outcomes else None
        return dict(last) if last is not None else None
    graded = [each.rewards for each in outcomes if each.rewards is not None]
    if not graded:
        return None
    keys = dict.fromkeys(key for rewards in graded for key in rewards)
    return {key: sum(rewards.get(key, 0) for rewards in graded) / len(graded) for key in keys}
