"""The meter that all sessions of a job share. It continues from the usage of earlier runs."""

from __future__ import annotations

import time

from pier.gateway.budget import Budget, Meter
from pier.job.ledger import Ledger, Used
from pier.wire.turn import Usage


class JobMeter(Meter):
    """A meter that starts from the usage in the journal and records each turn there. `wall_time` counts from the first
    call of each run, in addition to earlier runs."""

    def __init__(self, budget: Budget, ledger: Ledger) -> None:
        super().__init__(budget, owner="job")
        self._ledger = ledger
        self.turns, self.input_tokens, self.output_tokens, self.cost_usd, self._before = ledger.used

    def settle(self, *, spent: bool) -> None:
        super().settle(spent=spent)
        if spent:
            self.save()

    def add(self, usage: Usage | None, cost: float | None) -> None:
        super().add(usage, cost)
        self.save()

    @property
    def seconds_left(self) -> float | None:
        left = super().seconds_left
        return None if left is None else left - self._before

    @property
    def used(self) -> Used:
        """Usage so far; time is counted only if it is limited."""
        seconds = self._before
        if self.budget.wall_time is not None and self._started is not None:
            seconds += round(time.monotonic() - self._started, 1)
        return Used(self.turns, self.input_tokens, self.output_tokens, self.cost_usd, seconds)

    def save(self) -> None:
        """Record the usage if it has changed."""
        if (used := self.used) != self._ledger.used:
            self._ledger.note_used(used)
