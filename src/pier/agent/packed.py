"""The base of agents that come in a pack: places their files, starts them, and keeps their session logs.

A subclass says what to run (`launch`) and where it looks for skills; everything that all of them share is here, also
`install`, which puts an agent into its sandbox with the image's own npm or pip, for images that no pack suits. What is
installed stands where a pack would be mounted, in the same shape, so that an agent is started the same way. The image
must have `npm` and `node`, or `python3` with `venv`; the agent's variables (`npm_config_registry`, `PIP_INDEX_URL`)
count while it is installed.
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
"""Where several agents look for skills."""
CLIENT_TIMEOUT = 3600
"""Seconds that an agent's own client waits for one answer: a slow model is the gateway's business, not the agent's."""


class PackedAgent(Agent):
    """An agent from a pack. `launch` stays pure; `run` does what it says."""

    soft_stop = signal.SIGINT

    logs: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Session logs that no variable moves to `AGENT_LOGS`: a directory below the home directory, and the one below
    the logs where its contents are put."""

    skills: ClassVar[str | None] = None
    """Where it looks for skills; `~` is its home directory."""

    takes_mcp: ClassVar[bool] = True
    """Whether `launch` configures MCP servers for it."""

    direct_hosts: ClassVar[tuple[str, ...]] = ()
    """Where its model is when no gateway stands before it and its configuration names no other place."""

    def reach(self, options: Mapping[str, Any], env: Mapping[str, str], *, direct: bool) -> tuple[str, ...]:
        named = hosts_in(options, env)
        return (*self.hosts, *(named or (self.direct_hosts if direct else ())))

    def skills_into(self, run: AgentRun) -> str | None:
        """The directory where it looks for skills; None if it has no notion of them."""
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
        """Put the skills where it looks for them; unsupported kinds are reported."""
        target = self.skills_into(run)
        if run.skills_dir and target:
            await sandbox.put_tar(sandbox.get_tar(run.skills_dir), target)
        elif run.skills_dir:
            run.warn(f"{self.name} does not support skills, so those in {run.skills_dir} are not offered to it")
        if run.mcp_servers and not self.takes_mcp:
            names = ", ".join(server.name for server in run.mcp_servers)
            run.warn(f"{self.name} does not support MCP, so these servers are not offered to it: {names}")

    async def _keep_logs(self, sandbox: Sandbox, run: AgentRun) -> None:
        """Copy the session logs to where logs are collected; an agent that died early has none. A copy that fails
        is a warning: the agent's work stands without it."""
        for source, target in self.logs:
            place = f"{run.home.rstrip('/')}/{source}"
            stream = aiter(sandbox.get_tar(place))
            try:
                start = await anext(stream, None)
                if start is not None:
                    await sandbox.put_tar(_chunks(start, stream), f"{AGENT_LOGS}/{target}")
            except FileNotFoundError:
                continue
            except SandboxError as error:
                run.warn(f"the logs of {self.name} in {place} could not be kept: {error}")


def model_of(run: AgentRun, default: str = "") -> str:
    """The model's name as the agent should ask for it: the gateway's, or the option `model` without a gateway."""
    return run.endpoint.model if run.endpoint else str(run.options.get("model") or default)


def bare(model: str) -> str:
    """The model's name without its provider."""
    return model.rpartition("/")[2]


async def place(sandbox: Sandbox, files: Sequence[AgentFile], bases: Sequence[str]) -> None:
    """Put files into the sandbox in one go. Directories below `bases` are made so that any user may write there."""
    made: dict[str, NewFile] = {}
    now = int(time.time())
    for file in files:
        for parent in map(str, reversed(PurePosixPath(file.path).parents)):
            if any(parent.startswith(f"{base.rstrip('/')}/") for base in bases):
                made[parent] = NewFile(parent.lstrip("/"), 0o777, mtime=now)
        made[file.path] = NewFile(file.path.lstrip("/"), file.mode | 0o222, file.data, now)
    if made:
        await sandbox.put_files([*made.values()], "/")


async def _chunks(start: bytes, rest: AsyncIterator[bytes] | None = None) -> AsyncIterator[bytes]:
    yield start
    if rest is not None:
        async for chunk in rest:
            yield chunk


def _path(sandbox: Sandbox, run: AgentRun) -> str:
    spec = sandbox.spec
    return run.env.get("PATH") or spec.env.get("PATH") or spec.image.config.env.get("PATH") or DEFAULT_PATH


