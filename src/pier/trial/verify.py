"""Grades a task's sandbox: `grade` runs the tests and, if they give no reward, assigns the blame.

The tests run in the sandbox that the agent worked in, after it was secured, or in a fresh one with its artifacts.

An agent that breaks its tests must get a zero, and one whose tests fail by themselves must not. So tests that gave no
reward run twice more: in a pristine sandbox, without the agent's work, and again in the agent's state.

    pristine     agent's state   outcome
    reward       no reward       the agent broke its own grading: 0 for each key, with a note
    no reward    no reward       no verdict, the task's fault
    either       below 1         that reward, with a note
    either       1 or more       no verdict, a flake: retryable

A second run's reward below 1 counts: an agent could otherwise get another attempt by breaking only the first run.

A fault of the machine, its disk or its network is never the agent's. The pristine run is between the other two, so that
only two outages in a row could be mistaken for the agent's fault.
"""

from __future__ import annotations

import asyncio
import errno
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

from pier.errors import PathError, PierError, SandboxError, StorageError, VerifierError
from pier.network.policy import NONE, Decision, OnDecision
from pier.redact import Redactor
from pier.sandbox.contract import LOST, Change, Sandbox
from pier.sandbox.tar import SKIPPED
from pier.task import TaskStep, resolve_env
from pier.tree import Tree
from pier.trial.agent import phase_seconds
from pier.trial.collect import Collected, collect, hand_over, seal_artifacts, space_for, take_logs
from pier.trial.config import VerifierConfig
from pier.trial.environment import TaskSandbox, prepare_step, wait_until_healthy
from pier.trial.plan import StepNetwork, agent_plan, pier_setting, verifier_plan
from pier.trial.record import TrialRecord, limit
from pier.trial.result import GradingRun, Integrity, captured, finally_do
from pier.trial.spec import user_text
from pier.verifier.changes import VERIFIER_LOGS, Note
from pier.verifier.grade import RewardFiles, Rewards, TestPlan, run_tests
from pier.verifier.secure import look_again, secure

STDOUT = "test-stdout.txt"
_GRACE = 120.0
"""Seconds beyond the verifier's time limit for uploading tests and taking logs."""


@dataclass(slots=True)
class Graded:
    """The result of grading, also if it failed: `error` is why there is no verdict."""

    mode: str
    rewards: Rewards | None = None
    error: Exception | None = None
    compared: bool = False
    notes: list[Note] = field(default_factory=list)
    runs: list[GradingRun] = field(default_factory=list)
    starting: bool = False
    """A sandbox without the agent's work is being started, so the agent is not to blame for a failure."""

    def integrity(self, redactor: Redactor) -> Integrity:
        notes = [
            replace(note, detail=redactor.text(note.detail), path=redactor.text(note.path) if note.path else None)
            for note in self.notes
        ]
        return Integrity(mode=self.mode, compared=self.compared, notes=notes, runs=self.runs)


async def grade(
    environment: TaskSandbox,
    directory: Path,
    *,
    index: int = 0,
    settings: VerifierConfig | None = None,
    factor: float = 1.0,
    collected: Sequence[Collected] | None = None,
    last: bool = False,
) -> Graded:
    """Grade the present state of `environment` by the tests of a step, as they are on disk now. Logs go below
    `directory`.

    It can be called any number of times: it restores the network policy and, unless the sandbox is not used again
    (`last`), leaves its processes running. Files that were planted for the verifier are removed. `collected` are the
    artifacts that are already in `directory / "artifacts"`; without it they are collected now for a separate verifier.
    `factor` multiplies the verifier's time limit.
    """
    step, artifacts = environment.task.steps[index], directory / "artifacts"
    separate, settings = step.verifier_mode == "separate", settings or VerifierConfig()
    graded = Graded(step.verifier_mode)
    with captured() as failure:
        async with (
            finally_do(partial(environment.switch_network, environment.network)),
            finally_do(partial(seal_artifacts, artifacts, environment.record)),
        ):
            if separate and collected is None:
                collected = await collect(environment, index, artifacts)
            kind = _SeparateTests if separate else _SharedTests
            tests = kind(environment, index, settings, factor, last, tuple(collected or ()), artifacts)
            try:
                await _reach_verdict(tests, graded, directory, environment.record)
            except BaseException:
                graded.rewards = None
                raise
    graded.error = failure.error
    if not (graded.rewards and _is_whole(graded.rewards)) and await environment.sandbox.disk_was_full():
        full = StorageError(
            "the disk of the sandbox was full for a while, which may have made the agent or the tests fail"
        )
        full.__cause__, graded.rewards, graded.error = graded.error, None, full
    return graded


