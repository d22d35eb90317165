"""From a task's `[environment]` to a running sandbox: which image, which limits, which files.

What a trial lends to a task of several services: the variables of its file, the images, a place for its logs.

Which network each phase of a trial has. A policy that the backend cannot enforce is refused before anything runs.

What is done in a sandbox before a step begins: its files, its set-up script, its health check.

Health checks have the meaning that Docker gives them: in the start period failures do not count.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pier.agent.contract import AGENT_LOGS
from pier.errors import PolicyError, SandboxError, TaskError
from pier.image.model import HOST, Image, OnProgress
from pier.network.decision import OnDecision
from pier.network.policy import NetworkPolicy
from pier.sandbox.compose import MAIN, Compose, Composition, Service
from pier.sandbox.compose.storage import LOGS as SERVICE_LOGS
from pier.sandbox.contract import Backend, Capabilities, Limits, Mount, Sandbox, SandboxSpec
from pier.sandbox.hidden import refuse_hidden
from pier.task import Task, TaskStep, resolve_env
from pier.task.load import COMPOSE_NAME
from pier.task.model import Environment, Healthcheck, normalise_host
from pier.trial.agent import user_text
from pier.trial.images import ImageWish
from pier.trial.record import OutputFile, TrialRecord
from pier.trial.spec import SandboxChoice, TrialSpec
from pier.verifier.changes import ARTIFACTS, LOGS, TESTS, VERIFIER_LOGS
from pier.verifier.secure import make_folders

SERVICES = "services"
_MAIN_IMAGE = "pier-main-image"


def compose_variables(table: Environment, directory: Path, environ: Mapping[str, str] | None) -> dict[str, str]:
    """All that a compose file can see: what `[environment.env]` asks for, and the names that Harbor's tasks use. The
    directories of logs of the host are not mounted, so they have no real path."""
    harbor = {
        "CONTEXT_DIR": str(directory.resolve()),
        "MAIN_IMAGE_NAME": _MAIN_IMAGE,
        "PREBUILT_IMAGE_NAME": table.docker_image or _MAIN_IMAGE,
        "TEST_DIR": TESTS,
        "CPUS": str(table.cpus or ""),
        "MEMORY": f"{table.memory_mb}M" if table.memory_mb else "",
        "HOST_VERIFIER_LOGS_PATH": f"{SERVICE_LOGS}verifier",
        "HOST_AGENT_LOGS_PATH": f"{SERVICE_LOGS}agent",
        "HOST_ARTIFACTS_PATH": f"{SERVICE_LOGS}artifacts",
        "ENV_VERIFIER_LOGS_PATH": VERIFIER_LOGS,
        "ENV_AGENT_LOGS_PATH": AGENT_LOGS,
        "ENV_ARTIFACTS_PATH": ARTIFACTS,
    }
    return harbor | resolve_env(table.env, where="environment.env", environ=environ)


def service_wish(service: Service) -> ImageWish | None:
    """The image of a service, as its file says; None if that says nothing."""
    if service.build is not None:
        build = service.build
        return ImageWish(None, build.context, build.dockerfile, tuple(sorted(build.args.items())), build.target)
    if service.image and service.image != _MAIN_IMAGE:
        return ImageWish(service.image)
    return None


async def service_images(
    compose: Compose, main: ImageWish, get: Callable[[ImageWish], Awaitable[Image]]
) -> dict[str, Image]:
    """The images of all services, each fetched or built once. What one of them builds under a name is what the others
    mean by that name."""
    wishes = {name: main if name == MAIN else service_wish(service) for name, service in compose.services.items()}
    built = {one.image: wishes[name] for name, one in compose.services.items() if one.build and one.image}
    wishes = {name: built.get(compose.services[name].image or "", wish) for name, wish in wishes.items()}
    asked = (replace(wish or main, network=main.network) for wish in wishes.values())
    found = await asyncio.gather(*(get(wish) for wish in asked))
    return dict(zip(wishes, found, strict=True))


class ServiceLogs:
    """What services print, kept below a directory of the trial's: one file for each service."""

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


@dataclass(frozen=True, slots=True)
class StepNetwork:
    """The policies of one step. `verifier` is of the sandbox that grades; `shared` if that is the agent's own."""

    agent: NetworkPolicy
    verifier: NetworkPolicy
    shared: bool = True


@dataclass(frozen=True, slots=True)
class NetworkPlan:
    """The policy that the sandbox starts with, and those of the steps in order."""

    baseline: NetworkPolicy
    steps: tuple[StepNetwork, ...]


