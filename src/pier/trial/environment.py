"""From a task's `[environment]` to a running sandbox: which image, which limits, which files."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pier.agent.contract import AGENT_LOGS
from pier.errors import SandboxError, TaskError
from pier.image.model import HOST, Image, OnProgress
from pier.network.decision import OnDecision
from pier.network.policy import NetworkPolicy
from pier.sandbox.compose import Compose, Composition
from pier.sandbox.contract import Backend, Limits, Mount, Sandbox, SandboxSpec
from pier.sandbox.hidden import refuse_hidden
from pier.sandbox.parcel import deliver
from pier.task import Task, resolve_env
from pier.task.config import Environment
from pier.task.load import COMPOSE_NAME
from pier.trial.compose import compose_variables, service_wish
from pier.trial.images import ImageWish
from pier.trial.network import build_network
from pier.trial.record import TrialRecord
from pier.trial.spec import SandboxChoice
from pier.verifier.folders import ARTIFACTS, LOGS, VERIFIER_LOGS, make_folders

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
    wanted = choice.limits.over(asked).named()
    capabilities = await backend.capabilities()
    held = {name: value for name, value in wanted.items() if value and name in capabilities.limits}
    if table.gpu_types and wanted_gpus(table, choice):
        record.warn(
            f"this backend does not choose GPUs by their kind; the task asks for {' or '.join(table.gpu_types)}"
        )
    for name in (name for name, value in wanted.items() if value and name not in held):
        record.warn(f"this backend does not limit {name} here; the task asks for {wanted[name]}")
    lifted = {name: 0 for name, value in choice.limits.named().items() if value == 0}
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
        await deliver(sandbox, content, workdir)
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
