"""Which finished trials are to be run again, on request."""

from __future__ import annotations

from dataclasses import dataclass

from pier.errors import UsageError
from pier.job.directory import Job
from pier.job.ledger import Outcome


@dataclass(frozen=True, slots=True)
class Wanted:
    """A choice of finished trials: by kind (`infra`, `errored`, `failed`), by type of error, by name."""

    kind: str | None = None
    types: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()

    def takes(self, name: str, outcome: Outcome) -> bool:
        if self.names and name not in self.names:
            return False
        fault = outcome.fault
        if self.types:
            return fault is not None and bool({fault.type, fault.code} & self.types)
        match self.kind:
            case "infra":
                return fault is not None and fault.blame in ("infra", "provider") and outcome.rewards is None
            case "errored":
                return fault is not None
            case "failed":
                return outcome.rewards is not None and any(value < 1 for value in outcome.rewards.values())
        return True


def void(job: Job, wanted: Wanted) -> int:
    """Set the wanted trials aside so that they are owed again; how many there were."""
    unknown = wanted.names - {trial.name for trial in job.ledger.plan.trials}
    if unknown:
        raise UsageError(f"{job.directory} has no trial {sorted(unknown)[0]}", hint=f"pier job show {job.directory}")
    count = 0
    for trial in job.ledger.plan.trials:
        outcome = job.ledger.outcomes.get(trial.id)
        if outcome is not None and wanted.takes(trial.name, outcome):
            job.ledger.again(trial.id, "asked", job.set_aside(trial, job.ledger.tries.get(trial.id, 1)))
            count += 1
    return count
