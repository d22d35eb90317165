"""How a trial ended, taken from its result: the object that a trial returns, or the file that it sealed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pier.errors import PierError
from pier.job.ledger import Fault, Outcome
from pier.redact import Redactor
from pier.trial.model import AgentResult, TrialResult
from pier.trial.outcome import storage_fault

RESULT = "result.json"
CANCELLED = "CancelledError"
_WITHOUT_MODELS = ("oracle", "nop", "kept-state")
_NO_VERDICT = "job-budget"
"""The code of a trial that the job's own budget cut off: it did not get its chance, so it is still owed."""


def outcome_of(result: TrialResult, directory: Path) -> Outcome:
    """The outcome that a result says."""
    info = result.exception_info
    used = [result.agent_result] if result.agent_result else [step.agent_result for step in result.step_results or ()]
    infos = (info, *(step.exception_info for step in result.step_results or ()))
    cut_off = any(each is not None and each.code == _NO_VERDICT for each in infos)
    cancelled = cut_off or (info is not None and info.exception_type == CANCELLED)
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
    rewards = None if cut_off else result.rewards
    return Outcome(
        rewards=dict(rewards) if rewards is not None else None,
        fault=fault,
        cancelled=cancelled,
        tokens=(_sum(used, "n_input_tokens"), _sum(used, "n_cache_tokens"), _sum(used, "n_output_tokens")),
        cost=_cost(result, used),
        seconds=(ended - began).total_seconds() if began and ended else 0.0,
        steps=_steps(result),
        size=size_of(directory),
    )


def _steps(result: TrialResult) -> tuple[int, int] | None:
    if result.pier is None or result.pier.n_steps is None:
        return None
    return result.pier.graded_steps or 0, result.pier.n_steps


def _sum(used: Sequence[AgentResult | None], name: str) -> Any:
    """The sum over the steps of a trial of what is known; None if nothing is."""
    known = [value for each in used if each is not None and (value := getattr(each, name)) is not None]
    return sum(known) if known else None


def _cost(result: TrialResult, used: Sequence[AgentResult | None]) -> float | None:
    """What a trial cost; None if that is not known of all its steps. One whose agent never began cost nothing."""
    costs = [each.cost_usd for each in used if each is not None]
    if result.agent_info.name in _WITHOUT_MODELS:
        return 0.0
    return None if None in costs else math.fsum(cost for cost in costs if cost is not None)


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
        return outcome_of(TrialResult.model_validate_json((directory / RESULT).read_bytes()), directory)
    except (OSError, ValidationError, ValueError):
        return None


def size_of(directory: Path, name: str = RESULT) -> int:
    """The size of a file, by default the result; 0 if there is none."""
    try:
        return (directory / name).stat().st_size
    except OSError:
        return 0
