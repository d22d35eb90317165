"""Reads what a trial left, also trials of other programs; a missing, torn or invalid file is a typed error."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from pier.errors import JobError
from pier.task.load import describe
from pier.trial.model import TrialResult


def read_result(directory: Path) -> TrialResult:
    """The result of the trial in `directory`. `JobError` with code `unfinished` or `broken_result` if there is none."""
    path = directory / "result.json"
    if (directory / "journal.jsonl").exists():
        raise JobError(
            f"{directory} is a job, not a trial", code="no_trial", hint=f"pier job show {directory} --trials"
        )
    try:
        return TrialResult.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        if not directory.is_dir():
            raise JobError(f"{directory}: no such directory", code="no_trial") from None
        raise JobError(f"{path}: not there, so the trial did not finish", code="unfinished") from None
    except ValidationError as error:
        raise JobError(f"{path}: not a trial's result: {describe(error)}", code="broken_result") from error
    except OSError as error:
        raise JobError(f"{path}: cannot be read: {error}", code="broken_result") from error
