"""Counts over trajectories: steps, tools, tokens, context, cost, time."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from pier.trajectory.model import Trajectory


@dataclass(frozen=True, slots=True)
class Stats:
    """Of one trajectory. None is unknown. Tokens and cost are the totals that the file gives."""

    agent: str
    model: str | None
    steps: int
    agent_steps: int
    llm_calls: int
    tool_calls: int
    tools: dict[str, int] = field(default_factory=dict)
    failed_results: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    peak_context_tokens: int | None = None
    summarizations: int | None = None
    sub_agents: int = 0
    cost_usd: float | None = None
    cost_source: str | None = None
    seconds: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def stats(trajectory: Trajectory) -> Stats:
    final = trajectory.final_metrics
    extra = (final.extra if final else None) or {}
    tools = Counter(call.function_name for step in trajectory.steps for call in step.tool_calls or ())
    results = [result for step in trajectory.steps if step.observation for result in step.observation.results]
    return Stats(
        agent=f"{trajectory.agent.name} {trajectory.agent.version}",
        model=trajectory.agent.model_name,
        steps=len(trajectory.steps),
        agent_steps=len(trajectory.agent_steps),
        llm_calls=sum(1 if step.llm_call_count is None else step.llm_call_count for step in trajectory.agent_steps),
        tool_calls=sum(tools.values()),
        tools=dict(tools.most_common()),
        failed_results=sum(bool((result.extra or {}).get("is_error")) for result in results),
        prompt_tokens=final.total_prompt_tokens if final else None,
        completion_tokens=final.total_completion_tokens if final else None,
        cached_tokens=final.total_cached_tokens if final else None,
        peak_context_tokens=extra.get("peak_context_tokens"),
        summarizations=extra.get("summarization_count"),
        sub_agents=_sub_agents(trajectory),
        cost_usd=final.total_cost_usd if final else None,
        cost_source=extra.get("cost_source"),
        seconds=_seconds(trajectory),
    )


def _sub_agents(trajectory: Trajectory) -> int:
    return sum(1 + _sub_agents(inner) for inner in trajectory.subagent_trajectories or ())


def _seconds(trajectory: Trajectory) -> float | None:
    stamps = [step.timestamp for step in trajectory.steps if step.timestamp]
    if len(stamps) < 2:
        return None
    try:
        first, last = datetime.fromisoformat(stamps[0]), datetime.fromisoformat(stamps[-1])
        return round((last - first).total_seconds(), 3)
    except (ValueError, TypeError):
        return None
