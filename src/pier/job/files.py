"""What to say when a job's files cannot be written."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pier.errors import JobError

_FULL = (errno.ENOSPC, errno.EDQUOT)


def is_full(error: BaseException) -> bool:
    """Whether an error says that a disk is full."""
    return isinstance(error, OSError) and error.errno in _FULL


@contextmanager
def explained(directory: Path) -> Iterator[None]:
    """Turn an `OSError`, also one among several of a task group, into a `JobError` that says what to do."""
    try:
        yield
    except (OSError, BaseExceptionGroup) as error:
        found = _system_error(error)
        if found is None:
            raise
        full = is_full(found)
        raise JobError(
            f"the disk that holds {directory} is full" if full else f"the job's files cannot be written: {found}",
            hint=f"{'free some space' if full else 'fix that'}, then run the same command again",
            code="disk-full" if full else "job-files",
            blame="infra",
        ) from error


def _system_error(error: BaseException) -> OSError | None:
    if isinstance(error, BaseExceptionGroup):
        return next((found for each in error.exceptions if (found := _system_error(each))), None)
    return error if isinstance(error, OSError) else None
