"""`pier verify`: the task's verifier on the present state of a workspace, as a trial below `.pier/trials`.

The tests run in a separate sandbox that starts like the workspace's and gets its files: those of the directory,
and what changed elsewhere. So they never dirty the work, and what runs in the workspace goes on. The task is read again
each time, so an edited test counts at once. `in_place` runs them in the workspace's own sandbox instead, for tests that
need what runs there.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pier import __version__
from pier.errors import SandboxError, UsageError, WorkspaceError
from pier.image.model import Image, OnProgress
from pier.redact import Redactor
from pier.sandbox.contract import Change
from pier.secret import secret_values
from pier.task import Task
from pier.trial.environment import TaskSandbox, open_environment, task_secrets
from pier.trial.images import ImageRequest, TrialImages
from pier.trial.plan import agent_plan
from pier.trial.record import Clock, TrialRecord, now, task_reference, trial_config, trial_lock
from pier.trial.result import (
    AgentInfo,
    PierInfo,
    TrialResult,
    VerifierResult,
    captured,
    exception_info,
    judge_as_harbor,
)
from pier.trial.spec import AgentChoice, SandboxChoice, TrialServices, TrialSpec
from pier.trial.verify import grade
from pier.workspace import state
from pier.workspace.live import DEFAULT_WORKDIR, LiveWorkspace, in_directory, workspace_task
from pier.workspace.workspace import PIER, TASK, Workspace, new_directory

STDOUT = "verifier/test-stdout.txt"
_CHUNK = 1 << 16
_LOOK = 0.1
"""Seconds between two looks at the tests' output."""


@dataclass(frozen=True, slots=True)
class VerifyOrder:
    """The step to verify, and the session whose trajectory is saved. `session_dir` is a path of this machine."""

    step: str | None = None
    in_place: bool = False
    agent: str | None = None
    session: str | None = None
    session_dir: Path | None = None
    trial_dir: Path | None = None

    @classmethod
    def of(cls, request: Mapping[str, Any]) -> VerifyOrder:
        """The order of a request: strings and flags by name."""
        given: dict[str, Any] = {name: request.get(name) for name in ("step", "agent", "session")}
        given |= {name: Path(request[name]) for name in ("session_dir", "trial_dir") if request.get(name)}
        return cls(**given, in_place=bool(request.get("in_place")))


@dataclass(frozen=True, slots=True)
class Verification:
    """The facts of a trial that `pier verify` prints."""

    directory: str
    rewards: dict[str, float] | None
    error: dict[str, str | None] | None
    notes: list[str]
    warnings: list[str]
    has_verdict: bool


async def verify(
    workspace: Workspace,
    services: TrialServices,
    order: VerifyOrder,
    say: Callable[[str], None],
    live: LiveWorkspace | None = None,
    on_output: Callable[[bytes], None] | None = None,
) -> Verification:
    """Grade the workspace. The result is written last. `live` is None in host mode; `on_output` gets what the tests
    print while they run."""
    if workspace.config.task_path is None:
        raise WorkspaceError(
            "this workspace has no task, so there is nothing to verify",
            hint="pier capture saves the trajectory",
            code="no-task",
        )
    task = workspace_task(workspace, verify=True)
    index = _step_index(task, order.step)
    directory = order.trial_dir or new_directory(workspace.trials)
    environ = services.environ or {}
    own = [*secret_values(workspace.environment(), environ, given=True), *task_secrets(task, environ)]
    if live is None:
        from pier.workspace.capture import known_secrets

        own += known_secrets(environ, workspace)
    redactor = Redactor(own)
    verification = _Verification(workspace, services, order, live, task, index, directory, redactor, say)
    async with _tailing(directory / STDOUT, on_output):
        return _verdict(directory, await verification.run())


def _verdict(directory: Path, result: TrialResult) -> Verification:
    error = result.exception_info
    return Verification(
        str(directory),
        dict(result.rewards) if result.rewards is not None else None,
        {"code": error.code, "message": error.exception_message} if error else None,
        [note.detail for note in result.integrity.notes] if result.integrity else [],
        list(result.pier.warnings) if result.pier else [],
        result.has_verdict,
    )


