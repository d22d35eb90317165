"""`pier start` and `pier fork`: create a workspace, or start an existing one with additional settings.

Arguments are validated before anything is created. The settings are on disk before the sandbox starts, so the next
`pier start` resumes an interrupted one.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pier.beneath import remove
from pier.errors import UsageError, WorkspaceError
from pier.files import locked
from pier.sandbox.contract import Mount
from pier.secret import secret_values
from pier.task import Task, load_task
from pier.task.sources import find_tasks
from pier.tree import Tree, TreeError
from pier.workspace.agents import PLACED, check_agents
from pier.workspace.client import call, is_running, launch
from pier.workspace.diff import SEED
from pier.workspace.live import seed_host
from pier.workspace.ports import add_ports, check_free, parse_port
from pier.workspace.state import RUNNING, STATE, copy_tree, merge_tree
from pier.workspace.workspace import PIER, TASK, Workspace, WorkspaceConfig, enclosing

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class StartOrder:
    """The arguments of `pier start`. None and empty values leave the settings of an existing workspace unchanged."""

    task: str | None = None
    directory: Path | None = None
    image: str | None = None
    agents: tuple[str, ...] = ()
    model: str | None = None
    host: bool = False
    mounted: bool = True
    direct: bool = False
    backend: str | None = None
    ports: tuple[str, ...] = ()
    mounts: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    skills: tuple[Path, ...] = ()
    force: bool = False
    yes: bool = False
    """Whether the user agrees to give the task the variables of this machine that it requests."""

    @property
    def is_new(self) -> bool:
        return self.task is not None or self.image is not None


async def start(order: StartOrder, say: Say) -> tuple[Workspace, dict[str, Any]]:
    """Create or start a workspace; the workspace and its supervisor's status, which is empty in host mode."""
    for port in order.ports:
        parse_port(port)
    if order.host:
        _check_host(order)
    workspace, changed = (await _create(order, say), True) if _creates(order) else _existing(order)
    if workspace.is_host:
        workspace.save()
        return workspace, {}
    if changed:
        workspace.save()
    if is_running(workspace):
        if not changed:
            say("the workspace is running already")
            return workspace, call(workspace, {"op": "wait"}, say)
        say("restarting the sandbox")
        for note in call(workspace, {"op": "stop"})["notes"]:
            say(f"warning: {note}")
        await _wait_for_release(workspace)
    launch(workspace)
    answer = call(workspace, {"op": "wait"}, say)
    return Workspace.open(workspace.root), answer


async def _wait_for_release(workspace: Workspace) -> None:
    """Wait until the supervisor has released its lock."""
    while True:
        with locked(workspace.state / "lock", wait=False) as free:
            if free:
                return
        await asyncio.sleep(0.01)


def _creates(order: StartOrder) -> bool:
    """Whether to create a workspace, rather than start an existing one."""
    if order.directory is not None and (order.directory / PIER / "workspace.json").is_file():
        return False
    if order.directory is None and order.task is None:
        return False
    if not order.is_new and not order.host:
        raise UsageError(
            f"{order.directory}: not a workspace: expected a task or --image to create one",
            hint=f"pier start TASK -d {order.directory}",
            code="start-what",
        )
    return True


def _existing(order: StartOrder) -> tuple[Workspace, bool]:
    """The existing workspace with the added settings, and whether any setting changed."""
    workspace = Workspace.open(order.directory) if order.directory else Workspace.find(Path.cwd())
    config = workspace.config
    _check_names(order)
    if not order.yes:
        workspace.check_known()
    if order.task is not None and config.task != _task_text(order.task):
        raise WorkspaceError(
            f"{workspace.root} is already a workspace of {config.task or config.image}",
            hint="choose another directory with -d",
            code="other-workspace",
        )
    if order.host and not workspace.is_host:
        raise WorkspaceError(f"{workspace.root} has a sandbox", hint="choose another directory", code="other-workspace")
    if workspace.is_host:
        _check_host(order)
    if not order.mounted and config.mounted:
        raise WorkspaceError(
            f"cannot apply --no-mount to {workspace.root}: its directory has been mounted since its first start",
            hint="create another workspace: pier start TASK -d DIR --no-mount",
            code="other-workspace",
        )
    check_free(order.ports, config.ports if not workspace.is_host and is_running(workspace) else ())
    workspace.settle()
    before = config.model_dump(), workspace.secret_env()
    if order.backend not in (None, config.backend) and not is_running(workspace):
        _check_recovered(workspace, f"pier start, then pier start --env {order.backend}")
    _add(config, order)
    _set_env(workspace, order.env)
    if config.task_path is not None and config.task_path.is_dir():
        task = load_task(config.task_path, verify=False)
        agreed = workspace.environment().keys() | order.env.keys() | workspace.agreed()
        workspace.agree(_ask_consent(order, task, agreed))
        _write_instruction(workspace, task)
    return workspace, (config.model_dump(), workspace.secret_env()) != before


