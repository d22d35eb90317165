"""The contract of agents: their inputs, the command that they run, and its execution; and the built-in agents by name.

A command receives a signal shortly before its deadline and is killed at it. If it ends earlier, the processes that it
started keep running: a task may ask for a server.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pier.endpoint import Endpoint
from pier.errors import UsageError
from pier.plugin import find, names, nearest
from pier.sandbox.contract import Mount, OnOutput, Process, Result, Sandbox

if TYPE_CHECKING:
    from pier.task.model import McpServerTable

GRACE = 10.0
"""Seconds between the signal and the deadline, at most."""
SHARE = 0.05
"""Maximum of the same, as a share of the agent's time."""

PACK_PATH = "/opt/pier/agent"
"""Mount point of an agent's pack in every sandbox, read-only."""

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

AGENT_LOGS = "/logs/agent"
"""Directory of the agent's own logs, which the trial's `agent/` directory collects."""


@dataclass(frozen=True, slots=True)
class AgentRun:
    """The inputs of one run of an agent. `seconds` is its time limit; `options` are the user's kwargs."""

    instruction: str
    workdir: str
    endpoint: Endpoint | None = None
    user: str | None = None
    home: str = "/root"
    env: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    mcp_servers: tuple[McpServerTable, ...] = ()
    """MCP servers, with templates in their headers filled in."""
    skills_dir: str | None = None
    seconds: float | None = None
    outside: Endpoint | None = None
    """The model's endpoint outside the sandbox, for agents that declare `outside`."""
    solution: Path | None = None
    """The task's solution directory on the host; only set for the agent `oracle`."""
    budget: Mapping[str, float] = field(default_factory=dict)
    """The limits of its model session, by name."""
    warn: Callable[[str], None] = lambda _: None
    """Receives warnings for the trial's result."""

    def limits(self) -> dict[str, str]:
        """Variables with the agent's remaining time and its budget."""
        env = {f"PIER_MAX_{name.upper()}": f"{value:.12g}" for name, value in self.budget.items()}
        if self.seconds is not None:
            env |= {"PIER_SECONDS": str(int(self.seconds)), "PIER_DEADLINE": str(int(time.time() + self.seconds))}
        return env


@dataclass(frozen=True, slots=True)
class AgentFile:
    """A file that must be in the sandbox before the agent starts."""

    path: str
    data: bytes
    mode: int = 0o644

    @classmethod
    def json(cls, path: str, value: Any) -> AgentFile:
        """A file with `value` as JSON."""
        return cls(path, json.dumps(value, indent=2).encode())


@dataclass(frozen=True, slots=True)
class Launch:
    """The command of a run: its argv, its variables in addition to the sandbox's, and files to write first."""

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    files: tuple[AgentFile, ...] = ()
    stdin: bytes | None = None


@dataclass(frozen=True, slots=True)
class PackSpec:
    """The package that a pack is built from. `source` is `npm` or `pypi`; `version` None is the newest."""

    source: str
    package: str
    version: str | None = None
    extras: tuple[str, ...] = ()
    """Packages to install with it."""
    program: str = ""
    """npm: path below `node_modules` of an agent that is a single native file, with `{arch}` for npm's architecture."""
    pythons: tuple[str, ...] = ("3.12", "3.13", "3.11")
    """pypi: supported versions of Python, the preferred one first."""


class Agent(ABC):
    """An agent. Subclasses define its command; the base class runs it."""

    name: ClassVar[str]
    pack: ClassVar[PackSpec | None] = None
    version: str | None = None
    """The version of an agent without a pack; None for pier's own agents."""
    dialect: ClassVar[str | None] = None
    """Its wire dialect (`chat`, `responses`, `anthropic`, `gemini`); None for agents without a model."""
    hosts: ClassVar[tuple[str, ...]] = ()
    """Hosts that it needs in addition to the gateway; usually none."""
    options: ClassVar[tuple[str, ...]] = ()
    """Names of its options; others are refused."""
    outside: ClassVar[bool] = False
    """Whether it calls its model from outside the sandbox."""
    direct: ClassVar[bool] = False
    """Whether it supports --direct: it can call its provider itself, and pier can read its session log."""
    exit_code_counts: ClassVar[bool] = True
    """Whether an exit code other than 0 is the agent's failure. The trial is graded either way."""
    soft_stop: ClassVar[int] = signal.SIGTERM
    """The signal that it receives shortly before its deadline."""

    def reach(self, options: Mapping[str, Any], env: Mapping[str, str], *, direct: bool) -> tuple[str, ...]:
        """The hosts that it needs with these options and variables; with `direct` it calls its provider itself."""
        return self.hosts

    def mounts(self, options: Mapping[str, Any]) -> tuple[Mount, ...]:
        """Mounts for these options, in addition to the pack."""
        return ()

    @abstractmethod
    def launch(self, run: AgentRun) -> Launch:
        """Return the command of a run. Has no side effects."""

    async def run(self, sandbox: Sandbox, run: AgentRun, on_output: OnOutput | None = None) -> Result:
        """Write the files and run the command to its end or deadline."""
        launch = self.launch(run)
        for file in launch.files:
            await sandbox.write_file(file.path, file.data, mode=file.mode, owner=run.user)
        env = {**run.limits(), **launch.env, **run.env}
        return await self.execute(sandbox, run, launch, env, on_output)

    async def execute(
        self, sandbox: Sandbox, run: AgentRun, launch: Launch, env: Mapping[str, str], on_output: OnOutput | None
    ) -> Result:
        """Run the command to its end or deadline, which sets `timed_out`. A cancellation kills its process tree."""
        process = await sandbox.spawn(
            list(launch.argv),
            cwd=run.workdir,
            env=env,
            user=run.user,
            stdin=launch.stdin is not None,
            on_output=on_output,
        )
        feeding = asyncio.ensure_future(_feed(process, launch.stdin))
        waiting = asyncio.ensure_future(process.wait())
        try:
            return await _until_deadline(process, waiting, run.seconds, self.soft_stop)
        except BaseException:
            await asyncio.shield(process.kill())
            raise
        finally:
            feeding.cancel()
            waiting.cancel()
            await asyncio.gather(feeding, waiting, return_exceptions=True)


