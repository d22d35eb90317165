"""ATIF, the agent trajectory interchange format, as it is on disk.

Reads every version up to 1.8 and writes 1.7. Unknown fields are refused, as Harbor does; what a field may hold beyond
its type is said in `pier.trajectory.rules`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

VERSION = "ATIF-v1.7"
VERSIONS = tuple(f"ATIF-v1.{minor}" for minor in range(9))

Source = Literal["system", "user", "agent"]


class _Atif(BaseModel):
    model_config = ConfigDict(extra="forbid")


class MediaSource(_Atif):
    """Where a picture or sound is: a path relative to the trajectory file, or a URL."""

    media_type: str
    path: str
    duration_sec: float | None = Field(default=None, ge=0)


class ContentPart(_Atif):
    type: Literal["text", "image", "audio"]
    text: str | None = None
    source: MediaSource | None = None


Content = str | list[ContentPart]


class Agent(_Atif):
    name: str
    version: str
    model_name: str | None = None
    tool_definitions: list[dict[str, Any]] | None = None
    extra: dict[str, Any] | None = None


class ToolCall(_Atif):
    tool_call_id: str
    function_name: str
    arguments: dict[str, Any]
    extra: dict[str, Any] | None = None


class SubagentTrajectoryRef(_Atif):
    trajectory_id: str | None = None
    session_id: str | None = None
    trajectory_path: str | None = None
    extra: dict[str, Any] | None = None


class ObservationResult(_Atif):
    source_call_id: str | None = None
    content: Content | None = None
    subagent_trajectory_ref: list[SubagentTrajectoryRef] | None = None
    extra: dict[str, Any] | None = None


class Observation(_Atif):
    results: list[ObservationResult]


class Metrics(_Atif):
    """Of one step. Prompt tokens include cached ones; completion tokens include reasoning."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    cost_usd: float | None = None
    prompt_token_ids: list[int] | None = None
    completion_token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    extra: dict[str, Any] | None = None


class FinalMetrics(_Atif):
    total_prompt_tokens: int | None = None
    total_completion_tokens: int | None = None
    total_cached_tokens: int | None = None
    total_cost_usd: float | None = None
    total_steps: int | None = Field(default=None, ge=0)
    extra: dict[str, Any] | None = None


class Step(_Atif):
    step_id: int = Field(ge=1)
    timestamp: str | None = None
    source: Source
    message: Content
    model_name: str | None = None
    reasoning_effort: str | float | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    observation: Observation | None = None
    metrics: Metrics | None = None
    is_copied_context: bool | None = None
    llm_call_count: int | None = Field(default=None, ge=0)
    extra: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        """The message without its pictures."""
        return text_of(self.message)


class Trajectory(_Atif):
    schema_version: str = VERSION
    session_id: str | None = None
    trajectory_id: str | None = None
    agent: Agent
    steps: list[Step]
    notes: str | None = None
    final_metrics: FinalMetrics | None = None
    continued_trajectory_ref: str | None = None
    extra: dict[str, Any] | None = None
    subagent_trajectories: list[Trajectory] | None = None

    @property
    def agent_steps(self) -> list[Step]:
        return [step for step in self.steps if step.source == "agent"]


def text_of(content: Content | None) -> str:
    """The text in a message or an observation."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in content if part.text)