@dataclass(frozen=True, slots=True)
class _Tests(ABC):
    """The tests of one step. Each call is a complete verification, which sets the rewards of `graded` or raises."""

    environment: TaskSandbox
    index: int
    settings: VerifierConfig
    factor: float
    last: bool
    collected: tuple[Collected, ...]
    artifacts: Path

    @property
    def step(self) -> TaskStep:
        return self.environment.task.steps[self.index]

    @property
    def network(self) -> StepNetwork:
        return self.environment.plan.steps[self.index]

    @abstractmethod
    async def in_agents_state(self, graded: Graded, logs: Path) -> None: ...

    @abstractmethod
    async def in_pristine_state(self, graded: Graded, logs: Path, watch: OnDecision) -> None: ...

    async def run(
        self,
        graded: Graded,
        sandbox: Sandbox,
        workdir: str,
        target: Path,
        *,
        bundled: bool = False,
        whole: Sandbox | None = None,
    ) -> None:
        """Run the tests in a secured or fresh sandbox, and take the logs out to `target`."""
        table, settings, environ = self.step.verifier, self.settings, self.environment.starter.environ
        seconds = phase_seconds(settings.override_timeout_sec, table.timeout_sec, settings.max_timeout_sec, self.factor)
        env = resolve_env(table.env, where="verifier.env", environ=environ)
        extra = resolve_env(settings.env, where="the verifier's variables", environ=environ)
        plan = TestPlan(
            tests=() if bundled else self.step.tests,
            workdir=workdir,
            script=self.step.test_script or "test.sh",
            bundled=bundled,
            env={**env, **extra},
            user=user_text(table.user),
            seconds=seconds,
            whole=whole,
        )
        logs = _Logs(sandbox, target, self.environment.record)
        deadline = None if seconds is None else seconds + _GRACE
        message = f"the verifier took longer than {seconds or 0:g} s"
        async with (
            finally_do(logs.take_once),
            limit(deadline, lambda: VerifierError(message, code="verifier_timeout")),
        ):
            with self.environment.record.output(logs.target / STDOUT) as output:
                verdict = await run_tests(sandbox, plan, output, logs.take)
        graded.rewards = verdict.rewards
        graded.notes += verdict.notes


