"""How a trial ended, taken from its result: the object that a trial returns, or the file that it sealed."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from pier.errors import PierError
from pier.job.ledger import Fault, Outcome
from pier.trial.model import TrialResult

RESULT = "result.json"
CANCELLED = "CancelledError"


def outcome_of(result: TrialResult, directory: Path) -> Outcome:
    """The outcome that a result says."""
    info, used = result.exception_info, result.agent_result
    cancelled = info is not None and info.exception_type == CANCELLED
    fault = None
    if info is not None and not cancelled:
        fault = Fault(
            type=info.exception_type,
            code=info.code or info.exception_type,
            blame=info.blame or "infra",
            retryable=bool(info.retryable),
            message=info.exception_message,
        )
    began, ended = result.started_at, result.finished_at
    rewards = result.rewards
    return Outcome(
        rewards=dict(rewards) if rewards is not None else None,
        fault=fault,
        cancelled=cancelled,
        tokens=(used.n_input_tokens, used.n_cache_tokens, used.n_output_tokens) if used else (None, None, None),
        cost=used.cost_usd if used else None,
        seconds=(ended - began).total_seconds() if began and ended else 0.0,
        size=size_of(directory),
    )


def outcome_of_error(error: BaseException) -> Outcome:
    """The outcome of a trial that broke before it could seal a result of its own."""
    known = isinstance(error, PierError)
    fault = Fault(
        type=type(error).__name__,
        code=error.code if known else type(error).__name__,
        blame=error.blame if known else "infra",
        retryable=error.retryable if known else False,
        message=str(error) or type(error).__name__,
    )
    return Outcome(fault=fault)


def read_outcome(directory: Path) -> Outcome | None:
    """The outcome in a trial's directory; None if its result is missing, empty, torn or not a result."""
    try:
        return outcome_of(TrialResult.model_validate_json((directory / RESULT).read_bytes()), directory)
    except (OSError, ValidationError, ValueError):
        return None


def size_of(directory: Path) -> int:
    """The size of the result file; 0 if there is none."""
    try:
        return (directory / RESULT).stat().st_size
    except OSError:
        return 0