def _add(config: WorkspaceConfig, order: StartOrder) -> None:
    """Add the arguments to the settings."""
    config.agents = list(dict.fromkeys((*config.agents, *order.agents)))
    config.ports = add_ports(config.ports, order.ports)
    config.mounts = list(dict.fromkeys((*config.mounts, *order.mounts)))
    config.skills = list(dict.fromkeys((*config.skills, *order.skills)))
    config.model = order.model or config.model
    config.image = order.image or config.image
    config.direct = config.direct or order.direct
    config.backend = order.backend or config.backend


def _check_recovered(workspace: Workspace, hint: str) -> None:
    if (workspace.state / RUNNING).exists():
        raise WorkspaceError(
            f"{workspace.root} was not stopped: its sandbox may have files that were not saved",
            hint=hint,
            code="not-recovered",
        )


async def _create(order: StartOrder, say: Say) -> Workspace:
    task, origin = _find_task(order.task, say) if order.task else (None, None)
    root = _directory(order, task)
    _check_names(order)
    _check_place(root, order, task)
    check_free(order.ports)
    agreed = _ask_consent(order, task, order.env.keys()) if task is not None else set[str]()
    made = not root.exists()
    before = {name: os.listdir(root / name) for name in (PIER, TASK) if (root / name).is_dir()}
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    config = WorkspaceConfig(
        mode="host" if order.host else "sandbox",
        task=_task_text(order.task) if order.task else None,
        task_path=task.path if task else None,
        mounted=order.mounted,
        git=origin,
    )
    _add(config, order)
    workspace = Workspace(root.resolve(), config)
    try:
        workspace.save()
        _set_env(workspace, order.env)
        workspace.save()
        workspace.agree(agreed)
        if task is not None:
            _write_instruction(workspace, task)
        if order.host:
            await seed_host(workspace, task, say)
    except BaseException:
        _undo(workspace, made, before)
        raise
    return workspace


def _ask_consent(order: StartOrder, task: Task, agreed: Collection[str]) -> set[str]:
    """The names of the variables of this machine that the task requests. The user is asked for consent unless all of
    them are in `agreed`."""
    from pier.job.plan import ask_consent, variables_for

    requested = set(variables_for(task, {**os.environ, **order.env}))
    if not requested <= set(agreed) and not order.yes:
        ask_consent(dict.fromkeys(requested, task.name))
    return requested


def _undo(workspace: Workspace, made: bool, before: Mapping[str, Collection[str]]) -> None:
    """Remove a workspace whose creation failed, except for the content `before` of `PIER` and `TASK`."""
    shutil.rmtree(workspace.state, ignore_errors=True)
    for name in (PIER, TASK):
        place = workspace.root / name
        if name not in before:
            shutil.rmtree(place, ignore_errors=True)
            continue
        for new in set(os.listdir(place)) - set(before[name]):
            remove(str(place / new))
    if made and not any(workspace.root.iterdir()):
        workspace.root.rmdir()


def _find_task(text: str, say: Say) -> tuple[Task, dict[str, str] | None]:
    if "#" in text or "://" in text:
        say(f"fetching {text.partition('#')[0]}")
    origins = find_tasks(text)
    if len(origins) != 1:
        names = ", ".join(origin.path.name for origin in origins[:5])
        raise UsageError(
            f"{text} contains {len(origins)} tasks: expected one",
            hint=f"choose one: {names}" if names else "pier task init DIR creates one",
            code="one-task",
        )
    origin = origins[0]
    git = None
    if origin.git_url:
        git = {"url": origin.git_url, "commit": origin.git_commit or "", "path": origin.git_path or ""}
    return load_task(origin.path, verify=False, origin=origin), git


def _task_text(text: str) -> str:
    path = Path(text)
    return str(path.resolve()) if path.is_dir() else text


def _directory(order: StartOrder, task: Task | None) -> Path:
    if order.directory is not None:
        return order.directory
    if task is not None and task.origin.git_url:
        return Path.cwd() / task.short_name
    raise UsageError(
        "a new workspace needs a directory",
        hint=f"pier start {order.task or '--image REF'} -d DIR",
        code="no-directory",
    )


def _check_host(order: StartOrder) -> None:
    for option, is_set in (("--ports", bool(order.ports)), ("--no-mount", not order.mounted)):
        if is_set:
            raise UsageError(
                f"cannot use {option} with --host: there is no sandbox", hint=f"omit {option}", code="host-option"
            )


def _check_names(order: StartOrder) -> None:
    from pier.sandbox import BACKENDS

    check_agents(order.agents)
    if order.backend and order.backend not in BACKENDS and ":" not in order.backend:
        known = ", ".join(BACKENDS)
        raise UsageError(f"invalid value {order.backend!r} for --env: expected one of {known}", code="backend")
    for path in order.skills:
        if not path.is_dir():
            raise UsageError(f"invalid value {path} for --skill: expected a directory with a SKILL.md", code="skill")


