"""The verify phase: in the agent's sandbox after it was secured, or in a fresh one that gets the artifacts only.

Assigns the blame when the tests give no reward.

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
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol

from pier.errors import PathError, PierError, SandboxError, VerifierError
from pier.network.decision import Decision, OnDecision
from pier.network.policy import NONE, NetworkPolicy
from pier.redact import Redactor
from pier.sandbox.contract import LOST, Change, Mount, Sandbox
from pier.sandbox.tree.pack import SKIPPED
from pier.task import TaskStep, resolve_env
from pier.tree import Tree
from pier.trial.agent import Deadline, user_text
from pier.trial.collect import Collected, hand_over, take_logs
from pier.trial.environment import (
    Room,
    StepNetwork,
    agent_room,
    furnish,
    prepare_step,
    verifier_room,
    wait_until_healthy,
)
from pier.trial.record import TrialRecord, limit
from pier.trial.result import GradingRun, Integrity, IntegrityNote, finally_do
from pier.trial.spec import TrialSpec
from pier.verifier import Grading, Note, RewardFiles, Rewards, grade, look_again, secure
from pier.verifier.changes import VERIFIER_LOGS

STDOUT = "test-stdout.txt"
_GRACE = 120.0
"""Seconds beyond the verifier's own limit for bringing tests in and logs out."""


class StartRoom(Protocol):
    """Starts another sandbox of the trial. `watch` sees the decisions of its network policy."""

    def __call__(
        self,
        room: Room,
        network: NetworkPolicy,
        name: str,
        mounts: Iterable[Mount] = (),
        watch: OnDecision | None = None,
    ) -> Awaitable[Sandbox]: ...


@dataclass(slots=True)
class Graded:
    """What grading found out, also when it failed half-way."""

    mode: str
    rewards: Rewards | None = None
    compared: bool = False
    notes: list[Note] = field(default_factory=list)
    runs: list[GradingRun] = field(default_factory=list)
    starting: bool = False
    """A sandbox is being started, which holds nothing of the agent's yet: a failure now is not its doing."""

    def integrity(self, redactor: Redactor) -> Integrity:
        notes = [
            IntegrityNote(
                kind=n.kind,
                detail=redactor.text(n.detail),
                path=redactor.text(n.path) if n.path else None,
                stopped=n.stopped,
            )
            for n in self.notes
        ]
        return Integrity(mode=self.mode, compared=self.compared, notes=notes, runs=self.runs)


@dataclass(frozen=True, slots=True)
class GradingPlace:
    """What grading needs of the trial: its spec and files, and how to start another sandbox."""

    spec: TrialSpec
    record: TrialRecord
    environ: Mapping[str, str]
    start: StartRoom


@dataclass(frozen=True, slots=True)
class SharedTests:
    """Tests that run in the sandbox that the agent worked in."""

    place: GradingPlace
    index: int
    sandbox: Sandbox
    before: list[Change] | None
    workdir: str
    network: StepNetwork
    baseline: NetworkPolicy
    switch: Callable[[NetworkPolicy], Awaitable[None]]
    """Gives the agent's sandbox another network."""

    async def in_agents_state(self, graded: Graded, logs: Path) -> None:
        """Grade what the agent left. It can be called again: the verifier's directories are emptied first."""
        await self.switch(self.network.verifier)
        await self._grade(graded, self.sandbox, self.before, self.workdir, logs)

    async def in_pristine_state(self, graded: Graded, logs: Path, watch: OnDecision) -> None:
        """Grade a sandbox of the same image, prepared for the step, in which no agent worked."""
        spec, place = self.place.spec, self.place
        room = agent_room(spec.task, spec.sandbox, place.environ)
        name = f"{spec.name}-pristine"
        async with await place.start(room, self.baseline, name, spec.sandbox.mounts, watch) as clean:
            workdir = (await furnish(clean, room)).workdir
            if room.table.healthcheck is not None:
                await wait_until_healthy(clean, room.table.healthcheck, cwd=workdir)
            for step in spec.task.steps[: self.index + 1]:
                await prepare_step(spec, step, clean, workdir)
            if self.network.verifier != self.baseline:
                await clean.set_network(self.network.verifier)
            await self._grade(graded, clean, await clean.changes(), workdir, logs)

    async def _grade(
        self, graded: Graded, sandbox: Sandbox, before: list[Change] | None, workdir: str, logs: Path
    ) -> None:
        place, spec = self.place, self.place.spec

        @asynccontextmanager
        async def pristine() -> AsyncIterator[Sandbox]:
            room = replace(agent_room(spec.task, spec.sandbox, place.environ), compose=None)
            graded.starting = True
            async with await place.start(room, NONE, f"{spec.name}-clean") as clean:
                graded.starting = False
                yield clean

        step, is_last = spec.task.steps[self.index], self.index == len(spec.task.steps) - 1
        for keep in (_keeps_processes(spec), False):
            secured = await secure(
                sandbox, before=before, workdir=workdir, pristine=pristine, keep_processes=keep, tests=step.tests
            )
            graded.compared = secured.compared
            graded.notes += secured.notes
            whole = sandbox if secured.view is not None and is_last else None
            try:
                async with secured.place(sandbox) as view:
                    await _grade(place, graded, step, view, workdir, logs, bundled=False, whole=whole)
                    graded.notes += await look_again(sandbox, secured, workdir)
                return
            except SandboxError as error:
                if secured.view is None or error.code != LOST:
                    raise
                graded.notes.append(Note("processes", f"they kept the verifier from its work, and are killed: {error}"))


