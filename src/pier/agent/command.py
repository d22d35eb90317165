"""Any program as an agent: one of the image, a script from this machine, or a directory mounted read-only.

Options:
    command   a shell command, or a list of arguments, in which `{instruction}`, `{model}` and `{workdir}` are replaced
    script    a file on this machine that is copied into the sandbox and run with the arguments `command`
    mount     a directory on this machine, mounted at /opt/pier/agent; its `bin` is first on PATH

The program receives the instruction on standard input and in the file `$PIER_INSTRUCTION_FILE`. With a model,
`$PIER_MODEL` is its name, and the variables of the common clients hold its address and key.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pier.agent.contract import AGENT_LOGS, DEFAULT_PATH, PACK_PATH, Agent, AgentFile, AgentRun, Launch
from pier.endpoint import Endpoint
from pier.errors import UsageError
from pier.sandbox.contract import Mount

INSTRUCTION = f"{AGENT_LOGS}/instruction.md"
SCRIPT = "/installed-agent/command"


class CommandAgent(Agent):
    name = "command"
    options = ("command", "script", "mount")
    direct = True

    def mounts(self, options: Mapping[str, Any]) -> tuple[Mount, ...]:
        if not (mount := options.get("mount")):
            return ()
        source = Path(str(mount)).expanduser().resolve()
        if not source.is_dir():
            raise UsageError(f"{source}: invalid value for the option mount of the agent command: not a directory")
        return (Mount(PACK_PATH, source),)

    def launch(self, run: AgentRun) -> Launch:
        files = [AgentFile(INSTRUCTION, run.instruction.encode())]
        argv = self._argv(run, files)
        env = {"PIER_INSTRUCTION_FILE": INSTRUCTION}
        if run.options.get("mount"):
            env["PATH"] = f"{PACK_PATH}/bin:{DEFAULT_PATH}"
        if run.endpoint:
            env.update(endpoint_variables(run.endpoint))
        return Launch(argv, env=env, files=tuple(files), stdin=run.instruction.encode())

    def _argv(self, run: AgentRun, files: list[AgentFile]) -> list[str]:
        command = run.options.get("command")
        if isinstance(command, bool):  # `true` and `false` are programs
            command = str(command).lower()
        if isinstance(command, (list, tuple)):
            model = run.endpoint.model if run.endpoint else ""
            values = {"{instruction}": run.instruction, "{model}": model, "{workdir}": run.workdir}
            argv = [_fill(str(word), values) for word in command]
        elif command is None or isinstance(command, str):
            argv = ["/bin/sh", "-c", command] if command else []
        else:
            raise UsageError("invalid value for the option command: expected a string or a list")
        if script := run.options.get("script"):
            files.append(AgentFile(SCRIPT, _read(Path(str(script)).expanduser()), 0o755))
            return [SCRIPT, *(shlex.split(command) if isinstance(command, str) else argv)]
        if not argv:
            message = "the agent `command` needs a command or a script to run"
            raise UsageError(message, hint="--ak command='...' or --ak script=FILE")
        return argv


def endpoint_variables(endpoint: Endpoint) -> dict[str, str]:
    """The model's address and key as the variables of common clients of the four dialects."""
    return {
        "PIER_MODEL": endpoint.model,
        "PIER_BASE_URL": endpoint.url,
        "PIER_API_KEY": endpoint.key,
        "OPENAI_BASE_URL": f"{endpoint.url}/v1",
        "OPENAI_API_KEY": endpoint.key,
        "ANTHROPIC_BASE_URL": endpoint.url,
        "ANTHROPIC_API_KEY": endpoint.key,
        "GOOGLE_GEMINI_BASE_URL": endpoint.url,
        "GEMINI_API_KEY": endpoint.key,
    }


def _fill(word: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        if name in word:
            return word.replace(name, value)
    return word


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read the script of the agent command, {path}: {error}") from error
