"""A running workspace: its sandbox, its gateway, and the commands that people run in it.

The workspace's directory is mounted at the image's working directory, so edits are visible on both sides at once. Files
created inside belong to the directory's owner: commands run as the sandbox user that maps to the owner if there is one,
else as root, and the files are given to the owner after each command.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pier.agent.contract import AGENT_LOGS, DEFAULT_PATH, PACK_PATH, AgentRun, Launch
from pier.endpoint import GATEWAY_PORT, Endpoint
from pier.errors import PierError, SandboxError, WorkspaceError
from pier.files import write
from pier.lease import sweep
from pier.network.policy import NetworkPolicy
from pier.record import RECORDING
from pier.redact import Redactor
from pier.sandbox.contract import Mount, OnOutput, Process, Sandbox, SandboxSpec
from pier.secret import secret_values
from pier.task import Origin, Task, load_task
from pier.trial.agent import describe_run, home_of
from pier.trial.collect import has_state, restore_state
from pier.trial.config import AgentConfig
from pier.trial.environment import SandboxStarter, ServiceLogs, TaskSandbox, prepare_step, wait_until_healthy
from pier.trial.plan import NetworkPlan, SandboxPlan, agent_plan, check_network, check_support, plan_network
from pier.trial.record import TrialRecord
from pier.trial.spec import SandboxChoice, TrialServices, TrialSpec, open_services, user_text
from pier.verifier.secure import make_folders
from pier.workspace import state
from pier.workspace.agents import (
    BIN,
    HOMES_IN_LOGS,
    LOG_HOMES,
    PLACED,
    InstalledAgent,
    PlacedFiles,
    add_programs,
    add_skills,
    agent_of_image,
    install_agents,
    recognise,
)
from pier.workspace.diff import keep_seed
from pier.workspace.state import RUNNING, SAVE_FAILURES, STATE
from pier.workspace.workspace import Workspace, WorkspaceConfig, WorkspaceSession, new_directory

if TYPE_CHECKING:
    from pier.gateway import Gateway
    from pier.gateway.session import Session

DEFAULT_WORKDIR = "/app"
"""Mount point of the directory if the image's working directory is missing or `/`."""
_PROBE = ".pier-owner"
_ADOPT = 'find "$1" -xdev ! -path "$1/.pier" ! -user "$2" -exec chown -h "$2:$3" {} +'
_SAFE_GIT = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class SandboxUser:
    """The user that commands run as; None is the image's user. `adopt` is the owner (uid, gid) to give files to."""

    user: str | None
    home: str
    adopt: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class CommandOrder:
    """A command requested by a client. `cwd` is relative to the workspace's directory."""

    argv: tuple[str, ...]
    cwd: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    tty: bool = False


