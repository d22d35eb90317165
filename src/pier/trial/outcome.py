"""How things ended: errors as Harbor names them, rewards of several steps as one."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime

from pier.errors import PierError
from pier.redact import Redactor
from pier.task import Step
from pier.trial.model import AgentResult, ExceptionInfo, Integrity, StepResult, TimingInfo, VerifierResult

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


def exception_info(error: Exception, phase: str, redactor: Redactor) -> ExceptionInfo:
    """An error as it goes into the result."""
    known = error if isinstance(error, PierError) else PierError(str(error), code="internal")
    trace = "".join(traceback.format_exception(error))
    return ExceptionInfo(
        exception_type=_HARBOR_NAMES.get(known.code, type(error).__name__),
        exception_message=redactor.text(str(error))[:_MESSAGE_LIMIT],
        exception_traceback=redactor.text(trace)[-_MESSAGE_LIMIT:],
        occurred_at=datetime.now(UTC),
        code=known.code,
        blame=known.blame,
        retryable=known.retryable,
        hint=redactor.text(known.hint) if known.hint else None,
        phase=phase,
    )


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
    """The trial's rewards from its steps'. A step that an infrastructure fault left without a verdict leaves the whole
    trial without one."""
    outcomes = list(outcomes)
    if any(each.rewards is None and each.error and each.error.blame in ("infra", "provider") for each in outcomes):
        return None
    if strategy == "final":
        last = outcomes[-1].rewards if outcomes else None
        return dict(last) if last is not None else None
    graded = [each.rewards for each in outcomes if each.rewards is not None]
    if not graded:
        return None
    keys = dict.fromkeys(key for rewards in graded for key in rewards)
    return {key: sum(rewards.get(key, 0) for rewards in graded) / len(graded) for key in keys}
