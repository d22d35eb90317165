"""The base of agents from packs: places their files, starts them, and keeps their session logs.

`install` puts an agent into its sandbox with the image's own npm or pip instead, at the path and in the layout of a
pack, so that it starts in the same way. The image must have `npm` and `node`, or `python3` with `venv`. The agent's
variables (`npm_config_registry`, `PIP_INDEX_URL`) apply to the installation.
"""

from __future__ import annotations

import json
import shlex
import signal
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, ClassVar

from pier.agent.contract import AGENT_LOGS, DEFAULT_PATH, PACK_PATH, Agent, AgentFile, AgentRun, PackSpec
from pier.agent.options import hosts_in
from pier.errors import AgentError, SandboxError
from pier.sandbox.contract import NewFile, OnOutput, Result, Sandbox

SHARED_SKILLS = "~/.agents/skills"
"""Skills directory of several agents."""
CLIENT_TIMEOUT = 3600
"""Seconds that an agent's client waits for a response. Slow models are the gateway's concern."""


class PackedAgent(Agent):
    """An agent from a pack. Subclasses define `launch`."""

    soft_stop = signal.SIGINT

    logs: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Session logs at fixed paths: directories below the home directory, each with its destination below
    `AGENT_LOGS`."""
    skills: ClassVar[str | None] = None
    """Its directory of skills; `~` is the home directory."""
    takes_mcp: ClassVar[bool] = True
    """Whether `launch` configures MCP servers for it."""
    direct_hosts: ClassVar[tuple[str, ...]] = ()
    """Default hosts of its provider, for `direct` runs."""

    def reach(self, options: Mapping[str, Any], env: Mapping[str, str], *, direct: bool) -> tuple[str, ...]:
        named = hosts_in(options, env)
        return (*self.hosts, *(named or (self.direct_hosts if direct else ())))

    def skills_into(self, run: AgentRun) -> str | None:
        """The directory for skills; None if the agent does not support them."""
        return self.skills.replace("~", run.home.rstrip("/"), 1) if self.skills else None

    async def run(self, sandbox: Sandbox, run: AgentRun, on_output: OnOutput | None = None) -> Result:
        launch = self.launch(run)
        await place(sandbox, launch.files, (run.home, AGENT_LOGS))
        await self._give_tools(sandbox, run)
        try:
            env = {"HOME": run.home, "PATH": _path(sandbox, run), **run.limits(), **launch.env, **run.env}
            env["PATH"] += f":{PACK_PATH}/tools"
            return await self.execute(sandbox, run, launch, env, on_output)
        finally:
            await self._keep_logs(sandbox, run)

    async def _give_tools(self, sandbox: Sandbox, run: AgentRun) -> None:
        """Copy the skills to the agent's directory. Warn about skills and MCP servers that it does not support."""
        if run.skills_dir:
            if target := self.skills_into(run):
                await sandbox.put_tar(sandbox.get_tar(run.skills_dir), target)
            else:
                run.warn(f"{self.name} does not support skills, so those in {run.skills_dir} are not offered to it")
        if run.mcp_servers and not self.takes_mcp:
            names = ", ".join(server.name for server in run.mcp_servers)
            run.warn(f"{self.name} does not support MCP, so these servers are not offered to it: {names}")

    async def _keep_logs(self, sandbox: Sandbox, run: AgentRun) -> None:
        """Copy the session logs to `AGENT_LOGS`. An agent that died early has none; other failures are warnings."""
        for source, target in self.logs:
            path = f"{run.home.rstrip('/')}/{source}"
            stream = aiter(sandbox.get_tar(path))
            try:
                if (start := await anext(stream, None)) is not None:
                    await sandbox.put_tar(_chunks(start, stream), f"{AGENT_LOGS}/{target}")
            except FileNotFoundError:
                continue
            except SandboxError as error:
                run.warn(f"cannot keep the logs of {self.name} in {path}: {error}")


def model_of(run: AgentRun) -> str:
    """The name of the model: the gateway's, or the option `model` without a gateway."""
    return run.endpoint.model if run.endpoint else str(run.options.get("model") or "")


def bare(model: str) -> str:
    """The model's name without its provider."""
    return model.rpartition("/")[2]


async def place(sandbox: Sandbox, files: Sequence[AgentFile], bases: Sequence[str]) -> None:
    """Write files into the sandbox at once. Every user may write to new directories below `bases`."""
    entries: dict[str, NewFile] = {}
    now = int(time.time())
    for file in files:
        for parent in map(str, reversed(PurePosixPath(file.path).parents)):
            if any(parent.startswith(f"{base.rstrip('/')}/") for base in bases):
                entries[parent] = NewFile(parent.lstrip("/"), 0o777, mtime=now)
        entries[file.path] = NewFile(file.path.lstrip("/"), file.mode | 0o222, file.data, now)
    if entries:
        await sandbox.put_files([*entries.values()], "/")


