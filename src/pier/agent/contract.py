"""The contract between a trial and an agent: the inputs of an agent, the command it wants to run, and how that runs;
and the agents by name, without importing any of them.

A command is asked to end shortly before its deadline and killed at it. One that ends by itself leaves what it started
running, as a task that wants a server up asks for.
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
"""At most how many seconds before its deadline an agent is asked to end."""
SHARE = 0.05
"""The part of its time that this may be."""


PACK_PATH = "/opt/pier/agent"
"""Where an agent's pack is mounted, read-only, in every sandbox on every backend."""

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

AGENT_LOGS = "/logs/agent"
"""Where an agent keeps its own logs; collected into the trial's `agent/` directory."""


def _ignore(text: str) -> None:
    """Discard a note."""


@dataclass(frozen=True, slots=True)
class AgentRun:
    """The inputs of one run of an agent. `seconds` is its time; `options` are its kwargs as the user gave them."""

    instruction: str
    workdir: str
    endpoint: Endpoint | None = None
    user: str | None = None
    home: str = "/root"
    env: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    mcp_servers: tuple[McpServerTable, ...] = ()
    """With their headers filled in."""
    skills_dir: str | None = None
    seconds: float | None = None
    outside: Endpoint | None = None
    """The same model for a caller outside the sandbox; only for agents that declare `outside`."""
    solution: Path | None = None
    """The task's solution directory on the host; only the agent `oracle` may look at it."""
    budget: Mapping[str, float] = field(default_factory=dict)
    """The limits of its model session, by name."""
    warn: Callable[[str], None] = _ignore
    """Receives warnings about a run, which the result lists."""

    def limits(self) -> dict[str, str]:
        """Variables with the agent's remaining time and its limits."""
        found = {f"PIER_MAX_{name.upper()}": f"{value:.12g}" for name, value in self.budget.items()}
        if self.seconds is not None:
            found |= {"PIER_SECONDS": str(int(self.seconds)), "PIER_DEADLINE": str(int(time.time() + self.seconds))}
        return found


@dataclass(frozen=True, slots=True)
class AgentFile:
    """A file that must be in the sandbox before the agent starts."""

    path: str
    data: bytes
    mode: int = 0o644

    @classmethod
    def json(cls, path: str, value: Any) -> AgentFile:
        """A file that holds `value` as JSON."""
        return cls(path, json.dumps(value, indent=2).encode())


@dataclass(frozen=True, slots=True)
class Launch:
    """The command to run: an argv, the variables it needs in addition to the sandbox's, and files to write first."""

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    files: tuple[AgentFile, ...] = ()
    stdin: bytes | None = None


@dataclass(frozen=True, slots=True)
class PackSpec:
    """The package that a pack is built from. `source` is `npm` or `pypi`; `version` None means the newest."""

    source: str
    package: str
    version: str | None = None
    extras: tuple[str, ...] = ()
    """Packages to install with it."""
    program: str = ""
    """npm: the one native file below `node_modules` that is the whole agent, with `{arch}` for npm's architecture."""
    pythons: tuple[str, ...] = ("3.12", "3.13", "3.11")
    """pypi: versions of Python that it runs on, the preferred one first."""


class Agent(ABC):
    """One agent. Subclasses say how to start it; the base class starts it."""

    name: ClassVar[str]
    pack: ClassVar[PackSpec | None] = None
    version: str | None = None
    """Its version if it comes in no pack; None for agents of pier's own."""
    dialect: ClassVar[str | None] = None
    """The wire dialect it speaks (`chat`, `responses`, `anthropic`, `gemini`); None for agents without a model."""
    hosts: ClassVar[tuple[str, ...]] = ()
    """Hosts that it needs beyond the gateway; usually none."""
    options: ClassVar[tuple[str, ...]] = ()
    """The names of the options it takes; others are refused by name."""
    outside: ClassVar[bool] = False
    """Whether it calls its model from outside the sandbox."""
    direct: ClassVar[bool] = False
    """Whether it may call its provider itself: it knows where that is, and pier reads the log that it keeps."""
    exit_code_counts: ClassVar[bool] = True
    """Whether an exit code other than 0 is the agent's failure; the trial is graded either way."""
    soft_stop: ClassVar[int] = signal.SIGTERM
    """The signal that asks it to end, shortly before its deadline."""

    def reach(self, options: Mapping[str, Any], env: Mapping[str, str], *, direct: bool) -> tuple[str, ...]:
        """The hosts that it needs with these options and variables; `direct` if no gateway stands before its model."""
        return self.hosts

    def mounts(self, options: Mapping[str, Any]) -> tuple[Mount, ...]:
        """The mounts that these options need in addition to the pack."""
        return ()

    @abstractmethod
    def launch(self, run: AgentRun) -> Launch:
        """The command for this run. Pure: touches nothing."""

    async def run(self, sandbox: Sandbox, run: AgentRun, on_output: OnOutput | None = None) -> Result:
        """Write the files, run the command to its end or deadline, and give its result."""
        launch = self.launch(run)
        for file in launch.files:
            await sandbox.write_file(file.path, file.data, mode=file.mode, owner=run.user)
        env = {**run.limits(), **launch.env, **run.env}
        return await self.execute(sandbox, run, launch, env, on_output)

    async def execute(
        self, sandbox: Sandbox, run: AgentRun, launch: Launch, env: Mapping[str, str], on_output: OnOutput | None
    ) -> Result:
        """Run the command to its end or its deadline; a deadline is reported in the result. A cancel kills its tree."""
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
    """The class of the agent called `name`: built in, by entry point (`pier.agents`) or `module:Class`. With a version
    (`name@version`) it comes in a pack of that version."""
    plain, _, version = name.partition("@")
    found = find("agent", plain, AGENTS)
    if not (isinstance(found, type) and issubclass(found, Agent)):
        from pier.agent.harbor import adapt, is_harbor_agent

        found = adapt(found) if is_harbor_agent(found) else found
    if not (isinstance(found, type) and issubclass(found, Agent)):
        raise UsageError(
            f"{name!r} is not an agent: expected a subclass of pier.agent.contract.Agent or of Harbor's BaseAgent",
            code="plugin",
        )
    if not version:
        return found
    if found.pack is None:
        raise UsageError(f"cannot choose a version of the agent {plain!r}: it has no pack", hint=f"-a {plain}")
    return type(found.__name__, (found,), {"pack": replace(found.pack, version=version)})


def pack_spec(name: str) -> PackSpec | None:
    """The package of the pack of `name` or `name@version`; None for agents without a pack."""
    return find_agent(name).pack


def resolved(name: str) -> str:
    """The name of an agent with the version that `latest` is now; other names as they are. Asks the registry."""
    plain, _, version = name.rpartition("@")
    if not plain or version != "latest":
        return name
    from pier.agent.pack.store import resolve

    spec = pack_spec(name)
    assert spec is not None
    return f"{plain}@{resolve(spec).version}"


def agent_names() -> list[str]:
    """All names that `find_agent` takes, in addition to `module:Class`."""
    return names("agent", AGENTS)


def check_options(agent: type[Agent], options: Mapping[str, Any]) -> None:
    """Refuse options that the agent does not take, by name."""
    for name in options:
        if name not in agent.options:
            near = nearest(name, agent.options)
            known = ", ".join(agent.options) or "none"
            raise UsageError(
                f"unknown option {name!r} for the agent {agent.name!r}: expected one of {known}",
                hint=f"--ak {near}=..." if near else None,
                code="agent_option",
            )
