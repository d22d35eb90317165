"""Rollouts: `CliAgentEnv` and what is around it, training samples from recordings, and the formats that trainers load.

`import pier.rollout as vf` has the names that users of `verifiers` know. They are loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pier.errors import AgentError, InfraError, SandboxError
    from pier.gateway.policy import Policy, Replicas
    from pier.rollout.client import ClientConfig
    from pier.rollout.dataset import RolloutDataset
    from pier.rollout.env import CliAgentEnv
    from pier.rollout.environment import MultiTurnEnv
    from pier.rollout.environment import RolloutEnvironment as Environment
    from pier.rollout.modules import load_environment
    from pier.rollout.rubric import Rubric, RubricGroup, cleanup, stop, teardown
    from pier.rollout.state import (
        ChatMessage,
        Error,
        Messages,
        ModelError,
        SandboxCreationError,
        SandboxNotReadyError,
        SandboxSetupError,
        State,
        TunnelError,
    )

_HOMES = {
    "pier.errors": "AgentError InfraError SandboxError",
    "pier.gateway.policy": "Policy Replicas",
    "pier.rollout.client": "ClientConfig",
    "pier.rollout.dataset": "RolloutDataset",
    "pier.rollout.env": "CliAgentEnv",
    "pier.rollout.environment": "Environment MultiTurnEnv",
    "pier.rollout.modules": "load_environment",
    "pier.rollout.rubric": "Rubric RubricGroup cleanup stop teardown",
    "pier.rollout.state": "ChatMessage Messages State Error ModelError SandboxCreationError SandboxNotReadyError "
    "SandboxSetupError TunnelError",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
_RENAMED = {"Environment": "RolloutEnvironment"}

__all__ = [
    "AgentError",
    "ChatMessage",
    "CliAgentEnv",
    "ClientConfig",
    "Environment",
    "Error",
    "InfraError",
    "Messages",
    "ModelError",
    "MultiTurnEnv",
    "Policy",
    "Replicas",
    "RolloutDataset",
    "Rubric",
    "RubricGroup",
    "SandboxCreationError",
    "SandboxError",
    "SandboxNotReadyError",
    "SandboxSetupError",
    "State",
    "TunnelError",
    "cleanup",
    "load_environment",
    "stop",
    "teardown",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_HOME_OF[name]), _RENAMED.get(name, name))
    return value