async def _chunks(start: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield start
    async for chunk in rest:
        yield chunk


def _path(sandbox: Sandbox, run: AgentRun) -> str:
    spec = sandbox.spec
    return run.env.get("PATH") or spec.env.get("PATH") or spec.image.config.env.get("PATH") or DEFAULT_PATH


def mcp_servers(run: AgentRun) -> dict[str, dict[str, Any]]:
    """The task's MCP servers in the format of most agents."""
    servers: dict[str, dict[str, Any]] = {}
    for server in run.mcp_servers:
        if server.command:
            servers[server.name] = {"type": "stdio", "command": server.command, "args": list(server.args)}
            continue
        servers[server.name] = {"type": "sse" if server.transport == "sse" else "http", "url": server.url}
        if server.headers:
            servers[server.name]["headers"] = dict(server.headers)
    return servers


def mcp_file(run: AgentRun, path: str, **more: Any) -> tuple[AgentFile, ...]:
    """The file of MCP servers that most agents read, with the keys `more` in each; none without servers."""
    servers = {name: {**server, **more} for name, server in mcp_servers(run).items()}
    return (AgentFile.json(path, {"mcpServers": servers}),) if servers else ()


VERSION = f"{PACK_PATH}/version.json"
_CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"

_NPM = """\
command -v npm >/dev/null || {{ echo "the image has no npm" >&2; exit 127; }}
cd {root}
echo '{{"name": "agent", "private": true}}' > package.json
npm install --no-audit --no-fund --no-save --no-package-lock --engine-strict=false --loglevel=error {packages}
mkdir -p bin
{links}
"""

_PYPI = """\
command -v python3 >/dev/null || {{ echo "the image has no python3" >&2; exit 127; }}
python3 -m venv {root}/python >/dev/null 2>&1 || python3 -m venv --clear --without-pip {root}/python
pip="{root}/python/bin/python3 -m pip"
$pip --version >/dev/null 2>&1 || pip="python3 -m pip --python {root}/python/bin/python3"
$pip install --quiet --disable-pip-version-check --prefer-binary {packages}
"""

_NPM_ARCH = 'case "$(uname -m)" in aarch64) arch=arm64;; *) arch=x64;; esac'


def _install_script(spec: PackSpec) -> str:
    """The shell script that installs a package and writes its version into `VERSION`."""
    head = f"set -e\n{_NPM_ARCH}\nmkdir -p {PACK_PATH}\n"
    tail = f"[ ! -e {_CERTIFICATES} ] || ln -sf {_CERTIFICATES} {PACK_PATH}/ca.pem\n"
    if spec.source == "npm":
        package = _quoted(f"{spec.package}@{spec.version or 'latest'}")
        links = 'ln -sf "$(command -v node)" bin/node'
        if spec.program:  # a path that may have a wildcard
            pattern, name = spec.program.replace("{arch}", "$arch"), shlex.quote(spec.program.rpartition("/")[2])
            links = f'for file in node_modules/{pattern}; do chmod 755 "$file"; ln -sf "../$file" bin/{name}; done'
        body = _NPM.format(root=PACK_PATH, packages=package, links=links)
        tail += f"cp {PACK_PATH}/node_modules/{_quoted(spec.package)}/package.json {VERSION}\n"
    else:
        package = spec.package if spec.version in (None, "latest") else f"{spec.package}=={spec.version}"
        body = _PYPI.format(root=PACK_PATH, packages=shlex.join((package, *spec.extras)))
        code = f"import importlib.metadata as m, json; print(json.dumps({{'version': m.version({spec.package!r})}}))"
        tail += f"{PACK_PATH}/python/bin/python3 -c {shlex.quote(code)} > {VERSION}\n"
    return head + body + tail


def _quoted(template: str) -> str:
    return shlex.quote(template).replace("{arch}", "'\"$arch\"'")


async def install(
    sandbox: Sandbox, spec: PackSpec, env: Mapping[str, str], seconds: float, on_output: OnOutput | None = None
) -> str:
    """Install an agent as the sandbox's root and return its version."""
    command = ["/bin/sh", "-c", _install_script(spec)]
    home = {"HOME": "/root", **env}
    done = await sandbox.exec(command, cwd="/", env=home, user="root", timeout=seconds, on_output=on_output)
    if done.timed_out:
        message = f"installing {spec.package} in the sandbox took longer than {seconds:g} s"
        raise AgentError(message, code="agent_setup_timeout", blame="infra", retryable=True)
    if not done.ok:
        tail = done.error_text.strip()[-1000:] or done.text.strip()[-1000:]
        raise AgentError(
            f"installing {spec.package} in the sandbox failed: {tail}",
            code="agent_install",
            blame="infra",
            hint="leave out --install-in-sandbox, or use an image with the tools that the installation needs",
        )
    return str(json.loads(await sandbox.read_file(VERSION))["version"])