def mcp_servers(run: AgentRun) -> dict[str, dict[str, Any]]:
    """The task's MCP servers in the shape that most agents share."""
    found: dict[str, dict[str, Any]] = {}
    for server in run.mcp_servers:
        if server.command:
            found[server.name] = {"type": "stdio", "command": server.command, "args": list(server.args)}
        else:
            kind = "sse" if server.transport == "sse" else "http"
            found[server.name] = {"type": kind, "url": server.url}
            if server.headers:
                found[server.name]["headers"] = dict(server.headers)
    return found


def mcp_file(run: AgentRun, path: str, **more: Any) -> tuple[AgentFile, ...]:
    """The task's MCP servers, each with `more` keys, as the file that most agents read; none without servers."""
    servers = {name: {**server, **more} for name, server in mcp_servers(run).items()}
    return (AgentFile.json(path, {"mcpServers": servers}),) if servers else ()


VERSION = f"{PACK_PATH}/version.json"
_CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"

_NPM = """\
command -v npm >/dev/null || {{ echo "the image has no npm" >&2; exit 127; }}
cd {root}
echo '{{"name": "agent", "private": true}}' > package.json
npm install --no-audit --no-fund --no-save --no-package-lock --engine-strict=false --loglevel=error {what}
mkdir -p bin
{links}
"""

_PYPI = """\
command -v python3 >/dev/null || {{ echo "the image has no python3" >&2; exit 127; }}
python3 -m venv {root}/python >/dev/null 2>&1 || python3 -m venv --clear --without-pip {root}/python
pip="{root}/python/bin/python3 -m pip"
$pip --version >/dev/null 2>&1 || pip="python3 -m pip --python {root}/python/bin/python3"
$pip install --quiet --disable-pip-version-check --prefer-binary {what}
"""

_NPM_ARCH = 'case "$(uname -m)" in aarch64) arch=arm64;; *) arch=x64;; esac'


def script_of(spec: PackSpec) -> str:
    """The shell script that installs what `spec` names, and writes its version into `VERSION`."""
    head = f"set -e\n{_NPM_ARCH}\nmkdir -p {PACK_PATH}\n"
    tail = f"[ ! -e {_CERTIFICATES} ] || ln -sf {_CERTIFICATES} {PACK_PATH}/ca.pem\n"
    pinned = spec.version not in (None, "latest")
    if spec.source == "npm":
        what = _quoted(f"{spec.package}@{spec.version or 'latest'}")
        links = _link(spec.program) if spec.program else 'ln -sf "$(command -v node)" bin/node'
        body = _NPM.format(root=PACK_PATH, what=what, links=links)
        tail += f"cp {PACK_PATH}/node_modules/{_quoted(spec.package)}/package.json {VERSION}\n"
    else:
        wanted = f"{spec.package}=={spec.version}" if pinned else spec.package
        body = _PYPI.format(root=PACK_PATH, what=shlex.join((wanted, *spec.extras)))
        say = f"import importlib.metadata as m, json; print(json.dumps({{'version': m.version({spec.package!r})}}))"
        tail += f"{PACK_PATH}/python/bin/python3 -c {shlex.quote(say)} > {VERSION}\n"
    return head + body + tail


def _quoted(template: str) -> str:
    return shlex.quote(template).replace("{arch}", "'\"$arch\"'") if "{arch}" in template else shlex.quote(template)


def _link(program: str) -> str:
    """A link in `bin` to the native program; its path may have a star."""
    name = program.rpartition("/")[2]
    pattern = program.replace("{arch}", "$arch")
    return (
        f'for found in node_modules/{pattern}; do chmod 755 "$found"; ln -sf "../$found" bin/{shlex.quote(name)}; done'
    )


async def install(
    sandbox: Sandbox, spec: PackSpec, env: Mapping[str, str], seconds: float, on_output: OnOutput | None = None
) -> str:
    """Install an agent as the sandbox's root and give the version that came."""
    home = {"HOME": "/root", **env}
    done = await sandbox.exec(
        ["/bin/sh", "-c", script_of(spec)], cwd="/", env=home, user="root", timeout=seconds, on_output=on_output
    )
    if done.timed_out:
        message = f"installing {spec.package} in the sandbox took longer than {seconds:g} s"
        raise AgentError(message, code="agent_setup_timeout", blame="infra", retryable=True)
    if not done.ok:
        tail = done.error_text.strip()[-1000:] or done.text.strip()[-1000:]
        raise AgentError(
            f"installing {spec.package} in the sandbox failed: {tail}",
            code="agent_install",
            blame="infra",
            hint="leave out --install-in-sandbox, or use an image with what the agent's installer needs",
        )
    return str(json.loads(await sandbox.read_file(VERSION))["version"])
