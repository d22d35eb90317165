"""A running workspace: its sandbox, its gateway, and the commands that people run in it.

The workspace's directory is mounted at the image's working directory, so that both sides see every edit at once. Files
made inside belong to the directory's owner: commands run as the user inside that stands for the owner where there is
one, else as root, and files are given to the owner when a command ends.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pier.agent.contract import AGENT_LOGS, PACK_PATH, AgentRun, Launch
from pier.agent.packed import DEFAULT_PATH
from pier.endpoint import GATEWAY_PORT, Endpoint
from pier.errors import SandboxError, WorkspaceError
from pier.files import write, write_json
from pier.lease import sweep
from pier.network.policy import NetworkPolicy
from pier.redact import Redactor
from pier.sandbox.contract import Mount, OnOutput, Process, Sandbox, SandboxSpec
from pier.secret import secret_values
from pier.task import Origin, Task, load_task
from pier.trial.agent import RECORDING, describe_run, home_of
from pier.trial.environment import SandboxStarter, ServiceLogs, TaskSandbox, prepare_step, wait_until_healthy
from pier.trial.plan import NetworkPlan, SandboxPlan, agent_plan, check_network, check_support, plan_network
from pier.trial.record import TrialRecord
from pier.trial.spec import AgentChoice, SandboxChoice, TrialServices, TrialSpec, open_services, user_text
from pier.verifier.secure import make_folders
from pier.workspace import state
from pier.workspace.agents import (
    BIN,
    HOMES_IN_LOGS,
    LOG_HOMES,
    InstalledAgent,
    PlacedFiles,
    add_programs,
    add_skills,
    agent_of_image,
    install_agents,
    recognise,
)
from pier.workspace.diff import keep_seed, marks_of
from pier.workspace.state import SAVE_FAILURES, check_directory, merge_tree, remove_tree, replace_tree
from pier.workspace.workspace import PIER, TASK, Workspace, WorkspaceConfig, WorkspaceSession, new_directory

if TYPE_CHECKING:
    from pier.gateway import Gateway
    from pier.gateway.session import Session

DEFAULT_WORKDIR = "/app"
"""Where the directory is mounted if the image names no working directory, or the root."""
STATE = "state"
RUNNING = "sandbox"
"""The file that holds the id of the sandbox while its files are nowhere else: after a crash it is opened again."""
REPLACED = "replaced"
"""Files of the directory that `pier stop` replaced with those of the sandbox, if they had been edited."""
_COPIED = "copied.json"
_PROBE = ".pier-owner"
_ADOPT = 'find "$1" -xdev ! -path "$1/.pier" ! -user "$2" -exec chown -h "$2:$3" {} +'
_SAFE_GIT = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class SandboxUser:
    """Whom commands run as. `user` None is the image's own; `adopt` gives files to the owner afterwards."""

    user: str | None
    home: str
    adopt: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class CommandOrder:
    """A command that a client wants run. `cwd` is below the workspace's directory."""

    argv: tuple[str, ...]
    cwd: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    tty: bool = False


