"""What all trials of a job together may use of their models.

The limits are held by one meter that every session of the job shares. What was used stands in the journal, next to the
trials' ends, from the moment it is used: a job that is resumed, also after its runner was killed, goes on counting
where it stopped, tries that no longer count included. `wall_time` counts from the first call of each run, on top of
what earlier runs took; a runner that is killed loses a few seconds of it at most.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pier.job.config import BudgetConfig
from pier.job.ledger import Ledger, Used

if TYPE_CHECKING:
    from pier.job.meter import JobMeter


class JobBudget:
    """The budget of a job that runs. Without any limit it has no `pool`, and costs nothing."""

    def __init__(self, limits: BudgetConfig, ledger: Ledger) -> None:
        self._ledger = ledger
        self.pool = _pool(limits, ledger.used, self.save)

    def used_up(self) -> str | None:
        """A description of the limit that is reached; None while trials may begin."""
        return self.pool.exhausted() if self.pool else None

    def save(self) -> None:
        """Write down what was used, if that has changed."""
        if self.pool is not None and (used := self.pool.used) != self._ledger.used:
            self._ledger.note_used(used)


def _pool(limits: BudgetConfig, used: Used, changed: Callable[[], None]) -> JobMeter | None:
    asked = limits.model_dump(exclude_none=True)
    if not asked:
        return None
    from pier.gateway.budget import Budget
    from pier.job.meter import JobMeter

    return JobMeter(Budget(**asked), used, changed)