def plan_network(
    environment: Environment,
    steps: tuple[TaskStep, ...],
    *,
    override: NetworkPolicy | None = None,
    hosts: tuple[str, ...] = (),
    agent_hosts: tuple[str, ...] = (),
) -> NetworkPlan:
    """The task's policies with what the run adds. An override holds for every phase."""
    baseline = with_hosts(override or environment.policy, hosts)
    planned: list[StepNetwork] = []
    for step in steps:
        agent = baseline if override else (step.agent.policy or baseline)
        verifier = _verifier_policy(step, baseline, override)
        planned.append(StepNetwork(with_hosts(agent, agent_hosts), verifier, step.verifier_mode == "shared"))
    return NetworkPlan(baseline, tuple(planned))


def _verifier_policy(step: TaskStep, baseline: NetworkPolicy, override: NetworkPolicy | None) -> NetworkPolicy:
    if override is not None:
        return baseline
    own = step.verifier_environment.own_table and step.verifier_mode == "separate"
    start = step.verifier_environment.table.policy if own else baseline
    return step.verifier.policy or start


def build_network(task: Task) -> NetworkPolicy | None:
    """What the Dockerfiles of a task may reach while they are built: `metadata.pier.build_network` of its file is
    `public`, `none`, or a list of hosts. None if nothing is said, which is public."""
    own = task.config.metadata.get("pier")
    said = own.get("build_network") if isinstance(own, dict) else None
    if said is None or said in ("public", "none"):
        return None if said is None else NetworkPolicy(said)
    if not isinstance(said, list) or not all(isinstance(host, str) for host in said):
        message = (
            f"{task.path / 'task.toml'}: metadata.pier.build_network: {said!r} is not public, none or a list of hosts"
        )
        raise TaskError(message, code="task_toml")
    return with_hosts(NetworkPolicy("none"), tuple(said))


def with_hosts(policy: NetworkPolicy, hosts: tuple[str, ...]) -> NetworkPolicy:
    """`policy` with more hosts: none becomes an allowlist, public has them already."""
    if not hosts or policy.mode == "public":
        return policy
    merged = dict.fromkeys((*policy.hosts, *(_rule(host) for host in hosts)))
    return NetworkPolicy("allowlist", tuple(merged))


def _rule(host: str) -> str:
    name, colon, port = host.rpartition(":")
    if colon and port.isdigit() and ":" not in name:
        return f"{normalise_host(name)}:{port}"
    return normalise_host(host)


def check_network(
    plan: NetworkPlan, capabilities: Capabilities, backend: str, also: tuple[NetworkPolicy, ...] = ()
) -> None:
    """Refuse a plan that the backend cannot enforce; `also` are policies of phases before the first step."""
    wanted = {plan.baseline.mode} | {policy.mode for step in plan.steps for policy in (step.agent, step.verifier)}
    wanted |= {policy.mode for policy in also}
    if missing := wanted - capabilities.networks:
        have = ", ".join(sorted(capabilities.networks)) or "none at all"
        raise PolicyError(
            f"the backend {backend!r} cannot enforce the network mode {min(missing)!r} here; it can: {have}",
            hint="pier doctor",
        )
    phases = {p for s in plan.steps for p in ((s.agent, s.verifier) if s.shared else (s.agent,))}
    if {*phases, *also} - {plan.baseline} and not capabilities.switch_network:
        raise PolicyError(f"the backend {backend!r} cannot change the network between phases, which this task asks for")


_MEGABYTE = 1024 * 1024
_NOT_CONTENT = ("Dockerfile", ".dockerignore", COMPOSE_NAME)
_PLACEHOLDER = ".gitkeep"
"""Keeps a directory in git that has nothing else in it."""


@dataclass(frozen=True, slots=True)
class Room:
    """A sandbox to be started: its settings, and the files that its image does not bring."""

    table: Environment
    wish: ImageWish
    content: Path | None
    """The directory whose files go into the working directory, if the image cannot hold them."""
    compose: Compose | None = None
    """The services that run with it."""


@dataclass(frozen=True, slots=True)
class Furnished:
    """A running sandbox that is ready for its phase."""

    sandbox: Sandbox
    workdir: str


async def check_support(task: Task, backend: Backend, choice: SandboxChoice) -> None:
    """Refuse what the backend cannot run, before anything starts."""
    environment, name = task.config.environment, backend.name
    if task.compose and not (await backend.capabilities()).compose:
        message = f"{task.compose}: this task is made of several services, which the backend {name!r} cannot run"
        raise _refusal(f"{message}; 'docker' can", "compose", hint="run it with --env docker")
    if environment.os != "linux":
        raise _refusal(f"{task.name}: the backend {name!r} runs no {environment.os} tasks", "unsupported")
    if environment.tpu:
        raise _refusal(f"{task.name}: the backend {name!r} has no TPUs", "unsupported")
    if wanted_gpus(environment, choice) and not await backend.has_gpus():
        message = f"{task.name}: the backend {name!r} has no GPUs here"
        raise _refusal(message, "no_gpu", hint="pier doctor; run it without them: --override-gpus 0")


