"""Agents that people start by hand in a workspace: their packs, command lines and settings.

In a trial pier chooses an agent's arguments. Here the user does, so only the program, the variables and the files of an
agent's `launch` are used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pier.agent.claude_code import CONFIG
from pier.agent.contract import AGENT_LOGS, PACK_PATH, Agent, AgentFile, AgentRun, Launch, find_agent
from pier.agent.packed import PackedAgent, place
from pier.errors import SandboxError, UsageError
from pier.files import write_json
from pier.home import own_packs
from pier.sandbox.contract import Mount, Sandbox
from pier.trial.agent import make_agent, prepare_agent
from pier.trial.config import AgentConfig

PROGRAMS = {
    "claude": "claude-code",
    "codex": "codex",
    "gemini": "gemini-cli",
    "opencode": "opencode",
    "aider": "aider",
    "goose": "goose",
    "qwen": "qwen-code",
    "pi": "pi",
    "kimi": "kimi",
    "copilot": "copilot",
    "cline": "cline",
    "openhands": "openhands",
    "mini": "mini-swe-agent",
}
"""The commands that people type, and the agents that they start."""

PLACED = "placed.json"
BIN = "/opt/pier/bin"
"""Directory of the agents' start scripts in the sandbox; part of PATH."""
_PACKS = "/opt/pier/packs"
_SHARED = ("ld.so", "ca.pem", "tools", "C.utf8", "lib")
"""The parts of a pack that programs expect at `PACK_PATH`, even if the pack is mounted elsewhere."""
_KEPT_FLAGS = {"claude-code": ("--mcp-config",), "pi": ("--provider", "--model"), "cline": ("-P", "-m")}
"""Flags with a value that pass the task's tools or the model to an agent."""
_ADDED_FLAGS = {"codex": ("--no-daemon",), "openhands": ("--override-with-envs",)}
"""Flags that an agent needs to start from a pack (Codex's daemon requires a complete package), or to read its
variables."""

HOMES_IN_LOGS = frozenset({"codex"})
"""Agents whose directory is set by a variable: it is in `AGENT_LOGS`, not in the home directory."""
LOG_HOMES = {"CLAUDE_CONFIG_DIR": CONFIG, "CODEX_HOME": f"{AGENT_LOGS}/.codex"}
"""Variables of every command, so that the logs of agents in the image are saved too."""


def recognise(word: str) -> str | None:
    """The agent that a program belongs to."""
    return PROGRAMS.get(Path(word).name)


@dataclass(frozen=True, slots=True)
class InstalledAgent:
    """An agent whose pack is mounted at `location`; empty, without a version, for an agent of the image."""

    agent: Agent
    version: str | None
    location: str

    @property
    def name(self) -> str:
        return self.agent.name

    @property
    def programs(self) -> list[str]:
        """The commands that start it."""
        return [word for word, name in PROGRAMS.items() if name == self.name] or [self.name]

    def launch(self, run: AgentRun) -> Launch:
        """The launch without pier's arguments: the program, and flags that pass the task's tools. For an agent of the
        image: no program, and no variable or file that refers to a pack."""
        planned = self.agent.launch(_for_people(self.agent, run))
        argv = [*_program(planned.argv), *_kept(self.name, planned.argv), *_ADDED_FLAGS.get(self.name, ())]
        if self.name == "codex" and run.endpoint and run.endpoint.model:
            argv += ["-c", f"model={json.dumps(run.endpoint.model)}"]  # Codex edits its settings, which pier then keeps
        files = (*planned.files, *_first_files(self.agent, run))
        env = {**planned.env, **_own_env(self.agent, run)}
        if not self.location:
            kept = tuple(file for file in files if PACK_PATH.encode() not in file.data)
            return Launch([], {name: value for name, value in env.items() if PACK_PATH not in value}, kept)
        return Launch(
            [self._moved(word) for word in argv],
            {name: self._moved(value) for name, value in env.items()},
            tuple(replace(file, data=file.data.replace(PACK_PATH.encode(), self.location.encode())) for file in files),
        )

    def _moved(self, text: str) -> str:
        return text.replace(PACK_PATH, self.location)


def agent_of_image(name: str) -> InstalledAgent:
    """An agent that is expected in the image."""
    return InstalledAgent(make_agent(AgentConfig(name=name)), None, "")


def _for_people(agent: Agent, run: AgentRun) -> AgentRun:
    if agent.name == "codex":
        trust = f'[projects.{json.dumps(run.workdir)}]\ntrust_level = "trusted"\n'
        return replace(run, options={**run.options, "config_toml": trust})
    return run


def _own_env(agent: Agent, run: AgentRun) -> dict[str, str]:
    if agent.name == "claude-code" and run.endpoint is not None:
        # Claude Code asks for permission to use a key from ANTHROPIC_API_KEY, but not to use a token.
        return {"ANTHROPIC_AUTH_TOKEN": run.endpoint.key, "ANTHROPIC_API_KEY": ""}
    model = run.endpoint.model if run.endpoint else ""
    if model and agent.name == "gemini-cli":
        return {"GEMINI_MODEL": model.rpartition("/")[2]}
    if model and agent.name == "aider":
        return {"AIDER_MODEL": f"openai/{model}"}
    if model and run.endpoint and agent.name == "mini-swe-agent":
        return {"MSWEA_MODEL_NAME": f"openai/{model}", "OPENAI_API_BASE": f"{run.endpoint.url}/v1"}
    return {}


