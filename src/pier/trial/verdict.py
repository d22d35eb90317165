"""Assigns the blame when the tests give no reward.

An agent that breaks what its tests need must not escape its zero, and one whose tests fail by themselves must not get
one. So tests that gave no reward run twice more: in a pristine sandbox, without anything that the agent did, and again
in what the agent left.

    pristine     agent's state   outcome
    reward       no reward       the agent broke its own grading: 0 for each key, with a note
    no reward    no reward       no verdict, the task's fault
    either       reward          no verdict, a flake: retryable

A fault of the machine, its disk or its network is never the agent's. The pristine run comes between the other two, so
that an outage would have to come and go twice to look like the agent's doing.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from pier.errors import PathError, PierError, SandboxError, VerifierError
from pier.network.decision import Decision, OnDecision
from pier.trial.grading import Graded
from pier.trial.model import GradingRun
from pier.trial.record import TrialRecord
from pier.verifier import Note

FIRST = "verifier"
LATER = "verifier-runs"
"""Where the logs of further runs are: next to those of the first, since the tests choose the names among those."""

_MACHINE = frozenset(
    {
        *("sandbox_gone", "container_gone", "zygote_gone", "helper_gone", "disk_full", "storage"),
        *("engine", "engine_down", "helper_start", "stop_timeout"),
    }
)
"""Codes of errors that say nothing about what is in a sandbox."""

_OF_FILES = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError)
_OF_NAMES = frozenset({errno.ELOOP, errno.ENAMETOOLONG})
"""With the above, what reading a tree of files that an agent made may fail with."""


class Tests(Protocol):
    """The tests of one step. Each call is one whole verification, which gives `graded` its rewards or raises."""

    async def in_agents_state(self, graded: Graded, logs: Path) -> None: ...

    async def in_pristine_state(self, graded: Graded, logs: Path, watch: OnDecision) -> None: ...


@dataclass(frozen=True, slots=True)
class NetworkUse:
    """The destinations that a run tried to reach, and those of them that could not be reached."""

    tried: set[tuple[str, str, int]] = field(default_factory=set)
    failed: set[tuple[str, str, int]] = field(default_factory=set)

    def note(self, decision: Decision) -> None:
        if not decision.allowed or decision.kind not in ("dns", "tcp"):
            return
        place = (decision.kind, decision.name, decision.port)
        self.tried.add(place)
        if decision.outage:
            self.failed.add(place)


@dataclass(slots=True)
class _Run:
    state: Literal["agent", "pristine"]
    logs: str
    graded: Graded
    network: NetworkUse = field(default_factory=NetworkUse)
    error: Exception | None = None


async def reach_verdict(tests: Tests, graded: Graded, directory: Path, record: TrialRecord) -> None:
    """Grade, and assign the blame if that gives no reward. `graded` gets the rewards; an error is raised if
    there is no verdict."""
    first = _Run("agent", FIRST, graded)
    with _agents_run(first, record):
        await tests.in_agents_state(graded, directory / FIRST)
    if first.error is None:
        return
    record.log(f"no reward: {first.error}; the tests run twice more to assign the blame")
    pristine = _Run("pristine", f"{LATER}/2-pristine", Graded(graded.mode))
    again = _Run("agent", f"{LATER}/3-agent", Graded(graded.mode))
    graded.runs.append(_shown(first, record))
    with _pristine_run(pristine):
        await tests.in_pristine_state(pristine.graded, directory / pristine.logs, pristine.network.note)
    graded.runs.append(_shown(pristine, record))
    with _agents_run(again, record):
        await tests.in_agents_state(again.graded, directory / again.logs)
    graded.runs.append(_shown(again, record))
    _decide(graded, first, pristine, again)
    record.log("the agent broke its own grading: reward 0")


def _decide(graded: Graded, first: _Run, pristine: _Run, again: _Run) -> None:
    """Give `graded` the zeros of an agent that broke its grading, or raise the error with its blame instead."""
    error = first.error
    if again.error is None:
        raise VerifierError(
            f"the tests gave no reward and then {again.graded.rewards} for the same state; the first time: {error}",
            code="verifier_flaky",
            blame="infra",
            retryable=True,
        ) from error
    if lost := network_faults(first.network, pristine.network, again.network, reward=pristine.error is None):
        raise VerifierError(
            f"the tests could not reach {lost}: {error}", code="verifier_network", blame="infra", retryable=True
        ) from error
    if pristine.error is not None:
        if isinstance(error, VerifierError) and error.blame == "task":
            raise error
        raise VerifierError(f"the tests could not run: {error}", code=getattr(error, "code", "verifier")) from error
    graded.rewards = dict.fromkeys(pristine.graded.rewards or {}, 0)
    graded.notes.append(
        Note("no_reward", f"the tests give a reward without the agent's work, and none with it, tried twice: {error}")
    )


def network_faults(first: NetworkUse, pristine: NetworkUse, again: NetworkUse, *, reward: bool) -> str:
    """The destinations that could not be reached. In the agent's state only those count that the tests also try without
    it: the agent may have planted attempts that fail. `reward`: the pristine run gave one, so what failed there is not
    needed for it."""
    lost = (first.failed | again.failed) & pristine.tried
    lost = lost - pristine.failed if reward else lost | pristine.failed
    return ", ".join(sorted({f"{name}:{port}" if port else name for _, name, port in lost}))


@contextmanager
def _agents_run(run: _Run, record: TrialRecord) -> Iterator[None]:
    """Keep the error of a run in the agent's state, unless nothing in a sandbox can be the reason for it."""
    record.watch = run.network.note
    try:
        yield
    except (VerifierError, SandboxError, OSError) as error:
        run.error = error
        if run.graded.starting or is_machine_fault(error):
            raise
    finally:
        record.watch = None


@contextmanager
def _pristine_run(run: _Run) -> Iterator[None]:
    """Keep the error of a run that the agent has no part in, if it is the task's."""
    try:
        yield
    except PierError as error:
        run.error = error
        if error.blame != "task":
            raise


def is_machine_fault(error: BaseException | None) -> bool:
    """Whether an error, or what it came of, is one that files and processes in a sandbox cannot cause."""
    while error is not None:
        if isinstance(error, PathError):
            return False
        if isinstance(error, SandboxError) and (error.code in _MACHINE or error.blame == "user"):
            return True
        if isinstance(error, OSError) and not isinstance(error, _OF_FILES) and error.errno not in _OF_NAMES:
            return True
        error = error.__cause__
    return False


def _shown(run: _Run, record: TrialRecord) -> GradingRun:
    error = run.error
    return GradingRun(
        state=run.state,
        logs=run.logs,
        rewards=run.graded.rewards,
        code=None if error is None else getattr(error, "code", type(error).__name__),
        message=None if error is None else record.redactor.text(str(error)),
    )