def wanted_gpus(table: Environment, choice: SandboxChoice) -> int:
    """How many GPUs a sandbox is to have."""
    return (table.gpus or 0) if choice.gpus is None else choice.gpus


def _refusal(message: str, code: str, hint: str | None = None) -> SandboxError:
    return SandboxError(message, code=code, blame="user", retryable=False, hint=hint)


def agent_room(task: Task, choice: SandboxChoice, environ: Mapping[str, str] | None = None) -> Room:
    """What the agent works in. `environ` is what the task's own variables are filled from."""
    context = task.environment_dir if task.dockerfile else None
    if task.compose is not None:
        room = _services_room(task, task.config.environment, task.compose, choice, environ)
    else:
        room = _room(task, task.config.environment, context, choice)
    return _finished(task, room, choice)


def _finished(task: Task, room: Room, choice: SandboxChoice) -> Room:
    """`room` with what its image may reach while it is built, and whether the user let it be this machine's root."""
    chosen = choice.image is not None and choice.image in (room.wish.reference, HOST)
    return replace(room, wish=replace(room.wish, network=build_network(task), host=chosen))


def _services_room(
    task: Task, table: Environment, path: Path, choice: SandboxChoice, environ: Mapping[str, str] | None
) -> Room:
    """A room with services. Its image is the one of `main` in the file, else that of a task without one."""
    from pier.sandbox.compose.read import read_compose  # most tasks have one service, and need no reader

    compose = read_compose(path, compose_variables(table, path.parent, environ))
    wish = service_wish(compose.main)
    if choice.image:
        wish = ImageWish(choice.image, chosen=True)
    elif wish is None or (table.docker_image and wish.context == path.parent and not choice.force_build):
        context = path.parent if (path.parent / "Dockerfile").is_file() else None
        wish = _room(task, table, context, choice).wish
    return Room(table, wish, None, compose)


def _room(task: Task, table: Environment, context: Path | None, choice: SandboxChoice) -> Room:
    if choice.image:
        return Room(table, ImageWish(choice.image, chosen=True), task.environment_dir)
    if table.docker_image and not (choice.force_build and context):
        return Room(table, ImageWish(table.docker_image), None if task.dockerfile else task.environment_dir)
    if context is None:
        raise TaskError(
            f"{task.path}: neither environment.docker_image nor a Dockerfile says what to run in",
            hint="run it with --image host",
            code="no_image",
        )
    return Room(table, ImageWish(context=context), None)


def verifier_room(task: Task, step_index: int, choice: SandboxChoice, environ: Mapping[str, str] | None = None) -> Room:
    """What a separate verifier works in: its own image, or a fresh copy of what the agent began with."""
    return _finished(task, _verifier_room(task, step_index, choice, environ), choice)


def _verifier_room(task: Task, step_index: int, choice: SandboxChoice, environ: Mapping[str, str] | None) -> Room:
    own = task.steps[step_index].verifier_environment
    if own.compose is not None:
        return _services_room(task, own.table, own.compose, choice, environ)
    if not own.bundled:
        return replace(_room(task, task.config.environment, own.context, choice), table=own.table)
    if own.table.docker_image and not (choice.force_build and own.context):
        return Room(own.table, ImageWish(own.table.docker_image), None)
    return Room(own.table, ImageWish(context=own.context), None)


async def sandbox_limits(
    task: Task, table: Environment, choice: SandboxChoice, backend: Backend, record: TrialRecord
) -> Limits:
    """The task's limits with the run's own before them, and the backend's share of the machine where neither says
    anything; what the backend cannot hold is left out and said."""
    asked = Limits(
        cpus=table.cpus or None,
        memory=(table.memory_mb or 0) * _MEGABYTE or None,
        disk=(table.storage_mb or 0) * _MEGABYTE or None,
        processes=_processes(task),
    )
    wanted = asdict(choice.limits.over(asked))
    capabilities = await backend.capabilities()
    held = {name: value for name, value in wanted.items() if value and name in capabilities.limits}
    if table.gpu_types and wanted_gpus(table, choice):
        record.warn(
            f"this backend does not choose GPUs by their kind; the task asks for {' or '.join(table.gpu_types)}"
        )
    for name in (name for name, value in wanted.items() if value and name not in held):
        record.warn(f"this backend does not limit {name} here; the task asks for {wanted[name]}")
    lifted = {name: 0 for name, value in asdict(choice.limits).items() if value == 0}
    return Limits(**{**held, **lifted}).over(await backend.share())


