"""Rollouts: `CliAgentEnv` and its environments, training samples, and export formats for trainers.

`import pier.rollout as vf` has the names that users of `verifiers` know, loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pier.errors import AgentError, InfraError, SandboxError
    from pier.gateway.policy import Policy, Replicas
    from pier.rollout.client import ClientConfig
    from pier.rollout.dataset import RolloutDataset
    from pier.rollout.env import CliAgentEnv
    from pier.rollout.environment import Environment, MultiTurnEnv
    from pier.rollout.modules import MissingKeyError, ensure_keys, load_environment
    from pier.rollout.rubric import JudgeRubric, Parser, RewardFunc, Rubric, RubricGroup, cleanup, stop, teardown
    from pier.rollout.state import (
        AssistantMessage,
        ChatMessage,
        EmptyModelResponseError,
        Error,
        Info,
        InvalidModelResponseError,
        Messages,
        ModelError,
        OverlongPromptError,
        Response,
        RolloutTiming,
        SamplingArgs,
        SandboxCreationError,
        SandboxNotReadyError,
        SandboxSetupError,
        State,
        SystemMessage,
        TimeSpan,
        TimeSpans,
        TokenUsage,
        ToolCall,
        ToolCallError,
        ToolError,
        ToolMessage,
        ToolParseError,
        TrajectoryStep,
        TunnelError,
        UserMessage,
    )

_HOMES = (
    *("pier.errors", "pier.gateway.policy", "pier.rollout.state", "pier.rollout.rubric", "pier.rollout.client"),
    *("pier.rollout.dataset", "pier.rollout.environment", "pier.rollout.modules", "pier.rollout.env"),
)

__all__ = ["AgentError", "AssistantMessage", "ChatMessage", "CliAgentEnv", "ClientConfig", "EmptyModelResponseError"]
__all__ += ["Environment", "Error", "Info", "InfraError", "InvalidModelResponseError", "JudgeRubric", "Messages"]
__all__ += ["MissingKeyError", "ModelError", "MultiTurnEnv", "OverlongPromptError", "Parser", "Policy", "Replicas"]
__all__ += ["Response", "RewardFunc", "RolloutDataset", "RolloutTiming", "Rubric", "RubricGroup", "SamplingArgs"]
__all__ += ["SandboxCreationError", "SandboxError", "SandboxNotReadyError", "SandboxSetupError", "State"]
__all__ += ["SystemMessage", "TimeSpan", "TimeSpans", "TokenUsage", "ToolCall", "ToolCallError", "ToolError"]
__all__ += ["ToolMessage", "ToolParseError", "TrajectoryStep", "TunnelError", "UserMessage", "cleanup", "ensure_keys"]
__all__ += ["load_environment", "stop", "teardown"]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    for home in _HOMES if name in __all__ else ():
        if hasattr(module := import_module(home), name):
            value = globals()[name] = getattr(module, name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