@dataclass(slots=True)
class LiveWorkspace:
    """The parts of a running workspace."""

    workspace: Workspace
    environment: TaskSandbox
    services: TrialServices
    gateway: Gateway
    agents: list[InstalledAgent]
    identity: SandboxUser
    env: Mapping[str, str]
    redactor: Redactor
    placed: PlacedFiles
    shell: Session | None = None
    """The gateway's session for other commands, since an agent may be started from a shell."""

    @property
    def sandbox(self) -> Sandbox:
        return self.environment.sandbox

    def agent_of(self, order: CommandOrder) -> InstalledAgent | None:
        """The agent that a command starts: one of the workspace's, or one that the image may have."""
        name = recognise(order.argv[0])
        known = next((each for each in self.agents if each.name == name), None)
        return known or (agent_of_image(name) if name else None)

    @asynccontextmanager
    async def session(self, order: CommandOrder) -> AsyncIterator[tuple[WorkspaceSession | None, Endpoint | None]]:
        """Open a session for a command: its record, if the command starts an agent, and the endpoint of its model."""
        agent, config = self.agent_of(order), self.workspace.config
        if agent is None:
            yield None, endpoint_of(self.shell)
            return
        facts = {"tty": order.tty, "model": config.model, "version": agent.version}
        kept = self.workspace.new_session(agent.name, list(order.argv), **facts)
        if config.direct:
            yield kept, None
            return
        session = self.open_session(kept.directory / RECORDING)
        try:
            endpoint = endpoint_of(session)
            await self._place([agent], endpoint)
            yield kept, endpoint
        finally:
            await asyncio.shield(session.close())
            if self.shell is not None:
                with suppress(SandboxError):
                    await self._place([agent], endpoint_of(self.shell))

    def open_session(self, recording: Path | None = None) -> Session:
        """Open a session at the gateway, for one command or for all shells."""
        closed = self.environment.network.mode != "public"
        model = self.workspace.config.model
        return self.gateway.session(model, recording=recording, closed_book=closed, redactor=self.redactor)

    async def spawn(self, order: CommandOrder, endpoint: Endpoint | None, on_output: OnOutput) -> Process:
        """Start a command in the workspace."""
        agent = self.agent_of(order)
        program = self.launch_of(agent, endpoint).argv if agent else []
        return await self.sandbox.spawn(
            [*(program or order.argv[:1]), *order.argv[1:]],
            cwd=f"{self.environment.workdir.rstrip('/')}/{order.cwd}".rstrip("/") or "/",
            env={**self.command_env(endpoint, agent), **order.env},
            user=self.identity.user,
            tty=order.tty,
            stdin=True,
            on_output=on_output,
        )

    def launch_of(self, installed: InstalledAgent, endpoint: Endpoint | None) -> Launch:
        return installed.launch(self.run_of(installed, endpoint))

    def run_of(self, installed: InstalledAgent, endpoint: Endpoint | None) -> AgentRun:
        """The agent's inputs, without an instruction."""
        task = self.environment.task
        spec = TrialSpec("workspace", task, self.workspace.pier, AgentConfig(name=installed.name))
        run = describe_run(
            spec,
            task.steps[0],
            installed.agent,
            workdir=self.environment.workdir,
            home=AGENT_LOGS if installed.name in HOMES_IN_LOGS else self.identity.home,
            environ=self.environment.starter.environ,
        )
        return replace(run, endpoint=endpoint, seconds=None, warn=self.environment.record.warn)

    def command_env(self, endpoint: Endpoint | None, agent: InstalledAgent | None) -> dict[str, str]:
        """The variables of a command: those of all agents, which may be started from a shell, and last those of the
        agent that the command starts."""
        spec = self.sandbox.spec
        path = spec.env.get("PATH") or spec.image.config.env.get("PATH") or DEFAULT_PATH
        env = {"HOME": self.identity.home, "TASK_WORKSPACE": self.environment.workdir, **LOG_HOMES}
        if self.identity.adopt:
            env |= _SAFE_GIT
        for each in (*self.agents, *([agent] if agent else [])):
            env |= self.launch_of(each, endpoint).env
        env |= self.env
        tools = f":{PACK_PATH}/tools" if self.agents else ""
        env["PATH"] = f"{BIN}:{env.get('PATH', path)}{tools}"
        return env

    async def _place(self, agents: Sequence[InstalledAgent], endpoint: Endpoint | None) -> None:
        for installed in agents:
            launch = self.launch_of(installed, endpoint)
            await self.placed.place(self.sandbox, launch.files, (self.identity.home, AGENT_LOGS))

    async def set_up_agents(self) -> None:
        """Write the settings, skills and programs of all agents to the sandbox."""
        endpoint = endpoint_of(self.shell)
        await make_folders(self.sandbox, dict.fromkeys(LOG_HOMES.values(), 0o777))
        await self._place(self.agents, endpoint)
        programs: dict[str, Sequence[str]] = {}
        for installed in self.agents:
            await add_skills(self.sandbox, installed.agent, self.run_of(installed, None), self.workspace.config.skills)
            await self._link_logs(installed)
            programs |= dict.fromkeys(installed.programs, self.launch_of(installed, endpoint).argv)
        await add_programs(self.sandbox, programs)

    async def _link_logs(self, installed: InstalledAgent) -> None:
        """Link an agent's log directories to `AGENT_LOGS`, if no variable can move them there."""
        for source, target in getattr(installed.agent, "logs", ()) if installed.name not in HOMES_IN_LOGS else ():
            place = f"{self.identity.home.rstrip('/')}/{source}"
            script = 'mkdir -p "$2" "${1%/*}" && { [ -e "$1" ] || ln -s "$2" "$1"; }'
            command = ["/bin/sh", "-c", script, "sh", place, f"{AGENT_LOGS}/{target}"]
            await self.sandbox.exec(command, user=self.identity.user)

    async def adopt(self) -> None:
        """Give files that commands created in the mounted directories to their owner."""
        if self.identity.adopt is None:
            return
        uid, gid = map(str, self.identity.adopt)
        for path in (*([self.environment.workdir] if self.workspace.config.mounted else []), AGENT_LOGS):
            result = await self.sandbox.exec(["/bin/sh", "-c", _ADOPT, "sh", path, uid, gid], user="0")
            if not result.ok:
                self.environment.record.warn(f"cannot give the files in {path} to their owner: {result.error_text}")