@dataclass(slots=True)
class LiveWorkspace:
    """What a supervisor holds."""

    workspace: Workspace
    environment: TaskSandbox
    services: TrialServices
    gateway: Gateway
    agents: list[InstalledAgent]
    identity: SandboxUser
    env: Mapping[str, str]
    redactor: Redactor
    shell: Session | None
    """The gateway's session for commands that are not agents: someone may start one from a shell."""
    placed: PlacedFiles

    @property
    def sandbox(self) -> Sandbox:
        return self.environment.sandbox

    def path_inside(self, relative: str) -> str:
        return f"{self.environment.workdir.rstrip('/')}/{relative}".rstrip("/") or "/"

    def agent_of(self, order: CommandOrder) -> InstalledAgent | None:
        """The agent that a command starts: one of the workspace's, or the image's own."""
        name = recognise(order.argv[0])
        known = next((one for one in self.agents if one.name == name), None)
        return known or (agent_of_image(name) if name else None)

    @asynccontextmanager
    async def session(self, order: CommandOrder) -> AsyncIterator[Recorded]:
        """A recorded session for a command that starts an agent; others share one that is not kept."""
        agent, config = self.agent_of(order), self.workspace.config
        if agent is None:
            yield Recorded(None, endpoint_of(self.shell))
            return
        facts = {"tty": order.tty, "model": config.model, "version": agent.version}
        kept = self.workspace.new_session(agent.name, list(order.argv), **facts)
        if config.direct:
            yield Recorded(kept, None)
            return
        session = open_session(self.gateway, config.model, kept.directory / RECORDING, self.closed_book, self.redactor)
        try:
            endpoint = endpoint_of(session)
            await self._place([agent], endpoint)
            yield Recorded(kept, endpoint)
        finally:
            await asyncio.shield(session.close())
            if self.shell is not None:
                with suppress(SandboxError):
                    await self._place([agent], endpoint_of(self.shell))

    @property
    def closed_book(self) -> bool:
        return self.environment.network.mode != "public"

    async def spawn(self, order: CommandOrder, endpoint: Endpoint | None, on_output: OnOutput) -> Process:
        """Start a command in the workspace."""
        agent = self.agent_of(order)
        program = self.launch_of(agent, endpoint).argv if agent else []
        return await self.sandbox.spawn(
            [*(program or order.argv[:1]), *order.argv[1:]],
            cwd=self.path_inside(order.cwd),
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
        spec = TrialSpec("workspace", task, self.workspace.pier, AgentChoice(installed.name))
        run = describe_run(
            spec,
            task.steps[0],
            installed.agent,
            workdir=self.environment.workdir,
            home=AGENT_LOGS if installed.name in HOMES_IN_LOGS else self.identity.home,
            env={},
            solution_env={},
            environ=self.environment.starter.environ,
        )
        return replace(run, endpoint=endpoint, seconds=None, warn=self.environment.record.warn)

    def command_env(self, endpoint: Endpoint | None, agent: InstalledAgent | None) -> dict[str, str]:
        """The variables of a command: those of every agent, so that one can be started from a shell too, and last
        those of the agent that it starts."""
        spec = self.sandbox.spec
        path = spec.env.get("PATH") or spec.image.config.env.get("PATH") or DEFAULT_PATH
        env = {"HOME": self.identity.home, "TASK_WORKSPACE": self.environment.workdir, **LOG_HOMES}
        if self.identity.adopt:
            env |= _SAFE_GIT
        for one in (*self.agents, *([agent] if agent else [])):
            env |= self.launch_of(one, endpoint).env
        env |= self.env
        tools = f":{PACK_PATH}/tools" if self.agents else ""
        env["PATH"] = f"{BIN}:{env.get('PATH', path)}{tools}"
        return env

    async def _place(self, agents: Sequence[InstalledAgent], endpoint: Endpoint | None) -> None:
        for installed in agents:
            launch = self.launch_of(installed, endpoint)
            await self.placed.place(self.sandbox, launch.files, (self.identity.home, AGENT_LOGS))

    async def set_up_agents(self) -> None:
        """Put the settings, skills and programs of all agents into the sandbox."""
        endpoint = endpoint_of(self.shell)
        await make_folders(self.sandbox, dict.fromkeys(LOG_HOMES.values(), 0o777))
        await self._place(self.agents, endpoint)
        programs: dict[str, Sequence[str]] = {}
        for installed in self.agents:
            await add_skills(self.sandbox, installed.agent, self.run_of(installed, None), self.workspace.config.skills)
            await self._keep_logs(installed)
            programs |= dict.fromkeys(installed.programs, self.launch_of(installed, endpoint).argv)
        await add_programs(self.sandbox, programs)

    async def _keep_logs(self, installed: InstalledAgent) -> None:
        """Session logs that no variable moves to the kept directory get there by a link."""
        for source, target in getattr(installed.agent, "logs", ()) if installed.name not in HOMES_IN_LOGS else ():
            place = f"{self.identity.home.rstrip('/')}/{source}"
            script = 'mkdir -p "$2" "${1%/*}" && { [ -e "$1" ] || ln -s "$2" "$1"; }'
            command = ["/bin/sh", "-c", script, "sh", place, f"{AGENT_LOGS}/{target}"]
            await self.sandbox.exec(command, user=self.identity.user)

    async def adopt(self) -> None:
        """Give what commands made in the mounted directories to their owner."""
        if self.identity.adopt is None:
            return
        uid, gid = map(str, self.identity.adopt)
        for path in (*([self.environment.workdir] if self.workspace.config.mounted else []), AGENT_LOGS):
            result = await self.sandbox.exec(["/bin/sh", "-c", _ADOPT, "sh", path, uid, gid], user="0")
            if not result.ok:
                self.environment.record.warn(f"cannot give the files in {path} to their owner: {result.error_text}")


async def save(workspace: Workspace, sandbox: Sandbox, workdir: str) -> str | None:
    """Keep what is in the sandbox alone, for the next start: what differs from the image outside of the mounted
    directories, and the files of a workspace that is not mounted. A note if there is something to know."""
    await state.keep(sandbox, workspace.pier / STATE)
    return await _copy_back(workspace, sandbox, workdir) if not workspace.config.mounted else None


async def _copy_back(workspace: Workspace, sandbox: Sandbox, workdir: str) -> str | None:
    """Copy the files of a workspace that is not mounted out to its directory, in place of the files there. If some of
    those were made or edited since the start, the old files are kept: a note says where."""
    scratch = new_directory(workspace.pier / "incoming")
    await sandbox.download(workdir, scratch / "files")
    check_directory(scratch / "files")
    edited = await asyncio.to_thread(_edited_outside, workspace, scratch / "files")
    aside = new_directory(workspace.pier / (REPLACED if edited else "incoming"))
    await asyncio.to_thread(replace_tree, scratch / "files", workspace.root, aside)
    await asyncio.to_thread(remove_tree, scratch)
    if not edited:
        await asyncio.to_thread(remove_tree, aside)
        return None
    more = f" and {len(edited) - 1} more" if len(edited) > 1 else ""
    return f"{edited[0]}{more} changed in the directory while the workspace ran: the old files are in {aside}"


async def _recover(workspace: Workspace, starter: SandboxStarter, plan: SandboxPlan, say: Say) -> None:
    """Save what a sandbox held whose supervisor was killed, or did not manage to save it."""
    mark, config, backend = workspace.state / RUNNING, workspace.config, starter.services.backend
    try:
        id = mark.read_text()
    except FileNotFoundError:
        return
    if config.seeded and config.workdir:
        say("the workspace was not stopped: saving what its sandbox held")
        image = await starter.get_image(plan)
        if image.digest != config.image_digest:
            raise WorkspaceError(
                "cannot save what the sandbox of this workspace held when it was not stopped: its image was another",
                hint=f"start with the image it had (--image, or the task as it was); rm {mark} gives the files up",
                code="not-recovered",
            )
        spec = SandboxSpec(image)
        try:
            async with await backend.reopen(id, spec) as sandbox:
                if note := await save(workspace, sandbox, config.workdir):
                    say(f"warning: {note}")
        except SAVE_FAILURES as error:
            if not isinstance(error, SandboxError) or error.code != "cannot_reopen":
                raise WorkspaceError(
                    f"cannot save what the sandbox of this workspace held when it was not stopped: {error}",
                    hint=f"pier start tries again; rm {mark} gives it up",
                    code="not-recovered",
                    blame="infra",
                ) from error
            say(f"warning: what was only in the sandbox of the last run is lost: {error}")
    mark.unlink()
    await sweep(dict.fromkeys(backend.kinds, backend.destroy))


@dataclass(frozen=True, slots=True)
class Recorded:
    """A command's session: where it is kept, and how it reaches its model."""

    kept: WorkspaceSession | None
    endpoint: Endpoint | None


def open_session(
    gateway: Gateway, model: str | None, recording: Path | None, closed_book: bool, redactor: Redactor
) -> Session:
    """A session at the gateway for one command or for all shells of a workspace."""
    return gateway.session(model, recording=recording, closed_book=closed_book, redactor=redactor)


def endpoint_of(session: Session | None) -> Endpoint | None:
    """How a command reaches its model. Without a chosen model the agent's own choice counts."""
    if session is None:
        return None
    endpoint = session.endpoint()
    return endpoint if session.terms.model is not None else replace(endpoint, model="")


def workspace_task(workspace: Workspace, *, verify: bool = False) -> Task:
    """The workspace's task as it is on disk now; one with an empty instruction for a workspace of an image."""
    config = workspace.config
    if config.task_path is not None:
        if not config.task_path.is_dir():
            raise WorkspaceError(
                f"the task {config.task_path} of this workspace is not there",
                hint="bring it back, or start another workspace: pier start TASK -d DIR",
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
    """`task` with a working directory that can be mounted."""
    table = task.config.environment.model_copy(update={"workdir": workdir})
    return replace(task, config=task.config.model_copy(update={"environment": table}))


def sandbox_choice(workspace: Workspace) -> SandboxChoice:
    config = workspace.config
    return SandboxChoice(
        backend=config.backend, image=config.image, hidden=(workspace.pier,), keep=workspace.state / RUNNING
    )


def parse_mount(text: str) -> Mount:
    """A mount as `SOURCE:TARGET[:ro|rw]` with absolute paths."""
    source, _, rest = text.partition(":")
    target, _, mode = rest.partition(":")
    return Mount(target, Path(source), read_only=mode == "ro")


@asynccontextmanager
async def open_live(workspace: Workspace, say: Say) -> AsyncIterator[LiveWorkspace]:
    """Start the sandbox of a workspace; it ends with the context."""
    from pier.gateway import Gateway
    from pier.gateway.providers import Directory, key_variables

    config, given, owner = workspace.config, workspace.environment(), workspace.root.stat()
    environ = {**os.environ, **given}
    hidden = frozenset() if config.direct else key_variables()
    env = {name: value for name, value in given.items() if name not in hidden}
    async with AsyncExitStack() as stack:
        opened = await stack.enter_async_context(open_services(config.backend, label=f"workspace {workspace.root}"))
        gateway = await stack.enter_async_context(Gateway(providers=Directory.load(environ)))
        services = replace(opened, gateway=gateway, environ=environ)
        redactor = Redactor(tuple(secret_values(given, environ, given=True)))
        record = TrialRecord(new_directory(workspace.state / "runs"), redactor)
        record.open()
        stack.callback(record.close)
        agents, mounts = await install_agents(config.agents, say)
        environment = await stack.enter_async_context(_opened(workspace, services, record, agents, mounts, say))
        identity = await _identify(workspace, environment, owner)
        shell = None
        if not config.direct:
            closed = environment.network.mode != "public"
            shell = open_session(gateway, config.model, None, closed, redactor)
            listener = await environment.sandbox.listen(GATEWAY_PORT, gateway.protocol_factory())
            stack.push_async_callback(listener.close)
        placed = PlacedFiles(workspace.pier / "placed.json")
        placed.load()
        live = LiveWorkspace(workspace, environment, services, gateway, agents, identity, env, redactor, shell, placed)
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
    config, choice, backend = workspace.config, sandbox_choice(workspace), services.backend
    _check_links(workspace)
    task = workspace_task(workspace)
    await check_support(task, backend, choice)
    capabilities = await backend.capabilities()
    network = _network(workspace, task, agents, public="public" in capabilities.networks)
    check_network(network, capabilities, backend.name)
    if config.mounted and not capabilities.bind_mounts:
        raise WorkspaceError(
            f"the backend {backend.name} cannot mount a directory", hint="pier start --no-mount", code="no-mounts"
        )
    logs = ServiceLogs(record.directory / "services", record)
    starter = SandboxStarter(task, services, record, f"workspace-{config.id}", choice, logs, 1.0, say)
    plan = agent_plan(task, choice, starter.environ)
    say("getting the image")
    image = await starter.get_image(plan)
    record.image = image
    workdir = task.config.environment.workdir or image.config.workdir or "/"
    workdir = DEFAULT_WORKDIR if workdir == "/" else workdir
    task = in_directory(task, workdir)
    starter = replace(starter, task=task)
    plan = replace(plan, table=task.config.environment)
    fresh = not config.seeded
    if fresh and config.mounted:
        say("copying the image's files")
        await seed(workspace, starter, plan, network.baseline, workdir)
    kept = workspace.pier / STATE
    await _recover(workspace, starter, plan, say)
    if config.image_digest != image.digest and state.is_kept(kept):
        kept.rename(new_directory(workspace.pier / "older-state") / STATE)
        say("the image has changed: what was kept outside of the workspace is in .pier/older-state")
    workspace.agent_logs.mkdir(exist_ok=True)
    workspace.agent_logs.chmod(0o777)
    own = [Mount(AGENT_LOGS, workspace.agent_logs, read_only=False)]
    if config.mounted:
        own.append(Mount(workdir, workspace.root, read_only=False))
    own += [*mounts, *map(parse_mount, config.mounts)]
    say("starting the sandbox")
    try:
        async with starter.open(_for_live(plan, config, fresh), network.baseline, mounts=own) as (sandbox, _):
            environment = TaskSandbox(sandbox, workdir, starter, network, network.baseline)
            if fresh:
                await prepare_step(starter, 0, sandbox, workdir)
            elif state.is_kept(kept):
                await state.restore(sandbox, kept)
            await _fill(workspace, sandbox, workdir, fresh=fresh)
            if plan.table.healthcheck is not None:
                say("waiting for the health check")
                await wait_until_healthy(sandbox, plan.table.healthcheck, cwd=workdir)
            if fresh:
                await _finish_seed(workspace, sandbox, workdir)
            if len(sandbox.services()) == 1:  # not before everything is in: it would be taken for the user's files
                write(workspace.state / RUNNING, sandbox.id, mode=0o600)
            config.workdir, config.image_digest, config.seeded = workdir, image.digest, True
            workspace.save()
            await environment.switch_network(network.steps[0].agent)
            yield environment
    finally:
        (workspace.state / RUNNING).unlink(missing_ok=True)


def _check_links(workspace: Workspace) -> None:
    """Refuse a workspace whose own directories lead elsewhere: one is opened to all users and mounted."""
    for path in (workspace.pier, workspace.agent_logs):
        if path.is_symlink():
            raise WorkspaceError(
                f"{path} is a link", hint=f"rm {path}, or move what it leads to there", code="workspace-link"
            )


async def _fill(workspace: Workspace, sandbox: Sandbox, workdir: str, *, fresh: bool) -> None:
    """Copy the files of a workspace that is not mounted into its sandbox."""
    if workspace.config.mounted:
        return
    await asyncio.to_thread(_note_copied, workspace)
    if not fresh:
        await _copy_in(sandbox, workspace.root, workdir)


def _for_live(plan: SandboxPlan, config: WorkspaceConfig, fresh: bool) -> SandboxPlan:
    """The plan of the sandbox itself: what is mounted comes with its files, and keeps its owner."""
    if not config.mounted:
        return plan if fresh else replace(plan, content=None)
    return replace(plan, content=None, table=plan.table.model_copy(update={"workdir": None}))


def _network(workspace: Workspace, task: Task, agents: Sequence[InstalledAgent], *, public: bool) -> NetworkPlan:
    """The task's own policy; a workspace of an image has the network that the backend can give."""
    direct = workspace.config.direct
    hosts = tuple(host for one in agents for host in one.agent.reach({}, {}, direct=direct))
    override = None
    if workspace.config.task_path is None:
        override = NetworkPolicy("public" if public else "none")
    return plan_network(task.config.environment, task.steps, override=override, agent_hosts=hosts)


async def seed(
    workspace: Workspace, starter: SandboxStarter, plan: SandboxPlan, policy: NetworkPolicy, workdir: str
) -> None:
    """Copy the image's working directory and the task's own files into the workspace's directory. Files that are there
    already stay: the user asked for that with --force."""
    scratch = new_directory(workspace.pier / "incoming")
    async with starter.open(plan, policy, "seed") as (sandbox, _):
        if await sandbox.exists(workdir):
            await sandbox.download(workdir, scratch / "files")
    if os.path.lexists(scratch / "files"):
        await asyncio.to_thread(merge_tree, scratch / "files", workspace.root)
    await asyncio.to_thread(remove_tree, workspace.pier / "incoming")


async def _finish_seed(workspace: Workspace, sandbox: Sandbox, workdir: str) -> None:
    """Note what the workspace began with."""
    if workspace.config.mounted:
        await asyncio.to_thread(keep_seed, workspace)
        return
    scratch = new_directory(workspace.pier / "incoming")
    if any(entry.name not in (PIER, TASK) for entry in workspace.root.iterdir()):
        await _copy_in(sandbox, workspace.root, workdir, clear=False)
    await sandbox.download(workdir, scratch / "files")
    await asyncio.to_thread(keep_seed, workspace, scratch / "files")
    await asyncio.to_thread(remove_tree, workspace.pier / "incoming")


def _note_copied(workspace: Workspace) -> None:
    """Note which files are about to be copied in, so that later edits of them are seen."""
    write_json(workspace.pier / _COPIED, marks_of(workspace.root), durable=False)


def _edited_outside(workspace: Workspace, incoming: Path) -> list[str]:
    """The files of the directory that are neither as they were when copied in nor as they come back."""
    try:
        copied = json.loads((workspace.pier / _COPIED).read_text())
    except (OSError, ValueError):
        copied = {}
    present = marks_of(workspace.root)
    edited = [path for path, mark in present.items() if mark is None or mark != copied.get(path)]
    if not edited:
        return []
    back = marks_of(incoming)
    return sorted(path for path in edited if present[path] is None or present[path] != back.get(path))


async def _copy_in(sandbox: Sandbox, source: Path, workdir: str, *, clear: bool = True) -> None:
    if clear:
        await clear_directory(sandbox, workdir)
    await sandbox.upload(source, workdir, leave_out=(PIER,))


async def clear_directory(sandbox: Sandbox, path: str) -> None:
    """Remove what is in a directory of the sandbox."""
    if await sandbox.exists(path):
        for entry in await sandbox.list_dir(path):
            await sandbox.remove(f"{path}/{entry.name}")


async def _identify(workspace: Workspace, environment: TaskSandbox, owner: os.stat_result) -> SandboxUser:
    """Find out whom commands must run as, so that their files belong to the owner of the workspace."""
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
    """Which user of this machine owns what a user inside makes; -1 if that cannot be seen."""
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