class _SharedTests(_Tests):
    """Tests that run in the agent's sandbox."""

    async def in_agents_state(self, graded: Graded, logs: Path) -> None:
        """Grade the agent's sandbox. The verifier's directories are emptied first, so it can be graded again."""
        environment = self.environment
        await environment.switch_network(self.network.verifier)
        await self._grade(graded, environment.sandbox, environment.before, environment.workdir, logs)

    async def in_pristine_state(self, graded: Graded, logs: Path, watch: OnDecision) -> None:
        """Grade a sandbox of the same image, prepared for the step, in which no agent worked."""
        starter, baseline = self.environment.starter, self.environment.plan.baseline
        plan = agent_plan(starter.task, starter.choice, starter.environ)
        async with starter.open(plan, baseline, "pristine", starter.choice.mounts, watch) as (clean, workdir):
            if plan.table.healthcheck is not None:
                await wait_until_healthy(clean, plan.table.healthcheck, cwd=workdir)
            for index in range(self.index + 1):
                await prepare_step(starter, index, clean, workdir)
            if self.network.verifier != baseline:
                await clean.set_network(self.network.verifier)
            await self._grade(graded, clean, await clean.changes(), workdir, logs)

    async def _grade(
        self, graded: Graded, sandbox: Sandbox, before: list[Change] | None, workdir: str, logs: Path
    ) -> None:
        starter = self.environment.starter

        @asynccontextmanager
        async def pristine() -> AsyncIterator[Sandbox]:
            plan = replace(agent_plan(starter.task, starter.choice, starter.environ), compose=None)
            graded.starting = True
            async with starter.open(plan, NONE, "clean", bare=True) as (clean, _):
                graded.starting = False
                yield clean

        keeps = not self.settings.kill_processes and pier_setting(starter.task, "keep_processes") is not False
        for keep in (keeps, False):
            secured = await secure(
                sandbox, before=before, workdir=workdir, pristine=pristine, keep_processes=keep, tests=self.step.tests
            )
            graded.compared = secured.compared
            graded.notes += secured.notes
            whole = sandbox if secured.view is not None and self.last else None
            try:
                async with secured.place(sandbox) as view:
                    await self.run(graded, view, workdir, logs, whole=whole)
                    graded.notes += await look_again(sandbox, secured, workdir)
                return
            except SandboxError as error:
                if secured.view is None or error.code != LOST:
                    raise
                graded.notes.append(Note("processes", f"killed, since the verifier cannot run next to them: {error}"))


class _SeparateTests(_Tests):
    """Tests that run in a new sandbox, which gets the agent's artifacts at their original paths."""

    async def in_agents_state(self, graded: Graded, logs: Path) -> None:
        """Grade the artifacts, in a new sandbox each time."""
        await self._grade(graded, self.collected, "verifier", logs)

    async def in_pristine_state(self, graded: Graded, logs: Path, watch: OnDecision) -> None:
        """Grade without artifacts."""
        await self._grade(graded, (), "pristine", logs, watch)

    async def _grade(
        self, graded: Graded, collected: Sequence[Collected], name: str, logs: Path, watch: OnDecision | None = None
    ) -> None:
        starter = self.environment.starter
        plan = verifier_plan(starter.task, self.index, starter.choice, starter.environ)
        graded.starting = True
        room = await asyncio.to_thread(space_for, self.artifacts) if collected else 0
        async with starter.open(plan, self.network.verifier, name, watch=watch, room=room) as (sandbox, workdir):
            graded.starting = False
            graded.notes += await hand_over(
                sandbox, collected, self.artifacts, workdir=workdir, record=self.environment.record
            )
            graded.compared = True
            await self.run(graded, sandbox, workdir, logs, bundled=self.step.verifier_environment.bundled)


class _Logs:
    """The verifier's logs, which are taken out once, with the reward files."""

    def __init__(self, sandbox: Sandbox, target: Path, record: TrialRecord) -> None:
        self.target = target
        self.taken = False
        self._sandbox = sandbox
        self._record = record
        self._rewards: RewardFiles | None = None

    async def take(self) -> RewardFiles | None:
        """Take the logs out if they are kept, and return the reward files if they are complete regular files."""
        if self._record.kept:
            await take_logs(self._sandbox, VERIFIER_LOGS, self.target, self._record, self._look)
        self.taken = True
        return self._rewards

    async def take_once(self) -> None:
        if not self.taken:
            await self.take()

    def _look(self, incoming: Tree, left_out: list[str]) -> None:
        if len(left_out) < SKIPPED and not any("reward." in name for name in left_out):
            self._rewards = RewardFiles.in_copy(incoming)


FIRST = "verifier"
LATER = "verifier-runs"
"""Directory of the logs of further runs. It is not below `FIRST`, where the tests choose the names."""

_MACHINE = frozenset(
    {
        *("sandbox_gone", "container_gone", "zygote_gone", "helper_gone", "disk_full", "storage"),
        *("engine", "engine_down", "helper_start", "stop_timeout"),
    }
)
"""Codes of errors that do not depend on the contents of a sandbox."""