async def _feed(process: Process, data: bytes | None) -> None:
    if data is not None:
        await process.write(data)
        await process.close_stdin()


async def _until_deadline(
    process: Process, waiting: asyncio.Future[Result], seconds: float | None, soft_stop: int
) -> Result:
    if seconds is None:
        return await waiting
    grace = min(GRACE, seconds * SHARE)
    done, _ = await asyncio.wait({waiting}, timeout=seconds - grace)
    if done:
        return waiting.result()
    await process.signal(soft_stop)
    await asyncio.wait({waiting}, timeout=grace)
    await process.kill()
    return replace(await waiting, timed_out=True)


AGENTS: dict[str, str] = {
    "oracle": "pier.agent.oracle:OracleAgent",
    "nop": "pier.agent.oracle:NopAgent",
    "command": "pier.agent.command:CommandAgent",
    "claude-code": "pier.agent.claude_code:ClaudeCode",
    "codex": "pier.agent.codex:Codex",
    "gemini-cli": "pier.agent.gemini_cli:GeminiCli",
    "opencode": "pier.agent.opencode:OpenCode",
    "mini-swe-agent": "pier.agent.mini_swe_agent:MiniSweAgent",
    "qwen-code": "pier.agent.qwen_code:QwenCode",
    "goose": "pier.agent.goose:Goose",
    "pi": "pier.agent.pi:Pi",
    "kimi": "pier.agent.kimi:Kimi",
    "copilot": "pier.agent.copilot:Copilot",
    "cline": "pier.agent.cline:Cline",
    "aider": "pier.agent.aider:Aider",
    "openhands": "pier.agent.openhands:OpenHands",
    "terminus-2": "pier.agent.terminus_2:Terminus2",
}
"""The built-in agents as `module:Class`."""


def find_agent(name: str) -> type[Agent]:
    """The class of an agent: built in, from an entry point (`pier.agents`) or `module:Class`. `name@version` selects
    the version of its pack."""
    plain, _, version = name.partition("@")
    kind = find("agent", plain, AGENTS)
    if not (isinstance(kind, type) and issubclass(kind, Agent)):
        from pier.agent.harbor import adapt, is_harbor_agent

        if not is_harbor_agent(kind):
            message = f"{name!r} is not an agent: expected a subclass of pier.agent.contract.Agent or Harbor's"
            raise UsageError(message, code="plugin")
        kind = adapt(kind)
    if not version:
        return kind
    if kind.pack is None:
        raise UsageError(f"cannot choose a version of the agent {plain!r}: it has no pack", hint=f"-a {plain}")
    return type(kind.__name__, (kind,), {"pack": replace(kind.pack, version=version)})


def pack_spec(name: str) -> PackSpec | None:
    """The pack of the agent `name` or `name@version`, if it has one."""
    return find_agent(name).pack


def resolved(name: str) -> str:
    """The name of an agent, with `@latest` replaced by the newest version in the registry."""
    plain, _, version = name.rpartition("@")
    if not plain or version != "latest":
        return name
    from pier.agent.pack.store import resolve

    spec = pack_spec(name)
    assert spec is not None
    return f"{plain}@{resolve(spec).version}"


def agent_names() -> list[str]:
    """The names of built-in agents and entry points."""
    return names("agent", AGENTS)


def check_options(agent: type[Agent], options: Mapping[str, Any]) -> None:
    """Raise `UsageError` for an option that the agent does not have."""
    for name in options:
        if name not in agent.options:
            near = nearest(name, agent.options)
            known = ", ".join(agent.options) or "none"
            raise UsageError(
                f"unknown option {name!r} for the agent {agent.name!r}: expected one of {known}",
                hint=f"--ak {near}=..." if near else None,
                code="agent_option",
            )
