"""Counts how a session's generations ended, to separate the agent's failures from the model's."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from pier.gateway.faults import Fault
from pier.gateway.recorder import Outcome

End = Literal["answered", "rate_limited", "provider_error", "rejected", "refused", "cancelled"]
"""`rejected`: the request itself was wrong; `refused`: there was no budget left; `cancelled`: the agent went away."""

_ENDS: dict[Fault | None, End] = {"agent": "rejected", None: "rejected", "rate_limit": "rate_limited"}


@dataclass(slots=True)
class Tally:
    """How many generations ended in which way."""

    ends: Counter[End] = field(default_factory=Counter)
    faults: Counter[Fault] = field(default_factory=Counter)
    """Faults of calls that ended without a whole answer."""
    last: tuple[Fault | None, int] = (None, 0)
    """The fault and status of the call that ended last."""
    retries: int = 0
    """Further attempts after passing faults, which the agent never saw."""
    waited: float = 0.0
    """Seconds in which calls stood still for rate limits and before such attempts."""
    most: int = 0
    """How many requests of the session were served at once, at most."""

    @property
    def calls(self) -> int:
        return self.ends.total()

    def add(self, outcome: Outcome, status: int, fault: Fault | None) -> None:
        self.ends[end_of(outcome, fault)] += 1
        self.last = fault, status
        if fault:
            self.faults[fault] += 1


def end_of(outcome: str, fault: Fault | None) -> End:
    """How a generation ended, from its outcome in the recording and its fault."""
    if outcome == "ok":
        return "answered"
    if outcome in ("refused", "cancelled"):
        return "refused" if outcome == "refused" else "cancelled"
    return _ENDS.get(fault, "provider_error")
