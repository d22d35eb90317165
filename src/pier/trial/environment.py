"""Sandboxes of a task: `open_environment` starts the one that an agent or a person works in.

It can be graded any number of times (`pier.trial.verify.grade`). Its `SandboxStarter` starts further sandboxes for
grading, with the same image, limits, services and log.
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
from pier.sandbox.contract import Change, Mount, Result, Sandbox, SandboxSpec
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
"""Directory of the services' logs in the directory of a trial."""
_NOT_CONTENT = ("Dockerfile", ".dockerignore", COMPOSE_NAME)
_PLACEHOLDER = ".gitkeep"
"""File that keeps an empty directory in git."""

T = TypeVar("T")
GetMounts = Callable[[], Awaitable[Iterable[Mount]]]


@dataclass(frozen=True, slots=True)
class SandboxStarter:
    """Starts the sandboxes of one task, for the agent and for grading. `factor` multiplies the task's time limit."""

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
        """Variables for templates."""
        return self.services.environ

    @property
    def build_seconds(self) -> float:
        """Time limit for getting an image, starting a sandbox or setting up a step."""
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
        """Start a sandbox with the directories and files of every task, and yield it with its working directory.

        `suffix` is appended to its name; `watch` receives the decisions of its network policy; `image` is a snapshot
        that has the files already. Templates of variables are filled in here, so their values exist in the sandbox
        only. The directories of the task and the trial are hidden, also from mounts. With `bare` nothing is added to
        the image. `room` is added to the disk limit."""

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
    """A running sandbox of a task. `before` are the changes from the image at the start of the current step, which
    grading compares with; None if the backend cannot list them."""

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
        """Prepare the sandbox for a step: empty the conventional directories, add the step's files, and run its set-up
        script and its health check."""
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
    """Start a sandbox of `task` with the task's files and wait until it is healthy. It ends with the block.

    Tasks that the backend cannot run or enforce are refused first. `network` replaces the task's own network plan.
    `get_mounts` is called for further mounts once the image is available. `factor` multiplies the task's time limit.
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
    """The secrets in the variables of a task, without those whose variables are missing."""
    tables = [task.config.environment.env, task.config.solution.env]
    for step in task.steps:
        tables += [step.verifier.env, step.verifier_environment.table.env]
    return [value for table in tables for value in secret_values(table, environ)]


class ServiceLogs:
    """The output of services: one file for each below a directory of the trial."""

    def __init__(self, directory: Path, record: TrialRecord) -> None:
        self._directory = directory
        self._record = record
        self._files: dict[Path, OutputFile] = {}

    def of(self, group: str) -> Callable[[str, bytes], None]:
        """The output callback for one group of services; the agent's group is empty."""

        def keep(service: str, data: bytes) -> None:
            path = self._directory / group / f"{service}.log"
            if path not in self._files:
                self._files[path] = self._record.output(path).__enter__()
            self._files[path]("stdout", data)

        return keep

    def close(self) -> None:
        """Flush and close the files. Idempotent."""
        while self._files:
            self._files.popitem()[1].__exit__()


async def _add_files(sandbox: Sandbox, asked: str | None, content: Path | None) -> str:
    """Create the conventional directories and the `asked` working directory, upload the files that are not in the
    image, and return the working directory."""
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
        """The files that define the image, which are not content at the top level."""
        return set(names) & set(_NOT_CONTENT) if Path(directory) == content else set()

    with tempfile.TemporaryDirectory(prefix="pier-content.") as name:
        staged = Path(name) / "content"
        await asyncio.to_thread(shutil.copytree, content, staged, symlinks=True, ignore=left_out)
        await sandbox.upload(staged, workdir)
    return workdir


async def prepare_step(starter: SandboxStarter, index: int, sandbox: Sandbox, workdir: str) -> None:
    """Upload a step's files to the working directory, run its set-up script and wait for its health check."""
    step = starter.task.steps[index]
    user = user_text(step.agent.user)
    if step.workdir is not None:
        await sandbox.upload(step.workdir, workdir)
        if (step.workdir / "setup.sh").is_file():
            script = f"{workdir.rstrip('/')}/setup.sh"
            result = await sandbox.exec(["bash", script], cwd=workdir, user=user, timeout=starter.build_seconds)
            if not result.ok:
                message = f"step {step.name!r}: setup.sh {ending(result)}: {result.error_text[-500:]}"
                raise TaskError(message, code="step_setup")
    if step.healthcheck is not None:
        await wait_until_healthy(sandbox, step.healthcheck, cwd=workdir, user=user)


def ending(result: Result) -> str:
    """The outcome of a command that failed."""
    return "took too long" if result.timed_out else f"ended with exit code {result.exit_code}"


async def wait_until_healthy(sandbox: Sandbox, check: Healthcheck, *, cwd: str, user: str | None = None) -> None:
    """Return once the check's command succeeds. `SandboxError` with code `healthcheck` if it fails too often."""
    start_end = time.monotonic() + check.start_period_sec
    failures = 0
    while True:
        starting = time.monotonic() < start_end
        result = await sandbox.exec(["/bin/sh", "-c", check.command], cwd=cwd, user=user, timeout=check.timeout_sec)
        if result.ok:
            return
        failures += not starting
        if not starting and failures >= check.retries:
            failure = f"{check.command!r} {ending(result)}: {result.error_text[-400:]}"
            message = f"the health check failed {failures} times: {failure}"
            raise SandboxError(message, code="healthcheck", blame="task")
        await asyncio.sleep(check.start_interval_sec if starting else check.interval_sec)