def endpoint_of(session: Session | None) -> Endpoint | None:
    """The endpoint of a session; its model is empty if the user chose none, so that the agent's choice applies."""
    if session is None:
        return None
    endpoint = session.endpoint()
    return endpoint if session.terms.model is not None else replace(endpoint, model="")


def workspace_task(workspace: Workspace, *, verify: bool = False) -> Task:
    """The workspace's task, loaded from disk; a task with an empty instruction if the workspace has only an image."""
    config = workspace.config
    if config.task_path is not None:
        if not config.task_path.is_dir():
            raise WorkspaceError(
                f"the task {config.task_path} of this workspace is not there",
                hint="restore it, or start another workspace: pier start TASK -d DIR",
                code="task-gone",
            )
        git = config.git or {}
        origin = Origin(config.task_path, None, git.get("url"), git.get("commit"), git.get("path"))
        return load_task(config.task_path, verify=verify, origin=origin)
    home = workspace.state / "task"
    (home / "environment").mkdir(parents=True, exist_ok=True)
    write(home / "task.toml", f'version = "1.0"\n[metadata]\nworkspace = "{config.id}"\n')
    write(home / "instruction.md", "")
    return load_task(home, verify=False)


def in_directory(task: Task, workdir: str) -> Task:
    """`task` with another working directory."""
    table = task.config.environment.model_copy(update={"workdir": workdir})
    return replace(task, config=task.config.model_copy(update={"environment": table}))


async def prepare(
    workspace: Workspace, task: Task, services: TrialServices, record: TrialRecord, say: Say
) -> tuple[SandboxStarter, SandboxPlan, str]:
    """Get the image; the starter and the plan of the workspace's sandbox, and the path of its directory inside."""
    config = workspace.config
    keep = workspace.state / RUNNING
    choice = SandboxChoice(image=config.image, hidden=(workspace.pier,), keep=keep)
    logs = ServiceLogs(record.directory / "services", record)
    starter = SandboxStarter(task, services, record, f"workspace-{config.id}", choice, logs, 1.0, say)
    plan = agent_plan(task, choice, starter.environ)
    record.image = await starter.get_image(plan)
    workdir = task.config.environment.workdir or record.image.config.workdir or "/"
    if workdir == "/":
        workdir, task = DEFAULT_WORKDIR, in_directory(task, DEFAULT_WORKDIR)
    return replace(starter, task=task), replace(plan, table=task.config.environment), workdir


async def _recover(workspace: Workspace, starter: SandboxStarter, plan: SandboxPlan, say: Say) -> None:
    """Save the changes of a previous sandbox whose supervisor was killed or could not save them."""
    mark, config, backend = workspace.state / RUNNING, workspace.config, starter.services.backend
    try:
        id = mark.read_text()
    except FileNotFoundError:
        return
    if config.seeded and config.workdir:
        say("the workspace was not stopped: saving the files of its sandbox")
        image = await starter.get_image(plan)
        if image.digest != config.image_digest:
            raise WorkspaceError(
                "the workspace was not stopped, and the files of its sandbox cannot be saved: its image was different",
                hint=f"start with its old image (--image, or the unchanged task); rm {mark} discards the files",
                code="not-recovered",
            )
        try:
            async with await backend.reopen(id, SandboxSpec(image)) as sandbox:
                if note := await state.save(workspace, sandbox, config.workdir):
                    say(f"warning: {note}")
        except SAVE_FAILURES as error:
            if not isinstance(error, SandboxError) or error.code != "cannot_reopen":
                raise WorkspaceError(
                    f"the workspace was not stopped, and the files of its sandbox cannot be saved: {error}",
                    hint=f"pier start tries again; rm {mark} discards it",
                    code="not-recovered",
                    blame="infra",
                ) from error
            say(f"warning: unsaved files of the last sandbox are lost: {error}")
    mark.unlink()
    await sweep(dict.fromkeys(backend.kinds, backend.destroy))


