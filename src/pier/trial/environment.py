"""Running sandboxes of a task: `open_environment` starts the one that an agent or a person works in.

What is opened here can be worked in for hours and graded any number of times (`pier.trial.verify.grade`). The same
value starts the further sandboxes that grading needs, with the same image, limits, services and log.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from pier.agent.contract import AGENT_LOGS
from pier.errors import SandboxError, TaskError
from pier.image.model import Image, OnProgress
from pier.network.policy import Decision, NetworkPolicy, OnDecision
from pier.sandbox.compose import Compose, Composition
from pier.sandbox.contract import Change, Mount, Sandbox, SandboxSpec
from pier.sandbox.host import refuse_hidden
from pier.secret import secret_values
from pier.task import Task, resolve_env
from pier.task.load import COMPOSE_NAME
from pier.task.model import Healthcheck
from pier.trial.images import ImageRequest
from pier.trial.plan import (
    NetworkPlan,
    SandboxPlan,
    agent_plan,
    check_network,
    check_support,
    plan_network,
    sandbox_limits,
    service_images,
    wanted_gpus,
)
from pier.trial.record import Clock, OutputFile, TrialRecord, limit
from pier.trial.spec import SandboxChoice, TrialServices, user_text
from pier.verifier.changes import ARTIFACTS, LOGS, TESTS, VERIFIER_LOGS
from pier.verifier.secure import make_folders

SERVICES = "services"
"""Where the logs of a task's services are, below the directory of its trial."""
_NOT_CONTENT = ("Dockerfile", ".dockerignore", COMPOSE_NAME)
_PLACEHOLDER = ".gitkeep"
"""Keeps a directory in git that has nothing else in it."""

T = TypeVar("T")
GetMounts = Callable[[], Awaitable[Iterable[Mount]]]


@dataclass(frozen=True, slots=True)
class SandboxStarter:
    """Starts the sandboxes of one task: the one that is worked in, and those that grading needs. `factor` multiplies
    the time that the task allows for that."""

    task: Task
    services: TrialServices
    record: TrialRecord
    name: str
    choice: SandboxChoice
    logs: ServiceLogs
    factor: float = 1.0
    on_progress: OnProgress | None = None
    _images: dict[ImageRequest, Image] = field(default_factory=dict)

    @property
    def environ(self) -> Mapping[str, str]:
        """The variables that templates are filled from."""
        return self.services.environ

    @property
    def build_seconds(self) -> float:
        """How long getting an image, starting a sandbox or setting up a step may take."""
        return self.task.config.environment.build_timeout_sec * self.factor

    async def get_image(self, plan: SandboxPlan) -> Image:
        """The image of a sandbox, fetched or built once."""
        if plan.image not in self._images:
            self._images[plan.image] = await self._in_time(self._fetch(plan.image))
        return self._images[plan.image]

    @asynccontextmanager
    async def open(
        self,
        plan: SandboxPlan,
        network: NetworkPolicy,
        suffix: str = "",
        mounts: Iterable[Mount] = (),
        watch: OnDecision | None = None,
        image: Image | None = None,
        bare: bool = False,
        room: int = 0,
    ) -> AsyncIterator[tuple[Sandbox, str]]:
        """A sandbox with the directories and files that every task may count on, and its working directory. `suffix`
        goes to its name; `watch` sees the decisions of its network policy; `image` is a snapshot that has the files.
        The environment's variables are filled in here and live in the sandbox only. It sees neither the task nor the
        trial, not even by a mount. With `bare` it is as its image is. `room` is space beyond its limit on disk."""

        def note(decision: Decision) -> None:
            self.record.note_network(decision)
            if watch is not None:
                watch(decision)

        name = f"{self.name}-{suffix}" if suffix else self.name
        hidden = (self.task.path, self.record.directory)
        mounts = tuple(mounts)
        refuse_hidden(mounts, hidden)
        env = resolve_env(plan.table.env, where="environment.env", environ=self.environ)
        extra = resolve_env(self.choice.settings.env, where="the run's environment variables", environ=self.environ)
        backend = self.services.backend
        limits = await sandbox_limits(self.task, plan.table, self.choice, backend, self.record)
        spec = SandboxSpec(
            image=image or await self.get_image(plan),
            network=network,
            limits=replace(limits, disk=limits.disk + room) if limits.disk else limits,
            mounts=mounts,
            hidden=(*hidden, *self.choice.hidden),
            env={**env, **extra},
            gpus=wanted_gpus(plan.table, self.choice),
            name=name,
            on_progress=self.report,
            on_decision=note,
            keep=self.choice.keep if not suffix else None,
            compose=plan.compose and await self._in_time(self._compose(plan.compose, plan, name if suffix else "")),
        )
        async with await self._in_time(backend.start(spec)) as sandbox:
            content = None if image else plan.content
            yield sandbox, "" if bare else await _add_files(sandbox, plan.table.workdir, content)

    async def _compose(self, project: Compose, plan: SandboxPlan, group: str) -> Composition:
        images = await service_images(project, plan.image, self._fetch)
        return Composition(project, images, self.logs.of(group))

    async def _fetch(self, request: ImageRequest) -> Image:
        return await self.services.images.get(request, lambda line: self.report(f"image: {line.strip()}"))

    def report(self, line: str) -> None:
        self.record.report(line, self.on_progress)

    async def _in_time(self, work: Awaitable[T]) -> T:
        seconds = self.build_seconds
        message = f"getting the image and starting the sandbox took longer than {seconds:g} s"
        async with limit(seconds, lambda: SandboxError(message, code="environment_timeout")):
            return await work


