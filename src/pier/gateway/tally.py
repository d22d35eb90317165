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
    retries: int = 0
    """Further attempts after passing faults, which the agent never saw."""
    waited: float = 0.0
    """Seconds in which calls stood still for rate limits and before such attempts."""

    @property
    def met_fault(self) -> bool:
        """Whether the provider failed at least once."""
        return bool(self.ends["rate_limited"] or self.ends["provider_error"])

    @property
    def calls(self) -> int:
        return self.ends.total()

    def add(self, outcome: Outcome, status: int) -> None:
        self.last, self.last_status = end_of(outcome, status), status
        self.ends[self.last] += 1


def end_of(outcome: str, status: int) -> End:
    """How a generation ended, from its outcome in the recording and the status that the agent got."""
    if outcome == "ok":
        return "answered"
    if outcome in ("refused", "cancelled"):
        return "refused" if outcome == "refused" else "cancelled"
    if status == 429:
        return "rate_limited"
    return "provider_error" if status >= 500 or status in _PROVIDERS_FAULT else "rejected"
