"""The verify phase: in the agent's sandbox after it was secured, or in a fresh one that gets the artifacts only."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from pier.errors import VerifierError
from pier.network.policy import NONE, NetworkPolicy
from pier.sandbox.contract import Change, Sandbox
from pier.sandbox.tree.pack import SKIPPED
from pier.task import Step, resolve_env
from pier.tree import Tree
from pier.trial.agents import Deadline, user_text
from pier.trial.clock import limit
from pier.trial.collect import Collected, hand_over, take_logs
from pier.trial.environment import Room, agent_room, furnish, verifier_room
from pier.trial.model import Integrity, IntegrityNote
from pier.trial.outcome import finally_do
from pier.trial.record import TrialRecord
from pier.trial.redact import Redactor
from pier.trial.spec import TrialSpec
from pier.verifier import Grading, Note, RewardFiles, Rewards, grade, secure
from pier.verifier.folders import VERIFIER_LOGS

STDOUT = "test-stdout.txt"
_GRACE = 120.0
"""Seconds beyond the verifier's own limit for bringing tests in and logs out."""

StartRoom = Callable[[Room, NetworkPolicy, str], Awaitable[Sandbox]]


@dataclass(slots=True)
class Graded:
    """What grading found out, also when it failed half-way."""

    mode: str
    rewards: Rewards | None = None
    compared: bool = False
    notes: list[Note] = field(default_factory=list)

    def integrity(self, redactor: Redactor) -> Integrity:
        notes = [
            IntegrityNote(
                kind=n.kind, detail=n.detail, path=redactor.text(n.path) if n.path else None, stopped=n.stopped
            )
            for n in self.notes
        ]
        return Integrity(mode=self.mode, compared=self.compared, notes=notes)


@dataclass(frozen=True, slots=True)
class GradingPlace:
    """What grading needs of the trial: its spec and files, and how to start another sandbox."""

    spec: TrialSpec
    record: TrialRecord
    environ: Mapping[str, str]
    start: StartRoom


async def grade_shared(
    place: GradingPlace,
    graded: Graded,
    index: int,
    sandbox: Sandbox,
    before: list[Change] | None,
    workdir: str,
    directory: Path,
) -> None:
    """Grade in the sandbox that the agent worked in."""
    spec = place.spec

    @asynccontextmanager
    async def pristine() -> AsyncIterator[Sandbox]:
        room = replace(agent_room(spec.task, spec.sandbox, place.environ), compose=None)
        async with await place.start(room, NONE, f"{spec.name}-clean") as clean:
            yield clean

    secured = await secure(
        sandbox,
        before=before,
        workdir=workdir,
        pristine=pristine,
        keep_processes=_keeps_processes(spec),
    )
    graded.compared = secured.compared
    graded.notes += secured.notes
    await _grade(place, graded, spec.task.steps[index], sandbox, workdir, directory, bundled=False)


async def grade_separately(
    place: GradingPlace,
    graded: Graded,
    index: int,
    policy: NetworkPolicy,
    collected: list[Collected],
    directory: Path,
) -> None:
    """Grade in a sandbox that the agent never saw. Artifacts come to the paths where the agent left them."""
    spec = place.spec
    step = spec.task.steps[index]
    room = verifier_room(spec.task, index, spec.sandbox, place.environ)
    async with await place.start(room, policy, f"{spec.name}-verifier") as sandbox:
        furnished = await furnish(sandbox, room)
        graded.notes += await hand_over(
            sandbox, collected, directory / "artifacts", workdir=furnished.workdir, record=place.record
        )
        graded.compared = True
        bundled = step.verifier_environment.bundled
        await _grade(place, graded, step, sandbox, furnished.workdir, directory, bundled=bundled)


async def _grade(
    place: GradingPlace,
    graded: Graded,
    step: Step,
    sandbox: Sandbox,
    workdir: str,
    directory: Path,
    *,
    bundled: bool,
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
    )
    logs = _Logs(sandbox, directory / "verifier", record)
    whole = None if seconds is None else seconds + _GRACE
    async with finally_do(logs.take_once), limit(whole, lambda: _too_long(seconds)):
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
    return isinstance(own, dict) and own.get("keep_processes") is True