@dataclass(slots=True)
class TaskSandbox:
    """A running sandbox of a task. `before` is what differed from the image when work on the present step began, which
    is what grading compares with; None if the backend cannot list it."""

    sandbox: Sandbox
    workdir: str
    starter: SandboxStarter
    plan: NetworkPlan
    network: NetworkPolicy
    before: list[Change] | None = None

    @property
    def task(self) -> Task:
        return self.starter.task

    @property
    def record(self) -> TrialRecord:
        return self.starter.record

    async def switch_network(self, policy: NetworkPolicy) -> None:
        if policy != self.network:
            await self.sandbox.set_network(policy)
            self.network = policy

    async def begin_step(self, index: int) -> None:
        """Make the sandbox ready for work on a step: what earlier steps left in the conventional directories goes, the
        step's own files come, its set-up script and its health check run."""
        if index:
            for path in (TESTS, VERIFIER_LOGS, AGENT_LOGS, ARTIFACTS):
                await self.sandbox.remove(path)
            await make_folders(self.sandbox, {VERIFIER_LOGS: 0o777, AGENT_LOGS: 0o777, ARTIFACTS: 0o777})
        if index or self.starter.choice.snapshot is None:
            await prepare_step(self.starter, index, self.sandbox, self.workdir)
        self.before = await self.sandbox.changes()


@asynccontextmanager
async def open_environment(
    task: Task,
    services: TrialServices,
    record: TrialRecord,
    *,
    name: str | None = None,
    choice: SandboxChoice | None = None,
    network: NetworkPlan | None = None,
    get_mounts: GetMounts | None = None,
    factor: float = 1.0,
    clock: Clock | None = None,
    on_progress: OnProgress | None = None,
) -> AsyncIterator[TaskSandbox]:
    """A running, healthy sandbox of `task` with the files of the task in it; it ends with the context.

    What the backend cannot run or enforce is refused before anything starts. `network` is the plan of the phases if it
    is not the task's own. `get_mounts` gives further mounts; it is called when the image is there. `factor` multiplies
    the time that the task allows for the start.
    """
    choice, clock, backend = choice or SandboxChoice(), clock or Clock(record), services.backend
    logs = ServiceLogs(record.directory / SERVICES, record)
    starter = SandboxStarter(task, services, record, name or task.short_name, choice, logs, factor, on_progress)
    async with AsyncExitStack() as stack:
        stack.callback(logs.close)
        with clock.phase("prepare"):
            await check_support(task, backend, choice)
            network = network or plan_network(
                task.config.environment, task.steps, override=choice.network, hosts=choice.hosts
            )
            check_network(network, await backend.capabilities(), backend.name)
            for key in task.unknown:
                record.warn(f"task.toml: {key}")
            plan = agent_plan(task, choice, starter.environ)
            for note in plan.compose.notes if plan.compose else ():
                record.warn(note)
            record.image = await starter.get_image(plan)
        with clock.phase("start"):
            mounts = (*(await get_mounts() if get_mounts else ()), *choice.mounts)
            opened = starter.open(plan, network.baseline, mounts=mounts, image=choice.snapshot)
            sandbox, workdir = await stack.enter_async_context(opened)
        with clock.phase("health"):
            if plan.table.healthcheck is not None:
                await wait_until_healthy(sandbox, plan.table.healthcheck, cwd=workdir)
        yield TaskSandbox(sandbox, workdir, starter, network, network.baseline)