def _check_place(root: Path, order: StartOrder, task: Task | None) -> None:
    if root.exists() and not root.is_dir():
        raise WorkspaceError(f"{root} is a file", hint="choose another directory with -d", code="workspace-place")
    outer = enclosing(root)
    if outer is not None:
        raise WorkspaceError(
            f"{root} lies in the workspace {outer.root}: a workspace cannot be inside another",
            hint="choose a directory elsewhere with -d",
            code="nested-workspace",
        )
    if task is not None and root.resolve().is_relative_to(task.path):
        raise WorkspaceError(
            f"{root} lies in the task {task.path}, which no sandbox may see",
            hint="choose a directory elsewhere with -d",
            code="workspace-place",
        )
    if root.is_dir() and any(root.iterdir()) and not order.force:
        raise WorkspaceError(
            f"{root} is not empty", hint="-f starts there anyway and keeps all files", code="not-empty"
        )


def _set_env(workspace: Workspace, env: Mapping[str, str]) -> None:
    """Add variables: values that contain a secret, and empty values, are stored in the local state only."""
    hidden = {
        name: value for name, value in env.items() if not value or any(secret_values({name: value}, {}, given=True))
    }
    for name, value in env.items():
        workspace.config.env[name] = "" if name in hidden else value
    if hidden:
        workspace.keep_secrets({**workspace.secret_env(), **hidden})


def _write_instruction(workspace: Workspace, task: Task) -> None:
    """Write the instructions for people and agents, one file for each step. The directory may have been written by a
    sandbox, so no link is followed."""
    source = task.path / "instruction.md"
    try:
        with Tree(workspace.root) as tree:
            for index, step in enumerate(task.steps):
                name = f"{TASK}/instruction-{step.name}.md" if index else f"{TASK}/instruction.md"
                tree.write(name, step.instruction.encode())
            if workspace.is_host and source.is_file():
                with tree.reached(f"{TASK}/instruction.md") as path:
                    path.unlink()
                    path.symlink_to(source)
    except TreeError as error:
        raise WorkspaceError(str(error), hint=f"move {workspace.root / TASK} away", code="workspace-link") from error


def parse_mounts(text: str) -> tuple[str, ...]:
    """The mounts of `--mounts-json`: an array of `SOURCE:TARGET[:ro|rw]` or of objects as in compose files."""
    try:
        rows = json.loads(text)
    except ValueError as error:
        raise UsageError(f"--mounts-json is not JSON: {error}", code="mounts") from None
    if not isinstance(rows, list):
        raise UsageError("--mounts-json: expected a JSON array", code="mounts")
    return tuple(_mount_text(row) for row in rows)


def _mount_text(row: Any) -> str:
    if isinstance(row, dict) and row.get("source") and row.get("target"):
        row = f"{row['source']}:{row['target']}:{'ro' if row.get('read_only') else 'rw'}"
    mount = Mount.parse(str(row), "--mounts-json", "rw")
    if not mount.source or not mount.source.exists():
        raise UsageError(f"cannot mount {mount.source}: it does not exist", code="mounts")
    return f"{mount.source}:{mount.target}:{'ro' if mount.read_only else 'rw'}"


async def fork(workspace: Workspace, target: Path, ports: Sequence[str], say: Say) -> Workspace:
    """Copy the workspace to `target`, which must be new or empty, and start the copy."""
    workspace.check_known()
    if target.exists() and any(target.iterdir()):
        raise WorkspaceError(f"{target} is not empty", hint="choose another directory", code="not-empty")
    if enclosing(target) is not None:
        raise WorkspaceError(
            f"{target} lies in a workspace", hint="choose a directory elsewhere", code="nested-workspace"
        )
    check_free(ports)
    running = not workspace.is_host and is_running(workspace)
    if workspace.origin in ("here", "moved") and not running:
        _check_recovered(workspace, "pier start, then pier fork")
    target.mkdir(parents=True, exist_ok=True, mode=0o700)
    made = Workspace(target.resolve(), workspace.config.model_copy(deep=True))
    made.config.id = type(workspace.config)().id
    made.config.ports = list(ports)
    made.pier.mkdir(mode=0o700)
    try:
        say("copying the files")
        if running:
            files = made.pier / "incoming"
            call(workspace, {"op": "save", "target": str(made.pier / STATE), "files": str(files)})
            if os.path.lexists(files):
                await asyncio.to_thread(merge_tree, files, made.root)
                await asyncio.to_thread(remove, str(files))
        elif (workspace.pier / STATE).is_dir():
            await asyncio.to_thread(copy_tree, workspace.pier / STATE, made.pier / STATE)
        if not running or workspace.config.mounted:
            await asyncio.to_thread(copy_tree, workspace.root, made.root, (PIER,))
        for name in (SEED, "agent"):
            if (workspace.pier / name).is_dir():
                await asyncio.to_thread(copy_tree, workspace.pier / name, made.pier / name)
        if (workspace.pier / PLACED).is_file():
            shutil.copy2(workspace.pier / PLACED, made.pier / PLACED)
        made.save()
        made.keep_secrets(workspace.secret_env())
        made.agree(workspace.agreed())
    except BaseException:
        await asyncio.to_thread(remove, str(made.root))
        raise
    started, _ = await start(StartOrder(directory=made.root), say)
    return started