_OF_FILES = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError)
_OF_NAMES = frozenset({errno.ELOOP, errno.ENAMETOOLONG})
"""With the above, the errors of reading a tree of files that an agent made."""


@dataclass(frozen=True, slots=True)
class NetworkUse:
    """The destinations that a run tried to reach, and those that were unreachable."""

    tried: set[tuple[str, str, int]] = field(default_factory=set)
    failed: set[tuple[str, str, int]] = field(default_factory=set)

    def note(self, decision: Decision) -> None:
        if not decision.allowed or decision.kind not in ("dns", "tcp"):
            return
        destination = (decision.kind, decision.name, decision.port)
        self.tried.add(destination)
        if decision.outage:
            self.failed.add(destination)


@dataclass(slots=True)
class _Run:
    state: Literal["agent", "pristine"]
    logs: str
    graded: Graded
    network: NetworkUse = field(default_factory=NetworkUse)
    error: Exception | None = None


async def _reach_verdict(tests: _Tests, graded: Graded, directory: Path, record: TrialRecord) -> None:
    """Set the rewards of `graded`, after assigning the blame if the first run gives none. Raise if there is no
    verdict."""
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
    record.log(graded.notes[-1].detail)


def _decide(graded: Graded, first: _Run, pristine: _Run, again: _Run) -> None:
    """Set the rewards of `graded` to those of the second run, or to zeros if the agent broke its grading; else raise
    the error with its blame."""
    error, rewards = first.error, again.graded.rewards
    if rewards is not None and _is_whole(rewards):
        raise VerifierError(
            f"the tests gave no reward and then {rewards} for the same state; the first time: {error}",
            code="verifier_flaky",
            blame="infra",
            retryable=True,
        ) from error
    if lost := network_faults(first.network, pristine.network, again.network, reward=pristine.error is None):
        raise VerifierError(
            f"the tests could not reach {lost}: {error}", code="verifier_network", blame="infra", retryable=True
        ) from error
    if rewards is not None:
        graded.rewards, graded.compared = rewards, again.graded.compared
        graded.notes += again.graded.notes
        detail = f"the tests gave this reward when they ran again; the first time: {error}"
        graded.notes.append(Note("no_reward", detail))
        return
    if pristine.error is not None:
        if isinstance(error, VerifierError) and error.blame == "task":
            raise error
        raise VerifierError(f"the tests could not run: {error}", code=getattr(error, "code", "verifier")) from error
    graded.rewards = dict.fromkeys(pristine.graded.rewards or {}, 0)
    detail = f"the tests give a reward without the agent's work, and none with it, tried twice: {error}"
    graded.notes.append(Note("no_reward", detail))


def _is_whole(rewards: Rewards) -> bool:
    """Whether another run could hardly give more. The key `reward` decides; without it, the smallest value."""
    return rewards.get("reward", min(rewards.values(), default=0)) >= 1


def network_faults(first: NetworkUse, pristine: NetworkUse, again: NetworkUse, *, reward: bool) -> str:
    """The unreachable destinations. Those of the agent's state only count if the tests also try them in the pristine
    run: the agent may have planted attempts that fail. `reward`: the pristine run gave one, so it did not need the
    destinations that it failed to reach."""
    lost = (first.failed | again.failed) & pristine.tried
    lost = lost - pristine.failed if reward else lost | pristine.failed
    return ", ".join(sorted({f"{name}:{port}" if port else name for _, name, port in lost}))


@contextmanager
def _agents_run(run: _Run, record: TrialRecord) -> Iterator[None]:
    """Keep the error of a run in the agent's state, unless no content of a sandbox can have caused it."""
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
    """Keep the error of a run without the agent's work, if the task is to blame."""
    try:
        yield
    except PierError as error:
        run.error = error
        if error.blame != "task":
            raise


def is_machine_fault(error: BaseException | None) -> bool:
    """Whether an error, or a cause of it, is one that files and processes in a sandbox cannot bring about."""
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
