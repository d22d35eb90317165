"""Agents by name. Looking at the names imports no agent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from pier.agent.contract import Agent, PackSpec
from pier.errors import UsageError
from pier.plugin import find, names

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
        raise UsageError(f"the agent {plain!r} comes in no pack, so it has no versions", hint=f"-a {plain}")
    return type(found.__name__, (found,), {"pack": replace(found.pack, version=version)})


def pack_spec(name: str) -> PackSpec | None:
    """What the pack of `name` or `name@version` is built from; None for agents without a pack."""
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
            near = get_close_matches(name, agent.options, n=1)
            known = ", ".join(agent.options) or "none"
            raise UsageError(
                f"the agent {agent.name!r} takes no option {name!r}; it takes: {known}",
                hint=f"--ak {near[0]}=..." if near else None,
                code="agent_option",
            )
