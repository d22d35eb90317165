"""What the network policy decided, one value for each attempt: the lines of a trial's `network.jsonl`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Kind = Literal["dns", "tcp", "udp", "icmp", "ip", "probe"]


@dataclass(frozen=True, slots=True)
class Decision:
    """One attempt. `name` is what was asked for, a host name or an address; `sent` and `received` are bytes."""

    kind: Kind
    name: str
    allowed: bool
    port: int = 0
    reason: str = ""
    address: str = ""
    sent: int = 0
    received: int = 0
    service: str = ""
    """Which service of the trial tried, in a task of several; empty for the one that the agent works in."""
    count: int = 1
    """How many attempts this is about."""
    outage: bool = False
    """It was allowed, and nothing answered there; never a failure that the client can cause."""
    time: float = field(default_factory=time.time)

    def line(self) -> dict[str, Any]:
        """The decision as it is written down: without what is empty."""
        usual = {"count": 1}
        rows = asdict(self).items()
        return {name: value for name, value in rows if value not in ("", 0, usual.get(name)) or name == "allowed"}


OnDecision = Callable[[Decision], None]
LIMIT = 100_000
"""How many decisions are passed on for one sandbox; whoever tries more only fills the log."""


class Ledger:
    """Passes decisions on and adds them up."""

    def __init__(self, on_decision: OnDecision | None = None) -> None:
        self._on_decision = on_decision
        self._count = 0
        self.muted = False
        self.allowed = 0
        self.refused: Counter[str] = Counter()

    def note(self, decision: Decision) -> None:
        if self.muted:
            return
        self._count += 1
        if decision.allowed:
            self.allowed += 1
        elif len(self.refused) < LIMIT:
            port = f":{decision.port}" if decision.port else ""
            self.refused[f"{decision.kind} {decision.name}{port}"] += decision.count
        if self._on_decision is not None and self._count <= LIMIT:
            self._on_decision(decision)