def _first_files(agent: Agent, run: AgentRun) -> tuple[AgentFile, ...]:
    """Settings that spare people the questions of a first start."""
    if agent.name != "claude-code":
        return ()
    project = {"hasTrustDialogAccepted": True, "hasCompletedProjectOnboarding": True}
    settings = {
        "hasCompletedOnboarding": True,
        "bypassPermissionsModeAccepted": True,
        "theme": "dark",
        "projects": {run.workdir: project},
    }
    return (AgentFile(f"{CONFIG}/.claude.json", json.dumps(settings).encode()),)


def _program(argv: Sequence[str]) -> list[str]:
    """The leading words that name the program: the agent's executable, or an interpreter with its script."""
    size = 1
    while size < len(argv) and argv[size].startswith(PACK_PATH):
        size += 1
    if argv[0].endswith("/python3"):
        size += 1 if argv[size : size + 1] == ["-I"] else 0
        size += 2 if list(argv[size : size + 1]) in (["-m"], ["-c"]) else 0
    return list(argv[:size])


def _kept(agent: str, argv: Sequence[str]) -> list[str]:
    places = [argv.index(flag) for flag in _KEPT_FLAGS.get(agent, ()) if flag in argv]
    return [word for place in places for word in argv[place : place + 2]]


def check_agents(names: Sequence[str]) -> None:
    """Refuse agents that cannot be started by hand in a sandbox."""
    for name in names:
        agent = find_agent(name)
        if agent.pack is None or agent.outside:
            raise UsageError(
                f"cannot start the agent {name} by hand: it has no pack",
                hint="pier agent list shows agents with packs",
                code="no-pack",
            )


async def install_agents(
    names: Sequence[str], say: Callable[[str], None]
) -> tuple[list[InstalledAgent], tuple[Mount, ...]]:
    """The agents with their mounts; missing packs are built first."""
    check_agents(names)
    chosen = [AgentConfig(name=name) for name in names]
    agents = [make_agent(each) for each in chosen]
    ready = [await prepare_agent(agent, each, say) for agent, each in zip(agents, chosen, strict=True)]
    if len(agents) <= 1:
        return [InstalledAgent(a, r.version, PACK_PATH) for a, r in zip(agents, ready, strict=True)], tuple(
            mount for one in ready for mount in one.mounts
        )
    installed, mounts, packs = [], [], []
    for agent, one in zip(agents, ready, strict=True):
        location = f"{_PACKS}/{agent.name}"
        installed.append(InstalledAgent(agent, one.version, location))
        packs += [mount.source for mount in one.mounts if mount.target == PACK_PATH and mount.source]
        mounts += [replace(mount, target=location) if mount.target == PACK_PATH else mount for mount in one.mounts]
    return installed, (Mount(PACK_PATH, combine(packs)), *mounts)


def combine(packs: Sequence[Path]) -> Path:
    """A directory with the loaders, libraries and tools of several packs, built once for each combination. It is in
    pier's home, since the packs may belong to another user of the machine."""
    key = hashlib.sha256("\n".join(sorted(path.name for path in packs)).encode()).hexdigest()[:24]
    home = own_packs() / "combined"
    final = home / key
    if final.is_dir():
        return final
    home.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".", dir=home))
    try:
        for pack in packs:
            for name in _SHARED:
                if (pack / name).exists():
                    _add(pack / name, scratch / name)
        scratch.chmod(0o755)
        scratch.rename(final)
    except OSError:
        if not final.is_dir():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return final


def _add(source: Path, target: Path) -> None:
    if source.is_dir() and not source.is_symlink():
        target.mkdir(exist_ok=True)
        for child in source.iterdir():
            _add(child, target / child.name)
    elif not target.exists():
        try:
            os.link(source, target, follow_symlinks=False)
        except OSError:
            shutil.copy2(source, target, follow_symlinks=False)


@dataclass(slots=True)
class PlacedFiles:
    """Writes the agents' settings to a sandbox, unless a file was changed there since pier wrote it. The digests of
    written files are saved in `path`."""

    path: Path
    _digests: dict[str, str] = field(default_factory=dict)

    def load(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._digests = json.loads(self.path.read_text())

    async def place(self, sandbox: Sandbox, files: Sequence[AgentFile], bases: Sequence[str]) -> None:
        fresh = []
        for file in files:
            try:
                current = _digest(await sandbox.read_file(file.path))
            except (OSError, SandboxError):
                current = None
            if current in (None, self._digests.get(file.path)) and current != _digest(file.data):
                fresh.append(file)
                self._digests[file.path] = _digest(file.data)
        if fresh:
            await place(sandbox, fresh, bases)
            write_json(self.path, self._digests, mode=0o600, durable=False)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


async def add_skills(sandbox: Sandbox, agent: Agent, run: AgentRun, skills: Sequence[Path]) -> None:
    """Copy the task's and the user's skills to the agent's directory of skills."""
    target = agent.skills_into(run) if isinstance(agent, PackedAgent) else None
    if target is None:
        if run.skills_dir or skills:
            run.warn(f"{agent.name} does not support skills")
        return
    if run.skills_dir:
        try:
            await sandbox.put_tar(sandbox.get_tar(run.skills_dir), target)
        except FileNotFoundError:
            run.warn(f"the task's skills_dir {run.skills_dir} is not in its image")
    for path in skills:
        await sandbox.upload(path, f"{target}/{path.name}")


async def add_programs(sandbox: Sandbox, launches: Mapping[str, Sequence[str]]) -> None:
    """Write a start script for each program to the sandbox."""
    for program, argv in launches.items():
        await sandbox.write_file(f"{BIN}/{program}", f'#!/bin/sh\nexec {shlex.join(argv)} "$@"\n', mode=0o755)