@asynccontextmanager
async def open_live(workspace: Workspace, say: Say) -> AsyncIterator[LiveWorkspace]:
    """Start the sandbox of a workspace, and stop it at the end of the context."""
    from pier.gateway import Gateway
    from pier.gateway.providers import Directory, key_variables

    config, variables, owner = workspace.config, workspace.environment(), workspace.root.stat()
    environ = {**os.environ, **variables}
    hidden = frozenset() if config.direct else key_variables()
    env = {name: value for name, value in variables.items() if name not in hidden}
    async with AsyncExitStack() as stack:
        opened = await stack.enter_async_context(open_services(config.backend, label=f"workspace {workspace.root}"))
        gateway = await stack.enter_async_context(Gateway(providers=Directory.load(environ)))
        services = replace(opened, gateway=gateway, environ=environ)
        redactor = Redactor(tuple(secret_values(variables, environ, given=True)))
        record = TrialRecord(new_directory(workspace.state / "runs"), redactor)
        record.open()
        stack.callback(record.close)
        agents, mounts = await install_agents(config.agents, say)
        environment = await stack.enter_async_context(_opened(workspace, services, record, agents, mounts, say))
        identity = await _identify(workspace, environment, owner)
        placed = PlacedFiles(workspace.pier / PLACED)
        placed.load()
        live = LiveWorkspace(workspace, environment, services, gateway, agents, identity, env, redactor, placed)
        if not config.direct:
            live.shell = live.open_session()
            listener = await environment.sandbox.listen(GATEWAY_PORT, gateway.protocol_factory())
            stack.push_async_callback(listener.close)
        await live.set_up_agents()
        await live.adopt()
        environment.before = await environment.sandbox.changes()
        yield live


@asynccontextmanager
async def _opened(
    workspace: Workspace,
    services: TrialServices,
    record: TrialRecord,
    agents: Sequence[InstalledAgent],
    mounts: Sequence[Mount],
    say: Say,
) -> AsyncIterator[TaskSandbox]:
    config, backend = workspace.config, services.backend
    _check_links(workspace)
    task = workspace_task(workspace)
    await check_support(task, backend, SandboxChoice(image=config.image))
    capabilities = await backend.capabilities()
    network = _network(workspace, task, agents, public="public" in capabilities.networks)
    check_network(network, capabilities, backend.name)
    if config.mounted and not capabilities.bind_mounts:
        raise WorkspaceError(
            f"the backend {backend.name} cannot mount a directory", hint="pier start --no-mount", code="no-mounts"
        )
    say("getting the image")
    starter, plan, workdir = await prepare(workspace, task, services, record, say)
    image = await starter.get_image(plan)
    fresh = not config.seeded
    if fresh and config.mounted:
        say("copying the image's files")
        await state.seed(workspace, starter, plan, network.baseline, workdir)
    await _recover(workspace, starter, plan, say)
    kept = workspace.pier / STATE
    if config.image_digest != image.digest and has_state(kept):
        kept.rename(new_directory(workspace.pier / "older-state") / STATE)
        say("the image has changed: saved changes outside of the workspace are in .pier/older-state")
    own = [*_own_mounts(workspace, workdir), *mounts, *(Mount.parse(text, "mounts") for text in config.mounts)]
    say("starting the sandbox")
    try:
        async with starter.open(_for_live(plan, config, fresh), network.baseline, mounts=own) as (sandbox, _):
            if fresh:
                await prepare_step(starter, 0, sandbox, workdir)
            elif has_state(kept):
                await restore_state(sandbox, kept)
            user = user_text(task.steps[0].agent.user) or image.config.user or None
            await state.fill(workspace, sandbox, workdir, user, fresh=fresh)
            if plan.table.healthcheck is not None:
                say("waiting for the health check")
                await wait_until_healthy(sandbox, plan.table.healthcheck, cwd=workdir)
            if fresh:
                await state.note_seed(workspace, sandbox, workdir)
            if len(sandbox.services()) == 1:  # only now: a recovery must not take a half-filled sandbox for user files
                write(workspace.state / RUNNING, sandbox.id, mode=0o600)
            config.workdir, config.image_digest, config.seeded = workdir, image.digest, True
            workspace.save()
            environment = TaskSandbox(sandbox, workdir, starter, network, network.baseline)
            await environment.switch_network(network.steps[0].agent)
            yield environment
    finally:
        (workspace.state / RUNNING).unlink(missing_ok=True)


