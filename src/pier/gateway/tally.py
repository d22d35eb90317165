"""Counts how a session's generations ended, so that whoever ran the agent can tell its failures from the model's."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from pier.gateway.recorder import Outcome

End = Literal["answered", "rate_limited", "provider_error", "rejected", "refused", "cancelled"]
"""`rejected`: the request itself was wrong; `refused`: there was no budget left; `cancelled`: the agent went away."""

_PROVIDERS_FAULT = frozenset({401, 402, 403, 408})


@dataclass(slots=True)
class Tally:
    """How many generations ended in which way, and how the last one that ended did."""

    ends: Counter[End] = field(default_factory=Counter)
    last: End | None = None
    last_status: int | None = None

    @property
    def calls(self) -> int:
        return self.ends.total()

    def add(self, outcome: Outcome, status: int) -> None:
        self.last, self.last_status = _end(outcome, status), status
        self.ends[self.last] += 1


def _end(outcome: Outcome, status: int) -> End:
    if outcome == "ok":
        return "answered"
    if outcome != "error":
        return outcome
    if status == 429:
        return "rate_limited"
    return "provider_error" if status >= 500 or status in _PROVIDERS_FAULT else "rejected"
