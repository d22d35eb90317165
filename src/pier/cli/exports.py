"""Variables to export, or files to write, so that an agent on this machine calls a gateway.

They are the variables that the agent gets in a trial for the address of its model. For agents that read a configuration
file instead, its content is shown.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pier.agent.command import endpoint_variables
from pier.agent.contract import AGENTS, Agent, AgentRun, find_agent
from pier.endpoint import Endpoint
from pier.errors import UsageError


def exports(endpoint: Endpoint) -> list[str]:
    """Return lines for a shell, grouped by agent. Without a model in the endpoint, agents use their defaults."""
    lines = ["# OpenAI, Anthropic and Gemini clients"]
    known = endpoint_variables(endpoint).items()
    lines += _lines({name: value for name, value in known if not name.startswith("PIER_")})
    for name in AGENTS:
        try:
            agent = find_agent(name)()
        except UsageError:
            continue  # a package of the agent is not installed
        if agent.dialect is not None:
            words = _BY_HAND[name](endpoint) if name in _BY_HAND else ""
            lines += [f"# {name}{words}", *_lines(_variables(agent, endpoint))]
    return lines


def _lines(variables: dict[str, str]) -> list[str]:
    return [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]


def _variables(agent: Agent, endpoint: Endpoint) -> dict[str, str]:
    """Return the variables that the agent gets only for a model with a custom address."""
    if agent.name == "mini-swe-agent":
        return {"OPENAI_API_KEY": endpoint.key, "OPENAI_API_BASE": f"{endpoint.url}/v1"}
    without = agent.launch(AgentRun("", "/")).env
    given = agent.launch(AgentRun("", "/", endpoint=endpoint)).env
    return {name: value for name, value in given.items() if without.get(name) != value and not value.endswith("/")}


def _file(name: str, endpoint: Endpoint) -> Any:
    """Return the content of the agent's file with the address of its model."""
    named = endpoint if endpoint.model else replace(endpoint, model="MODEL")
    files = find_agent(name)().launch(AgentRun("", "/", endpoint=named)).files
    return next(json.loads(file.data) for file in files if endpoint.url.encode() in file.data)


def _codex(endpoint: Endpoint) -> str:
    provider = f'{{name="pier",base_url="{endpoint.url}/v1",env_key="PIER_MODEL_KEY",wire_api="responses"}}'
    return f": codex exec -c model_provider=pier -c 'model_providers.pier={provider}'{_named('-m', endpoint.model)}"


def _opencode(endpoint: Endpoint) -> str:
    whole = _file("opencode", endpoint)
    settings = {key: whole[key] for key in ("provider", "model") if key in whole}
    return f": ~/.config/opencode/opencode.json: {json.dumps(settings)}"


def _pi(endpoint: Endpoint) -> str:
    flags = _named("--model", endpoint.model)
    return f": pi --provider pier{flags}; ~/.pi/agent/models.json: {json.dumps(_file('pi', endpoint))}"


def _cline(endpoint: Endpoint) -> str:
    command = f"CLINE_DIR=DIR cline -P openai-compatible{_named('-m', endpoint.model)}"
    return f": {command}; DIR/data/settings/providers.json: {json.dumps(_file('cline', endpoint))}"


def _litellm(command: str) -> Callable[[Endpoint], str]:
    return lambda endpoint: f": {command}{_named('', f'openai/{endpoint.model}')}" if endpoint.model else ""


def _named(flag: str, model: str) -> str:
    return f" {flag} {shlex.quote(model)}".replace("  ", " ") if model else ""


_BY_HAND: dict[str, Callable[[Endpoint], str]] = {
    "codex": _codex,
    "opencode": _opencode,
    "pi": _pi,
    "cline": _cline,
    "aider": _litellm("aider --model"),
    "mini-swe-agent": _litellm("mini -m"),
    "gemini-cli": lambda endpoint: f": gemini{_named('-m', endpoint.model)}" if endpoint.model else "",
}
