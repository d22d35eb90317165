"""`pier verify`: runs the task's verifier on the current state of a workspace, as a trial below `.pier/trials`.

The tests run in a separate sandbox with the same image, the files of the workspace's directory, and the changes made
elsewhere in its sandbox, so they modify neither the work nor its processes. The task is read again each time, so edited
tests apply at once. `in_place` runs the tests in the workspace's sandbox, for tests that need its processes.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pier.errors import SandboxError, UsageError, WorkspaceError
from pier.redact import Redactor
from pier.sandbox.contract import Change
from pier.secret import secret_values
from pier.task import Task
from pier.trial.collect import restore_state
from pier.trial.config import AgentConfig, EnvironmentConfig
from pier.trial.environment import TaskSandbox, open_environment, task_secrets
from pier.trial.plan import agent_plan
from pier.trial.record import Clock, OutputFile, TrialRecord
from pier.trial.result import StepResult, VerifierResult, captured
from pier.trial.run import TrialRun
from pier.trial.spec import SandboxChoice, TrialServices, TrialSpec
from pier.trial.verify import grade
from pier.workspace import state
from pier.workspace.live import DEFAULT_WORKDIR, LiveWorkspace, in_directory, workspace_task
from pier.workspace.workspace import PIER, TASK, Workspace, new_directory

STDOUT = "verifier/test-stdout.txt"
_LONGEST = 1 << 20
"""Maximum size of a chunk of shown output, and of a buffered line."""


@dataclass(frozen=True, slots=True)
class VerifyOrder:
    """The step to verify, and the session whose trajectory is saved. The directories are absolute paths on this
    machine."""

    step: str | None = None
    in_place: bool = False
    agent: str | None = None
    session: str | None = None
    session_dir: str | None = None
    trial_dir: str | None = None


async def verify(
    workspace: Workspace,
    services: TrialServices,
    order: VerifyOrder,
    say: Callable[[str], None],
    live: LiveWorkspace | None = None,
    on_output: Callable[[bytes], None] | None = None,
) -> dict[str, Any]:
    """Grade the workspace; the facts that `pier verify` prints. `live` is None in host mode; `on_output` receives the
    output of the tests as they run."""
    if workspace.config.task_path is None:
        raise WorkspaceError(
            "this workspace has no task, so there is nothing to verify",
            hint="pier capture saves the trajectory",
            code="no-task",
        )
    task = workspace_task(workspace, verify=True)
    index = _step_index(task, order.step)
    directory = Path(order.trial_dir) if order.trial_dir else new_directory(workspace.trials)
    result = await _Verification(workspace, services, order, task, index, directory, say, live, on_output).run()
    error = result.exception_info
    return {
        "directory": str(directory),
        "rewards": dict(result.rewards) if result.rewards is not None else None,
        "error": {"code": error.code, "message": error.exception_message, "hint": error.hint} if error else None,
        "notes": [note.detail for note in result.integrity.notes] if result.integrity else [],
        "warnings": list(result.pier.warnings) if result.pier else [],
        "has_verdict": result.has_verdict,
    }


class _ShownOutput(OutputFile):
    """An output file that also passes its redacted content to `show`, by whole lines."""

    def __init__(self, path: Path, redactor: Redactor, show: Callable[[bytes], None]) -> None:
        super().__init__(path, redactor)
        self._show, self._line = show, b""

    def _write(self, data: bytes) -> None:
        lines = self._line + data[: self._left]
        super()._write(data)
        end = lines.rfind(b"\n") + 1
        if len(lines) - end > _LONGEST:
            end = len(lines)
        self._line = lines[end:]
        self._show_chunks(lines[:end])

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        self._show_chunks(self._line)

    def _show_chunks(self, data: bytes) -> None:
        with suppress(OSError):  # a client that left does not affect the verdict
            for at in range(0, len(data), _LONGEST):
                self._show(data[at : at + _LONGEST])


class _ShownRecord(TrialRecord):
    """A record that also passes the output of the tests to `show`."""

    show: Callable[[bytes], None] | None = None

    def output(self, path: Path) -> OutputFile:
        if self.show is None or path != self.directory / STDOUT:
            return super().output(path)
        return _ShownOutput(path, self.redactor, self.show)


def _step_index(task: Task, name: str | None) -> int:
    if name is None:
        return 0
    names = [step.name for step in task.steps]
    if name not in names:
        known = ", ".join(filter(None, names)) or "none: the task has no steps"
        raise UsageError(f"unknown step {name!r}; the task has: {known}", code="unknown-step")
    return names.index(name)


class _Verification(TrialRun):
    """A trial that grades the workspace in place of running an agent."""

    def __init__(
        self,
        workspace: Workspace,
        services: TrialServices,
        order: VerifyOrder,
        task: Task,
        index: int,
        directory: Path,
        say: Callable[[str], None],
        live: LiveWorkspace | None,
        show: Callable[[bytes], None] | None,
    ) -> None:
        self.workspace, self.order, self.task, self.index, self.live = workspace, order, task, index, live
        config, environ = workspace.config, services.environ
        agent = config.agents[0] if config.agents else "nop"
        if order.agent and (order.session_dir or workspace.session(order.session, order.agent)):
            agent = order.agent
        secrets = [*secret_values(workspace.environment(), environ, given=True), *task_secrets(task, environ)]
        if live is None:
            from pier.workspace.capture import known_secrets

            secrets += known_secrets(environ, workspace)
        one_step = task.config.model_copy(update={"steps": None})
        spec = TrialSpec(
            directory.name,
            replace(task, steps=(task.steps[index],), config=one_step),
            directory,
            AgentConfig(name=agent, model_name=config.model),
            sandbox=SandboxChoice(EnvironmentConfig(type=config.backend), config.image),
            secrets=tuple(secrets),
        )
        super().__init__(spec, services, None, say)
        self.record = _ShownRecord(directory, self.redactor)
        self.record.show = show
        self.clock = Clock(self.record)

    async def work(self) -> None:
        """Grade, and add the trajectory of a session, without effect on the outcome."""
        outcome = StepResult(step_name="")
        self.outcomes.append(outcome)
        with captured() as grading:
            await self._grade(outcome)
        with captured() as failure:
            await self._add_trajectory(outcome)
        if failure.error is not None:
            reason = str(failure.error).replace(str(self.order.session_dir), "--session-dir")
            self.record.warn(f"no trajectory saved: {reason}")
        if grading.error is not None:
            raise grading.error

    async def _grade(self, outcome: StepResult) -> None:
        in_place = self.order.in_place and self.live is not None
        async with self._in_place() if in_place else self._copy() as environment:
            with self.clock.phase("verify") as outcome.verifier:
                graded = await grade(environment, self.spec.directory, index=self.index, last=not in_place)
            outcome.integrity = graded.integrity(self.redactor)
            if graded.rewards is not None:
                outcome.verifier_result = VerifierResult(rewards=dict(graded.rewards))
            if graded.error is not None:
                raise graded.error

    @asynccontextmanager
    async def _in_place(self) -> AsyncIterator[TaskSandbox]:
        assert self.live is not None
        environment = self.live.environment
        task = in_directory(self.task, environment.workdir)
        self.record.image = environment.record.image
        yield replace(environment, starter=replace(environment.starter, task=task, record=self.record))
        await self.live.adopt()

    @asynccontextmanager
    async def _copy(self) -> AsyncIterator[TaskSandbox]:
        """A sandbox with the workspace's image and its current files."""
        live, task = self.live, self.task
        services, config = self.services, self.workspace.config
        choice = SandboxChoice(image=config.image)
        image = live.environment.record.image if live is not None else None
        if config.workdir and (image is None or image.config.workdir != config.workdir):
            task = in_directory(task, config.workdir)
        if image is not None:
            # An edited Dockerfile takes effect at the next start.
            services.images.known[agent_plan(task, choice, services.environ).image] = image
        name = f"verify-{config.id}"
        opened = open_environment(
            task, services, self.record, name=name, choice=choice, clock=self.clock, on_progress=self.on_progress
        )
        async with opened as environment:
            if environment.workdir == "/":  # in host mode it is not known before the image is
                task = in_directory(environment.task, DEFAULT_WORKDIR)
                starter = replace(environment.starter, task=task)
                environment = replace(environment, workdir=DEFAULT_WORKDIR, starter=starter)
            await environment.begin_step(self.index)
            with self.clock.phase("setup"):
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

    async def _add_trajectory(self, outcome: StepResult) -> None:
        from pier.workspace.capture import capture_session, nothing_found

        order, workspace = self.order, self.workspace
        found = await asyncio.to_thread(
            capture_session,
            workspace,
            self.spec.directory / "agent",
            agent=order.agent,
            session=order.session,
            session_dir=Path(order.session_dir) if order.session_dir else None,
            redactor=self.redactor,
        )
        if found is not None:
            self.result.agent_info = found.agent_info
            outcome.agent_result, outcome.agent_execution = found.result, found.timing
        elif order.agent or order.session:
            missing = nothing_found(workspace, workspace.root, order.agent, order.session)
            self.record.warn(f"no trajectory saved: {missing}")


async def _copy_changes(live: LiveWorkspace, environment: TaskSandbox) -> None:
    """Copy the changes outside of the mounted directories, if there are any since the start."""
    changes, before = await live.sandbox.changes(), live.environment.before
    if changes is None or (before is not None and _marks(changes) == _marks(before)):
        return
    with tempfile.TemporaryDirectory(prefix="pier-verify.") as name:
        try:
            await state.keep(live.sandbox, Path(name) / "state")
            await restore_state(environment.sandbox, Path(name) / "state")
        except SandboxError as error:
            environment.record.warn(f"changes outside of the workspace are not part of this verification: {error}")


def _marks(changes: Sequence[Change]) -> set[tuple[str, str, object]]:
    return {(change.path, change.kind, change.mark) for change in changes}