@asynccontextmanager
async def _tailing(path: Path, on_output: Callable[[bytes], None] | None) -> AsyncIterator[None]:
    """Pass on whole lines that are added to a file, and the rest at the end."""
    if on_output is None:
        yield
        return
    at = 0

    def read(*, last: bool = False) -> None:
        nonlocal at
        with suppress(OSError), path.open("rb") as stream:
            stream.seek(at)
            while data := stream.read(_CHUNK):
                data = data if last else data[: data.rfind(b"\n") + 1]
                if not data:
                    return
                at += len(data)
                stream.seek(at)
                on_output(data)

    async def follow() -> None:
        while True:
            await asyncio.sleep(_LOOK)
            read()

    following = asyncio.create_task(follow())
    try:
        yield
    finally:
        following.cancel()
        read(last=True)


def _step_index(task: Task, name: str | None) -> int:
    if name is None:
        return 0
    names = [step.name for step in task.steps]
    if name not in names:
        known = ", ".join(filter(None, names)) or "none: the task has no steps"
        raise UsageError(f"unknown step {name!r}; the task has: {known}", code="unknown-step")
    return names.index(name)


@dataclass(slots=True)
class _Verification:
    workspace: Workspace
    services: TrialServices
    order: VerifyOrder
    live: LiveWorkspace | None
    task: Task
    index: int
    directory: Path
    redactor: Redactor
    say: Callable[[str], None]

    async def run(self) -> TrialResult:
        record = TrialRecord(self.directory, self.redactor)
        record.open()
        clock = Clock(record)
        try:
            spec = self._spec()
            config = self.redactor.value(trial_config(spec, self.services.environ or {}))
            record.write_config(config)
            record.write_lock(trial_lock(spec, config))
            result = self._new_result(spec, config)
            with captured() as failure:
                await self._grade(record, clock, result)
            if failure.error is not None:
                result.exception_info = exception_info(failure.error, clock.current, self.redactor)
                record.write_exception(result.exception_info.exception_traceback)
                record.log(f"error: {failure.error}")
            with captured() as failure:
                await self._add_trajectory(result, record)
            if failure.error is not None:
                reason = str(failure.error).replace(str(self.order.session_dir), "--session-dir")
                record.warn(f"no trajectory is saved: {reason}")
            self._seal(result, record, clock)
        finally:
            record.close()
        return result

    def _spec(self) -> TrialSpec:
        config = self.workspace.config
        order = self.order
        name = config.agents[0] if config.agents else "nop"
        if order.agent and (order.session_dir or self.workspace.session(order.session, order.agent)):
            name = order.agent
        choice = SandboxChoice(backend=config.backend, image=config.image)
        return TrialSpec(
            self.directory.name, self.task, self.directory, AgentChoice(name, config.model), sandbox=choice
        )

    def _new_result(self, spec: TrialSpec, config: dict[str, object]) -> TrialResult:
        return TrialResult(
            task_name=self.task.name,
            trial_name=spec.name,
            trial_uri=self.directory.resolve().as_uri(),
            task_id=self.redactor.value(task_reference(self.task.origin)),
            source=self.task.origin.source,
            task_checksum=self.task.digest.removeprefix("sha256:"),
            config=config,
            agent_info=AgentInfo(name=spec.agent.name),
            environment_type=self.services.backend.name,
            started_at=now(),
        )

    async def _grade(self, record: TrialRecord, clock: Clock, result: TrialResult) -> None:
        in_place = self.order.in_place and self.live is not None
        opened = self._in_place(record) if in_place else self._copy(record, clock)
        async with opened as environment:
            with clock.phase("verify") as timing:
                graded = await grade(environment, self.directory, index=self.index, last=not in_place)
            result.verifier = timing
            result.verifier_environment_mode = self.task.steps[self.index].verifier_mode
            result.integrity = graded.integrity(self.redactor)
            if graded.rewards is not None:
                result.verifier_result = VerifierResult(rewards=dict(graded.rewards))
            if graded.error is not None:
                raise graded.error

    @asynccontextmanager
    async def _in_place(self, record: TrialRecord) -> AsyncIterator[TaskSandbox]:
        assert self.live is not None
        environment = self.live.environment
        task = in_directory(self.task, environment.workdir)
        record.image = environment.record.image
        yield replace(environment, starter=replace(environment.starter, task=task, record=record))
        await self.live.adopt()

    @asynccontextmanager
    async def _copy(self, record: TrialRecord, clock: Clock) -> AsyncIterator[TaskSandbox]:
        """A sandbox that starts as the workspace's did and gets what is in that now."""
        live, task = self.live, self.task
        services, config = self.services, self.workspace.config
        choice = SandboxChoice(backend=services.backend.name, image=config.image)
        image = live.environment.record.image if live is not None else None
        if config.workdir and (image is None or image.config.workdir != config.workdir):
            task = in_directory(task, config.workdir)
        if image is not None:
            request = agent_plan(task, choice, services.environ).image
            services = replace(services, images=_SameImage(services.images, request, image))
        name = f"verify-{config.id}"
        opened = open_environment(task, services, record, name=name, choice=choice, clock=clock, on_progress=self.say)
        async with opened as environment:
            environment = _with_directory(environment)
            await environment.begin_step(self.index)
            with clock.phase("setup"):
                if live is not None:
                    await _copy_changes(live, environment)
                await self._copy_files(environment)
            yield environment

    async def _copy_files(self, environment: TaskSandbox) -> None:
        sandbox, workdir, live = environment.sandbox, environment.workdir, self.live
        await state.clear_directory(sandbox, workdir)
        if live is not None and not self.workspace.config.mounted:
            await sandbox.put_tar(live.sandbox.get_tar(workdir), workdir)
            return
        owner = sandbox.spec.image.config.user or None
        await sandbox.upload(self.workspace.root, workdir, leave_out=(PIER, TASK), owner=owner)

    async def _add_trajectory(self, result: TrialResult, record: TrialRecord) -> None:
        from pier.workspace.capture import capture_session, nothing_found

        order, workspace = self.order, self.workspace
        found = await asyncio.to_thread(
            capture_session,
            workspace,
            self.directory / "agent",
            agent=order.agent,
            session=order.session,
            session_dir=order.session_dir,
            redactor=self.redactor,
        )
        if found is not None:
            found.add_to(result)
        elif order.agent or order.session:
            missing = nothing_found(workspace, workspace.root, order.agent, order.session)
            record.warn(f"no trajectory is saved: {missing}")

    def _seal(self, result: TrialResult, record: TrialRecord, clock: Clock) -> None:
        judge_as_harbor(result)
        result.finished_at = now()
        image = record.image
        result.pier = PierInfo(
            version=__version__,
            backend=self.services.backend.name,
            image=image.reference if image else None,
            image_digest=image.digest if image else None,
            task_digest=self.task.digest,
            phases=dict(clock.seconds),
            warnings=list(record.warnings),
            network_refused=dict(record.refused.most_common(100)),
        )
        record.log(f"rewards {result.rewards}")
        record.write_result(result)


