"""What a job will do: its trials, each with an identity that is the same wherever and whenever it is computed.

An identity is made of the task's name and digest, the agent's configuration, the settings that can change a result,
and the attempt; `pier.job.identity` says what of them counts. Paths of tasks, ports on the loopback and times are not
part of it, so the same command finds its own trials again after a move or a reboot.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pier.errors import UsageError

_ALPHABET = "23456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_LOOPBACK_PORT = re.compile(r"(127\.0\.0\.1|localhost|\[::1\]):\d+")
_UNSAFE = re.compile(r"[^A-Za-z0-9._+-]+")


@dataclass(frozen=True, slots=True)
class PlannedTask:
    """A task of the plan. `source` is the dataset it came from."""

    name: str
    digest: str
    path: str
    source: str | None = None
    git_url: str | None = None
    git_commit_id: str | None = None
    git_path: str | None = None


@dataclass(frozen=True, slots=True)
class PlannedTrial:
    """One trial of the plan; `task` and `agent` are places in the plan's lists, `attempt` counts from 1."""

    id: str
    name: str
    task: int
    agent: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Plan:
    """All trials of a job, in the order in which they are started."""

    tasks: tuple[PlannedTask, ...] = ()
    agents: tuple[dict[str, Any], ...] = ()
    trials: tuple[PlannedTrial, ...] = ()
    by_id: dict[str, PlannedTrial] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.by_id.update((trial.id, trial) for trial in self.trials)

    def to_line(self) -> dict[str, Any]:
        """The plan as one line of a journal."""
        keys = PlannedTask.__slots__
        return {
            "e": "plan",
            "tasks": [{key: value for key in keys if (value := getattr(task, key)) is not None} for task in self.tasks],
            "agents": list(self.agents),
            "trials": [[trial.id, trial.name, trial.task, trial.agent, trial.attempt] for trial in self.trials],
        }

    @classmethod
    def from_line(cls, line: dict[str, Any]) -> Plan:
        return cls(
            tuple(PlannedTask(**task) for task in line["tasks"]),
            tuple(line["agents"]),
            tuple(PlannedTrial(*trial) for trial in line["trials"]),
        )


def check_tasks(tasks: Sequence[PlannedTask]) -> None:
    """`UsageError` if there is nothing to plan."""
    if not tasks:
        raise UsageError("there is no task to run", hint="give a task or a directory of tasks with -p")


def make_plan(
    tasks: Sequence[PlannedTask],
    agents: Sequence[dict[str, Any]],
    settings: dict[str, Any],
    attempts: int,
    *,
    shown: Sequence[dict[str, Any]] | None = None,
    variables: Sequence[dict[str, Any]] | None = None,
) -> Plan:
    """The plan for each agent on each task, `attempts` times. Agents and settings are what counts of them; `shown` are
    the agents as they may be written down, if that is something else; `variables` are those that each task asks for."""
    check_tasks(tasks)
    told = variables or [{}] * len(tasks)
    prefixes = [
        [_identity_of(task, agent, {**settings, "variables": more}) for agent in agents]
        for task, more in zip(tasks, told, strict=True)
    ]
    seen: Counter[str] = Counter()
    names: set[str] = set()
    trials: list[PlannedTrial] = []
    for attempt in range(1, attempts + 1):
        for t, task in enumerate(tasks):
            for a in range(len(agents)):
                base = f"{prefixes[t][a]}/{attempt}"
                seen[base] += 1
                digest = hashlib.sha256(f"{base}/{seen[base]}".encode()).digest()
                name = next(name for name in _names(task.name, digest) if name not in names)
                names.add(name)
                trials.append(PlannedTrial(digest[:8].hex(), name, t, a, attempt))
    return Plan(tuple(tasks), tuple(agents if shown is None else shown), tuple(trials))


def _identity_of(task: PlannedTask, agent: dict[str, Any], settings: dict[str, Any]) -> str:
    stable = [task.name, task.digest, task.source, _said(agent), _said(settings)]
    return hashlib.sha256(json.dumps(_without_ports(stable), sort_keys=True).encode()).hexdigest()


def _said(table: dict[str, Any]) -> dict[str, Any]:
    """What asks for something. Inside of a value, everything does."""
    return {key: value for key, value in table.items() if value is not None and value != [] and value != {}}


def _without_ports(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_ports(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_ports(each) for each in value]
    return _LOOPBACK_PORT.sub(r"\1", value) if isinstance(value, str) else value


def _names(task: str, digest: bytes) -> Iterator[str]:
    """Names for a trial's directory, best first: the task's short name and seven characters of the identity."""
    short = _UNSAFE.sub("-", task.rsplit("/", 1)[-1]).lstrip(".-_")[:32].rstrip("_-") or "task"
    number = int.from_bytes(digest, "big")
    while True:
        suffix = ""
        for _ in range(7):
            number, place = divmod(number, len(_ALPHABET))
            suffix += _ALPHABET[place]
        yield f"{short}__{suffix}"
        number = int.from_bytes(hashlib.sha256(suffix.encode() + digest).digest(), "big")
