"""The verify phase: in the agent's sandbox after it was secured, or in a fresh one that gets the artifacts only."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from pier.errors import SandboxError, VerifierError
from pier.network.decision import OnDecision
from pier.network.policy import NONE, NetworkPolicy
from pier.redact import Redactor
from pier.sandbox.contract import LOST, Change, Mount, Sandbox
from pier.sandbox.tree.pack import SKIPPED
from pier.task import Step, resolve_env
from pier.tree import Tree
from pier.trial.agents import Deadline, user_text
from pier.trial.clock import limit
from pier.trial.collect import Collected, hand_over, take_logs
from pier.trial.environment import Room, agent_room, furnish, verifier_room
from pier.trial.health import prepare_step, wait_until_healthy
from pier.trial.model import GradingRun, Integrity, IntegrityNote
from pier.trial.network import StepNetwork
from pier.trial.outcome import finally_do
from pier.trial.record import TrialRecord
from pier.trial.spec import TrialSpec
from pier.verifier import Grading, Note, RewardFiles, Rewards, grade, look_again, secure
from pier.verifier.folders import VERIFIER_LOGS

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
    step: Step,
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
