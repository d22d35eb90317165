"""Rollouts: `CliAgentEnv` and its environments, training samples, and export formats for trainers.

`import pier.rollout as vf` has the names that users of `verifiers` know, loaded on first use. `__init__.pyi` has their
types.
"""

from __future__ import annotations

from importlib import import_module

_HOMES = {
    "pier.errors": "AgentError InfraError SandboxError",
    "pier.gateway.policy": "Policy Replicas",
    "pier.rollout.client": "ClientConfig",
    "pier.rollout.dataset": "RolloutDataset",
    "pier.rollout.env": "CliAgentEnv",
    "pier.rollout.environment": "Environment MultiTurnEnv",
    "pier.rollout.modules": "MissingKeyError ensure_keys load_environment",
    "pier.rollout.rubric": "JudgeRubric Parser RewardFunc Rubric RubricGroup cleanup stop teardown",
    "pier.rollout.state": "AssistantMessage ChatMessage EmptyModelResponseError Error Info InvalidModelResponseError "
    "Messages ModelError OverlongPromptError Response RolloutTiming SamplingArgs "
    "SandboxCreationError SandboxNotReadyError SandboxSetupError State SystemMessage TimeSpan "
    "TimeSpans TokenUsage ToolCall ToolCallError ToolError ToolMessage ToolParseError "
    "TrajectoryStep TunnelError UserMessage",
}
"""The module of each name."""

_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME_OF[name]), name)
    return value