def _with_directory(environment: TaskSandbox) -> TaskSandbox:
    """In host mode the working directory is not known before the image is."""
    if environment.workdir != "/":
        return environment
    task = in_directory(environment.task, DEFAULT_WORKDIR)
    return replace(environment, workdir=DEFAULT_WORKDIR, starter=replace(environment.starter, task=task))


async def _copy_changes(live: LiveWorkspace, environment: TaskSandbox) -> None:
    """Bring what changed outside of the mounted directories."""
    changes = await live.sandbox.changes()
    if changes is None or _same(changes, live.environment.before):
        return
    with tempfile.TemporaryDirectory(prefix="pier-verify.") as name:
        try:
            await state.keep(live.sandbox, Path(name) / "state")
            await state.restore(environment.sandbox, Path(name) / "state")
        except SandboxError as error:
            environment.record.warn(f"changes outside of the workspace are not part of this verification: {error}")


def _same(changes: Sequence[Change], before: Sequence[Change] | None) -> bool:
    return before is not None and {(c.path, c.kind, c.mark) for c in changes} == {
        (c.path, c.kind, c.mark) for c in before
    }


class _SameImage(TrialImages):
    """The images of the services, with the workspace's own in place of the task's: a Dockerfile that was edited counts
    from the next start on."""

    def __init__(self, images: TrialImages, request: ImageRequest, image: Image) -> None:
        self._images = images
        self._request = request
        self._image = image

    async def get(self, request: ImageRequest, on_progress: OnProgress | None = None) -> Image:
        return self._image if request == self._request else await self._images.get(request, on_progress)