@dataclass(frozen=True, slots=True)
class SeparateTests:
    """Tests that run in a sandbox that the agent never saw. Artifacts come to the paths where the agent left them."""

    place: GradingPlace
    index: int
    policy: NetworkPolicy
    collected: list[Collected]
    artifacts: Path

    async def in_agents_state(self, graded: Graded, logs: Path) -> None:
        """Grade the artifacts, in another sandbox each time."""
        await self._grade(graded, self.collected, "verifier", logs)

    async def in_pristine_state(self, graded: Graded, logs: Path, watch: OnDecision) -> None:
        """Grade without any artifact."""
        await self._grade(graded, [], "pristine", logs, watch)

    async def _grade(
        self, graded: Graded, collected: list[Collected], name: str, logs: Path, watch: OnDecision | None = None
    ) -> None:
        place, spec = self.place, self.place.spec
        step = spec.task.steps[self.index]
        room = verifier_room(spec.task, self.index, spec.sandbox, place.environ)
        graded.starting = True
        async with await place.start(room, self.policy, f"{spec.name}-{name}", watch=watch) as sandbox:
            furnished = await furnish(sandbox, room)
            graded.starting = False
            graded.notes += await hand_over(
                sandbox, collected, self.artifacts, workdir=furnished.workdir, record=place.record
            )
            graded.compared = True
            bundled = step.verifier_environment.bundled
            await _grade(place, graded, step, sandbox, furnished.workdir, logs, bundled=bundled)


async def _grade(
    place: GradingPlace,
    graded: Graded,
    step: TaskStep,
    sandbox: Sandbox,
    workdir: str,
    target: Path,
    *,
    bundled: bool,
    whole: Sandbox | None = None,
) -> None:
    spec, record = place.spec, place.record
    choice, table = spec.verifier, step.verifier
    seconds = Deadline(choice.timeout, table.timeout_sec, choice.max_timeout, spec.multipliers.of("verifier")).seconds
    env = resolve_env(table.env, where="verifier.env", environ=place.environ)
    extra = resolve_env(choice.env, where="the verifier's variables", environ=place.environ)
    grading = Grading(
        tests=() if bundled else step.tests,
        workdir=workdir,
        script=step.test_script or "test.sh",
        bundled=bundled,
        env={**env, **extra},
        user=user_text(table.user),
        seconds=seconds,
        whole=whole,
    )
    logs = _Logs(sandbox, target, record)
    longest = None if seconds is None else seconds + _GRACE
    async with finally_do(logs.take_once), limit(longest, lambda: _too_long(seconds)):
        with record.output(logs.target / STDOUT) as output:
            found = await grade(sandbox, grading, output, logs.take)
    graded.rewards = found.rewards
    graded.notes += found.notes


class _Logs:
    """The verifier's logs, taken out once; the reward files are among them."""

    def __init__(self, sandbox: Sandbox, target: Path, record: TrialRecord) -> None:
        self.target = target
        self.taken = False
        self._sandbox = sandbox
        self._record = record
        self._found: RewardFiles | None = None

    async def take(self) -> RewardFiles | None:
        """Take the logs out; the reward files, if they came whole and as what they should be."""
        await take_logs(self._sandbox, VERIFIER_LOGS, self.target, self._record, self._look)
        self.taken = True
        return self._found

    async def take_once(self) -> None:
        if not self.taken:
            await self.take()

    def _look(self, incoming: Tree, left_out: list[str]) -> None:
        if len(left_out) < SKIPPED and not any("reward." in name for name in left_out):
            self._found = RewardFiles.in_copy(incoming)


def _too_long(seconds: float | None) -> VerifierError:
    return VerifierError(f"the verifier took longer than {seconds or 0:g} s", code="verifier_timeout")


def _keeps_processes(spec: TrialSpec) -> bool:
    own = spec.task.config.metadata.get("pier")
    wanted = not isinstance(own, dict) or own.get("keep_processes") is not False
    return wanted and spec.verifier.keep_processes


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