def _processes(task: Task) -> int | None:
    """What `metadata.pier.processes` says."""
    own = task.config.metadata.get("pier")
    value = own.get("processes") if isinstance(own, dict) else None
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    where = f"{task.path / 'task.toml'}: metadata.pier.processes"
    raise TaskError(f"{where}: invalid value {value!r}: expected a number above 0", code="task_toml")


async def start_room(
    room: Room,
    image: Image,
    backend: Backend,
    *,
    name: str,
    network: NetworkPolicy,
    choice: SandboxChoice,
    environ: Mapping[str, str],
    limits: Limits,
    mounts: Iterable[Mount] = (),
    hidden: Iterable[Path] = (),
    on_progress: OnProgress | None = None,
    on_decision: OnDecision | None = None,
    services: Composition | None = None,
) -> Sandbox:
    """Start the sandbox. The environment's variables are filled in here and live in the sandbox only. `hidden` are
    directories of this machine that it must not see, not even by a mount."""
    mounts, hidden = tuple(mounts), tuple(hidden)
    refuse_hidden(mounts, hidden)
    env = resolve_env(room.table.env, where="environment.env", environ=environ)
    extra = resolve_env(choice.env, where="the run's environment variables", environ=environ)
    spec = SandboxSpec(
        image=image,
        network=network,
        limits=limits,
        mounts=mounts,
        hidden=(*hidden, *choice.hidden),
        env={**env, **extra},
        gpus=wanted_gpus(room.table, choice),
        name=name,
        on_progress=on_progress,
        on_decision=on_decision,
        compose=services,
    )
    return await backend.start(spec)


async def furnish(sandbox: Sandbox, room: Room) -> Furnished:
    """Make the directories that every task may count on, and bring the files that the image does not hold."""
    workdir = room.table.workdir or sandbox.spec.workdir or sandbox.spec.image.config.workdir or "/"
    folders = {LOGS: 0o755, AGENT_LOGS: 0o777, VERIFIER_LOGS: 0o777, ARTIFACTS: 0o777}
    if workdir != "/" and room.table.workdir:
        folders[workdir] = 0o755
    await make_folders(sandbox, folders)
    if room.content is not None:
        await _upload_content(sandbox, room.content, workdir)
    return Furnished(sandbox, workdir)


async def _upload_content(sandbox: Sandbox, content: Path, workdir: str) -> None:
    names = set(os.listdir(content))
    if not names - {*_NOT_CONTENT, _PLACEHOLDER}:
        return
    if not names & set(_NOT_CONTENT):
        await sandbox.upload(content.resolve(), workdir)
        return
    with tempfile.TemporaryDirectory(prefix="pier-content.") as name:
        staged = Path(name) / "content"
        await asyncio.to_thread(_stage, content, staged)
        await sandbox.upload(staged, workdir)


def _stage(content: Path, staged: Path) -> None:
    """A copy without the files that describe how to build the image; these count at the top only."""

    def left_out(directory: str, names: list[str]) -> set[str]:
        return set(names) & set(_NOT_CONTENT) if Path(directory) == content else set()

    shutil.copytree(content, staged, symlinks=True, ignore=left_out)


async def prepare_step(spec: TrialSpec, step: TaskStep, sandbox: Sandbox, workdir: str) -> None:
    """Bring the step's files into the working directory, run its set-up script and wait for its health check."""
    user = user_text(step.agent.user)
    if step.workdir is not None:
        await sandbox.upload(step.workdir, workdir)
        if (step.workdir / "setup.sh").is_file():
            await _run_setup(spec, step, sandbox, workdir, user)
    if step.healthcheck is not None:
        await wait_until_healthy(sandbox, step.healthcheck, cwd=workdir, user=user)


async def _run_setup(spec: TrialSpec, step: TaskStep, sandbox: Sandbox, workdir: str, user: str | None) -> None:
    limit = spec.task.config.environment.build_timeout_sec * spec.multipliers.of("environment_build")
    result = await sandbox.exec(["bash", f"{workdir.rstrip('/')}/setup.sh"], cwd=workdir, user=user, timeout=limit)
    if not result.ok:
        how = "took too long" if result.timed_out else f"ended with exit code {result.exit_code}"
        raise TaskError(f"step {step.name!r}: setup.sh {how}: {result.error_text[-500:]}", code="step_setup")


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
