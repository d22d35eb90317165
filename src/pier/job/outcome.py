"""How one try of a trial ended: the few facts that the journal keeps, taken from the result that the trial sealed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pier.errors import JobError, PierError
from pier.job.results import Cost, TokenTotals
from pier.redact import Redactor
from pier.trial.result import AgentResult, ExceptionInfo, TrialResult, failure_cause, read_result, storage_fault

RESULT = "result.json"
CANCELLED = "CancelledError"
_WITHOUT_MODELS = ("oracle", "nop", "kept-state")
_AGENT_ERRORS = ("AgentTimeoutError", "NonZeroAgentExitCodeError")
_BLAME_BY_CAUSE = {"verifier_failed": "task", "model_provider_failed": "provider"}
_NO_VERDICT = "job-budget"
"""The code of a trial that the job's own budget cut off: it did not get its chance, so it is still owed."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a try has an error: its kind (`type`, the class name; `code`), the blame, and whether to try again."""

    type: str
    code: str
    blame: str
    retryable: bool
    message: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one try of a trial ended. `rewards` is None without a verdict; unknown usage and cost are None."""

    rewards: dict[str, float] | None = None
    fault: Fault | None = None
    cancelled: bool = False
    tokens: tuple[int | None, int | None, int | None] = (None, None, None)
    cost: float | None = None
    seconds: float = 0.0
    steps: tuple[int, int] | None = None
    """Of a task with steps: how many were graded, and how many there are."""
    size: int = 0
    """The size of the result file, by which a torn one is detected without reading it."""

    def to_line(self) -> dict[str, Any]:
        """The outcome as a line of the journal has it; what is not there is left out."""
        f, known = self.fault, any(count is not None for count in self.tokens)
        more = {
            "fault": [f.type, f.code, f.blame, f.retryable, f.message[:500]] if f else None,
            "cancelled": self.cancelled or None,
            "tokens": list(self.tokens) if known else None,
            "cost": self.cost,
            "steps": list(self.steps) if self.steps else None,
        }
        line = {"rewards": self.rewards, "seconds": round(self.seconds, 4), "size": self.size}
        return line | {name: value for name, value in more.items() if value is not None}

    @classmethod
    def from_line(cls, line: dict[str, Any]) -> Outcome:
        fault, tokens, steps = line.get("fault"), line.get("tokens"), line.get("steps")
        return cls(
            rewards=line["rewards"],
            fault=Fault(*fault) if fault else None,
            cancelled=line.get("cancelled", False),
            tokens=(tokens[0], tokens[1], tokens[2]) if tokens else (None, None, None),
            cost=line.get("cost"),
            seconds=line.get("seconds", 0.0),
            steps=(steps[0], steps[1]) if steps else None,
            size=line.get("size", 0),
        )


def outcome_of(result: TrialResult, directory: Path) -> Outcome:
    """The outcome of a trial with this result in this directory."""
    info = result.exception_info
    used = [result.agent_result] if result.agent_result else [step.agent_result for step in result.step_results or ()]
    infos = (info, *(step.exception_info for step in result.step_results or ()))
    cut_off = any(each is not None and each.code == _NO_VERDICT for each in infos)
    cancelled = cut_off or (info is not None and info.exception_type == CANCELLED)
    tokens, cost = _usage(result, [each for each in used if each is not None])
    began, ended = result.started_at, result.finished_at
    rewards = None if cut_off else result.rewards
    return Outcome(
        rewards=dict(rewards) if rewards is not None else None,
        fault=_fault(result, info) if info is not None and not cancelled else None,
        cancelled=cancelled,
        tokens=tokens,
        cost=cost,
        seconds=(ended - began).total_seconds() if began and ended else 0.0,
        steps=_steps(result),
        size=size_of(directory),
    )


def _fault(result: TrialResult, info: ExceptionInfo) -> Fault:
    """The error of a result. Harbor records what ended a trial, from which the blame follows."""
    cause = result.failure_cause or failure_cause(info)
    known = "agent" if info.exception_type in _AGENT_ERRORS else _BLAME_BY_CAUSE.get(cause, "infra")
    return Fault(
        type=info.exception_type,
        code=info.code or info.exception_type,
        blame=info.blame or known,
        retryable=bool(info.retryable),
        message=info.exception_message,
    )


def _steps(result: TrialResult) -> tuple[int, int] | None:
    if result.pier is None or result.pier.n_steps is None:
        return None
    return result.pier.graded_steps or 0, result.pier.n_steps


def _usage(
    result: TrialResult, used: Sequence[AgentResult]
) -> tuple[tuple[int | None, int | None, int | None], float | None]:
    """The tokens and the cost of a trial over its steps. One whose agent never began cost nothing."""
    tokens, cost = TokenTotals(), Cost()
    for each in used:
        tokens.add(each.n_input_tokens, each.n_cache_tokens, each.n_output_tokens)
        cost.add(each.cost_usd)
    free = result.agent_info.name in _WITHOUT_MODELS or not used
    return (tokens.input, tokens.cached, tokens.output), 0.0 if free else cost.total


def outcome_of_error(error: Exception, redactor: Redactor) -> Outcome:
    """The outcome of a trial that broke before it could seal its result."""
    error = storage_fault(error) or error
    known = isinstance(error, PierError)
    fault = Fault(
        type=type(error).__name__,
        code=error.code if known else type(error).__name__,
        blame=error.blame if known else "infra",
        retryable=error.retryable if known else False,
        message=redactor.text(str(error)) or type(error).__name__,
    )
    return Outcome(fault=fault, cost=0.0)


def read_outcome(directory: Path) -> Outcome | None:
    """The outcome in a trial's directory; None if its result is missing, empty, torn or not a result."""
    try:
        return outcome_of(read_result(directory), directory)
    except JobError:
        return None


def size_of(directory: Path, name: str = RESULT) -> int:
    """The size of a file, by default the result; 0 if there is none."""
    try:
        return (directory / name).stat().st_size
    except OSError:
        return 0
