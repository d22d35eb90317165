"""Agents by name. Looking at the names imports no agent."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from pier.agent.contract import Agent
from pier.errors import UsageError
from pier.plugin import find, names

AGENTS: dict[str, str] = {
    "oracle": "pier.agent.oracle:OracleAgent",
    "nop": "pier.agent.nop:NopAgent",
    "command": "pier.agent.command:CommandAgent",
}
"""The built-in agents as `module:Class`."""


def find_agent(name: str) -> type[Agent]:
    """The class of the agent called `name`: built in, by entry point (`pier.agents`) or `module:Class`."""
    found = find("agent", name, AGENTS)
    if not (isinstance(found, type) and issubclass(found, Agent)):
        raise UsageError(f"{name!r} is no agent: it must be a subclass of pier.agent.contract.Agent", code="plugin")
    return found


def agent_names() -> list[str]:
    """All names that `find_agent` takes, beside `module:Class`."""
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
