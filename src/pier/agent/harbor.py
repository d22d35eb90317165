"""Runs agents that are written for Harbor's interface: `setup(environment)`, then `run(instruction, ...)`.

`SandboxEnvironment` has the methods of Harbor's environment that agents call, so Harbor itself is only needed by agents
that import it. Agents that call their model from outside the sandbox get the gateway's address on this machine; others
get variables with its address in the sandbox.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from pier.agent.contract import AGENT_LOGS, Agent, AgentRun, Launch
from pier.agent.options import merged
from pier.endpoint import Endpoint
from pier.errors import AgentError, ArgumentError, PathError, PierError
from pier.sandbox.contract import OnOutput, Result, Sandbox
from pier.tree import drop_links

_OURS = frozenset(
    {"self", "logs_dir", "model_name", "logger", "mcp_servers", "skills_dir", "extra_env", "kwargs", "args"}
)


def is_harbor_agent(kind: Any) -> bool:
    """Whether a class has the methods of Harbor's agents."""
    return isinstance(kind, type) and all(callable(getattr(kind, name, None)) for name in ("setup", "run", "name"))


def adapt(kind: type) -> type[Agent]:
    """A subclass of `Agent` that runs a Harbor agent."""
    name: Any = getattr(kind, "name")  # noqa: B009 - a class of another package, without a known type
    parts = {"name": name(), "kind": kind, "options": option_names(kind), "version": version_of(kind)}
    return type(kind.__name__, (HarborAgent,), parts)


def version_of(kind: type) -> str | None:
    """The version of the package of a class, if it is in one."""
    try:
        return metadata.version(kind.__module__.partition(".")[0])
    except metadata.PackageNotFoundError:
        return None


def option_names(kind: type) -> tuple[str, ...]:
    """The options of a Harbor agent: the parameters of its constructors and the fields of its options model."""
    fields = getattr(getattr(kind, "options_model", None), "model_fields", ())
    return tuple(name for name in (*_parameters(kind), *fields) if name not in _OURS)


def _parameters(kind: type) -> dict[str, None]:
    """The parameters of the constructors of a class and its bases."""
    names: dict[str, None] = {}
    for base in kind.__mro__[:-1]:
        if "__init__" in vars(base):
            names |= dict.fromkeys(inspect.signature(base.__init__).parameters)
    return names


class HarborAgent(Agent):
    """Runs the Harbor agent `kind`, which `adapt` sets."""

    kind: type
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Default values of options."""
    dialect = "chat"
    outside = True

    def launch(self, run: AgentRun) -> Launch:
        raise AgentError(f"{self.name} runs through Harbor's interface and has no command to run", code="harbor")

    async def run(self, sandbox: Sandbox, run: AgentRun, on_output: OnOutput | None = None) -> Result:
        with tempfile.TemporaryDirectory(prefix="pier-harbor-") as logs:
            try:
                async with asyncio.timeout(run.seconds):
                    await self._drive(SandboxEnvironment(sandbox, run, Path(logs), on_output), run, Path(logs))
            except TimeoutError:
                return Result(137, timed_out=True)
            finally:
                try:
                    await sandbox.upload(Path(logs), AGENT_LOGS, owner=run.user)
                except PathError as error:
                    message = f"cannot copy the logs of the agent {self.name!r}: {error}"
                    raise AgentError(message, code=error.code) from error
        return Result(0)

    async def _drive(self, environment: SandboxEnvironment, run: AgentRun, logs: Path) -> None:
        try:
            agent = self.kind(**self._arguments(run, logs))
            await agent.setup(environment)
            await agent.run(run.instruction, environment, _context())
        except ArgumentError as error:
            raise AgentError(f"the agent {self.name!r} failed: {error}", code=error.code) from error
        except PierError:
            raise
        except Exception as error:
            said = str(error) or type(error).__name__
            raise AgentError(f"the agent {self.name!r} failed: {said}", code="harbor_agent") from error

    def _arguments(self, run: AgentRun, logs: Path) -> dict[str, Any]:
        accepted = _parameters(self.kind)
        model = run.endpoint.model if run.endpoint else run.options.get("model_name")
        endpoint = run.outside if "api_base" in accepted else run.endpoint
        arguments: dict[str, Any] = {
            "logs_dir": logs,
            "model_name": f"openai/{model}" if run.endpoint else model,
            "logger": logging.getLogger(f"pier.harbor.{self.name}"),
            "extra_env": {**run.limits(), **_variables(endpoint), **run.env},
            "mcp_servers": list(run.mcp_servers),
            "skills_dir": run.skills_dir,
        }
        if run.outside:
            arguments["api_base"] = f"{run.outside.url}/v1"
            arguments["api_key"] = run.outside.key
            arguments["llm_call_kwargs"] = {"api_key": run.outside.key}
        arguments |= self.defaults
        return merged({name: value for name, value in arguments.items() if name in accepted}, run.options)


def _variables(endpoint: Endpoint | None) -> dict[str, str]:
    """The gateway's address and key in the variables that agents read."""
    if endpoint is None:
        return {}
    bases = dict.fromkeys(("OPENAI_BASE_URL", "OPENAI_API_BASE", "LLM_BASE_URL"), f"{endpoint.url}/v1")
    bases |= {"ANTHROPIC_BASE_URL": endpoint.url, "GOOGLE_GEMINI_BASE_URL": endpoint.url}
    keys = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY", "LLM_API_KEY")
    return bases | dict.fromkeys(keys, endpoint.key)