def _own_mounts(workspace: Workspace, workdir: str) -> list[Mount]:
    workspace.agent_logs.mkdir(exist_ok=True)
    workspace.agent_logs.chmod(0o777)
    logs = Mount(AGENT_LOGS, workspace.agent_logs, read_only=False)
    return [logs, Mount(workdir, workspace.root, read_only=False)] if workspace.config.mounted else [logs]


def _check_links(workspace: Workspace) -> None:
    """Refuse symbolic links in place of `.pier` and `.pier/agent`, which is mounted and made writable for all users."""
    for path in (workspace.pier, workspace.agent_logs):
        if path.is_symlink():
            raise WorkspaceError(
                f"{path} is a link", hint=f"rm {path}, or move its target there", code="workspace-link"
            )


def _for_live(plan: SandboxPlan, config: WorkspaceConfig, fresh: bool) -> SandboxPlan:
    """The plan of the sandbox: without the image's content and its working directory if the directory is mounted."""
    if not config.mounted:
        return plan if fresh else replace(plan, content=None)
    return replace(plan, content=None, table=plan.table.model_copy(update={"workdir": None}))


def _network(workspace: Workspace, task: Task, agents: Sequence[InstalledAgent], *, public: bool) -> NetworkPlan:
    """The task's network policy; without a task, public access if the backend supports it."""
    direct = workspace.config.direct
    hosts = tuple(host for each in agents for host in each.agent.reach({}, {}, direct=direct))
    override = NetworkPolicy("public" if public else "none") if workspace.config.task_path is None else None
    return plan_network(task.config.environment, task.steps, override=override, agent_hosts=hosts)


async def seed_host(workspace: Workspace, task: Task | None, say: Say) -> None:
    """Copy the image's working directory into a workspace without a sandbox; the task's files if the image is not
    available."""
    if task is not None:
        try:
            async with open_services(workspace.config.backend, label=f"workspace {workspace.root}") as opened:
                services = replace(opened, environ={**os.environ, **workspace.environment()})
                record = TrialRecord(new_directory(workspace.state / "runs"), Redactor())
                starter, plan, workdir = await prepare(workspace, task, services, record, say)
                workspace.config.workdir = workdir
                network = plan_network(task.config.environment, task.steps)
                await state.seed(workspace, starter, plan, network.baseline, workdir)
        except PierError as error:
            say(f"the image is not available ({error}): copying the task's files")
            state.copy_environment(task.environment_dir, workspace.root)
    await asyncio.to_thread(keep_seed, workspace)
    workspace.config.seeded = True
    workspace.save()


async def _identify(workspace: Workspace, environment: TaskSandbox, owner: os.stat_result) -> SandboxUser:
    """Choose the user that commands run as, so that their files belong to the owner of the workspace."""
    sandbox, step = environment.sandbox, environment.task.steps[0]
    chosen = user_text(step.agent.user)
    image_user = chosen or sandbox.spec.image.config.user or "root"
    home = await home_of(sandbox, image_user)
    if await _made_by(workspace, sandbox, image_user) == owner.st_uid:
        return SandboxUser(chosen, home)
    if image_user.partition(":")[0] in ("root", "0"):
        return SandboxUser(chosen, home, adopt=(owner.st_uid, owner.st_gid))
    if not workspace.config.mounted:
        return SandboxUser(chosen, home)
    if await _made_by(workspace, sandbox, "0") == owner.st_uid:
        return SandboxUser("0", home)
    return SandboxUser(f"{owner.st_uid}:{owner.st_gid}", home)


async def _made_by(workspace: Workspace, sandbox: Sandbox, user: str) -> int:
    """The uid on this machine of files that a user of the sandbox creates; -1 if unknown."""
    probe = workspace.agent_logs / _PROBE
    probe.unlink(missing_ok=True)
    try:
        await sandbox.write_file(f"{AGENT_LOGS}/{_PROBE}", b"", user=user)
        return probe.stat().st_uid
    except (OSError, SandboxError):
        return -1
    finally:
        with suppress(OSError, SandboxError):
            await sandbox.remove(f"{AGENT_LOGS}/{_PROBE}")