def task_secrets(task: Task, environ: Mapping[str, str]) -> list[str]:
    """The secrets in the variables of a task, as far as they can be filled in."""
    tables = [task.config.environment.env, task.config.solution.env]
    for step in task.steps:
        tables += [step.verifier.env, step.verifier_environment.table.env]
    return [value for table in tables for value in secret_values(table, environ)]


class ServiceLogs:
    """The output of services, kept below a directory of the trial: one file for each service."""

    def __init__(self, directory: Path, record: TrialRecord) -> None:
        self._directory = directory
        self._record = record
        self._files: dict[Path, OutputFile] = {}

    def of(self, group: str) -> Callable[[str, bytes], None]:
        """Where the services of one group print to; `group` is empty for those of the agent."""

        def keep(service: str, data: bytes) -> None:
            path = self._directory / group / f"{service}.log"
            if path not in self._files:
                self._files[path] = self._record.output(path).__enter__()
            self._files[path]("stdout", data)

        return keep

    def close(self) -> None:
        """Write what was held back. Idempotent."""
        while self._files:
            self._files.popitem()[1].__exit__()


async def _add_files(sandbox: Sandbox, asked: str | None, content: Path | None) -> str:
    """Make the directories that every task may count on, and bring the files that the image does not hold; the working
    directory, which is made if it is `asked` for."""
    workdir = asked or sandbox.spec.workdir or sandbox.spec.image.config.workdir or "/"
    folders = {LOGS: 0o755, AGENT_LOGS: 0o777, VERIFIER_LOGS: 0o777, ARTIFACTS: 0o777}
    if asked and asked != "/":
        folders[asked] = 0o755
    await make_folders(sandbox, folders)
    names = set(os.listdir(content)) if content is not None else set[str]()
    if content is None or not names - {*_NOT_CONTENT, _PLACEHOLDER}:
        return workdir
    if not names & set(_NOT_CONTENT):
        await sandbox.upload(content.resolve(), workdir)
        return workdir

    def left_out(directory: str, names: list[str]) -> set[str]:
        """Files that describe how to build the image; these count at the top only."""
        return set(names) & set(_NOT_CONTENT) if Path(directory) == content else set()

    with tempfile.TemporaryDirectory(prefix="pier-content.") as name:
        staged = Path(name) / "content"
        await asyncio.to_thread(shutil.copytree, content, staged, symlinks=True, ignore=left_out)
        await sandbox.upload(staged, workdir)
    return workdir


async def prepare_step(starter: SandboxStarter, index: int, sandbox: Sandbox, workdir: str) -> None:
    """Bring a step's files into the working directory, run its set-up script and wait for its health check."""
    step = starter.task.steps[index]
    user = user_text(step.agent.user)
    if step.workdir is not None:
        await sandbox.upload(step.workdir, workdir)
        if (step.workdir / "setup.sh").is_file():
            script = f"{workdir.rstrip('/')}/setup.sh"
            result = await sandbox.exec(["bash", script], cwd=workdir, user=user, timeout=starter.build_seconds)
            if not result.ok:
                how = "took too long" if result.timed_out else f"ended with exit code {result.exit_code}"
                raise TaskError(f"step {step.name!r}: setup.sh {how}: {result.error_text[-500:]}", code="step_setup")
    if step.healthcheck is not None:
        await wait_until_healthy(sandbox, step.healthcheck, cwd=workdir, user=user)


async def wait_until_healthy(sandbox: Sandbox, check: Healthcheck, *, cwd: str, user: str | None = None) -> None:
    """Return when the check's command succeeds; `SandboxError` with code `healthcheck` when it does not."""
    begun = time.monotonic()
    failures = 0
    while True:
        starting = time.monotonic() < begun + check.start_period_sec
        result = await sandbox.exec(["/bin/sh", "-c", check.command], cwd=cwd, user=user, timeout=check.timeout_sec)
        if result.ok:
            return
        if not starting:
            failures += 1
            if failures >= check.retries:
                how = "took too long" if result.timed_out else f"ended with exit code {result.exit_code}"
                raise SandboxError(
                    f"the health check failed {failures} times: {check.command!r} {how}: {result.error_text[-400:]}",
                    code="healthcheck",
                    blame="task",
                )
        await asyncio.sleep(check.start_interval_sec if starting else check.interval_sec)