def _context() -> Any:
    """Harbor's own context if Harbor is installed, else a stand-in."""
    try:
        from harbor.models.agent.context import AgentContext  # pyright: ignore[reportMissingImports]
    except ImportError:
        return SimpleNamespace(n_input_tokens=None, n_output_tokens=None, cost_usd=None, metadata=None)
    return AgentContext()


@dataclass(frozen=True, slots=True)
class ExecResult:
    """Harbor's result of a command."""

    stdout: str
    stderr: str
    return_code: int


class SandboxEnvironment:
    """A sandbox with the methods of Harbor's environment."""

    def __init__(self, sandbox: Sandbox, run: AgentRun, logs: Path, on_output: OnOutput | None = None) -> None:
        self._sandbox, self._run, self._on_output = sandbox, run, on_output
        self._scoped: dict[str, str] = {}
        self.default_user = run.user
        self.session_id = self.environment_name = sandbox.id
        self.trial_paths = SimpleNamespace(agent_dir=logs, trial_dir=logs.parent)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_sec: float | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        done = await self._sandbox.exec(
            ["bash", "-c", command],
            cwd=cwd or self._run.workdir,
            env={**self._scoped, **(env or {})},
            user=self.default_user if user is None else str(user),
            timeout=timeout_sec,
        )
        if self._on_output is not None and (shown := self._on_output("stdout", done.stdout)) is not None:
            await shown
        return ExecResult(done.text, done.error_text, 124 if done.timed_out else done.exit_code)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await self._sandbox.upload(Path(source_path).resolve(), str(target_path), owner=self.default_user)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self._sandbox.upload(Path(source_dir).resolve(), str(target_dir), owner=self.default_user)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        Path(target_path).unlink(missing_ok=True)
        await self._download(source_path, Path(target_path))

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        await self._download(source_dir, Path(target_dir))

    async def _download(self, source: str, target: Path) -> None:
        """Download without links: they point into the sandbox, and Harbor's agents would follow them on this
        machine."""
        await self._sandbox.download(str(source), target)
        await asyncio.to_thread(drop_links, target)

    async def is_dir(self, path: str, user: str | int | None = None) -> bool:
        return (await self.exec(f"test -d '{path}'", user=user)).return_code == 0

    async def is_file(self, path: str, user: str | int | None = None) -> bool:
        return (await self.exec(f"test -f '{path}'", user=user)).return_code == 0

    @contextmanager
    def with_default_user(self, user: str | int | None) -> Iterator[None]:
        before, self.default_user = self.default_user, None if user is None else str(user)
        try:
            yield
        finally:
            self.default_user = before

    @contextmanager
    def scoped_exec_env(self, env: Mapping[str, str]) -> Iterator[None]:
        before, self._scoped = self._scoped, {**self._scoped, **env}
        try:
            yield
        finally:
            self._scoped = before
