"""Prints trajectories on a terminal: as text with a paragraph per step, and as statistics."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from pier.trajectory.model import Step, Trajectory, text_of, time_of


def lines(trajectory: Trajectory, *, width: int = 2000, indent: str = "") -> Iterator[str]:
    """The lines to print. Texts are cut after `width` characters, unless it is 0."""
    agent = trajectory.agent
    model = f" with {agent.model_name}" if agent.model_name else ""
    yield f"{indent}{agent.name} {agent.version}{model}, {len(trajectory.steps)} steps"
    for step in trajectory.steps:
        yield ""
        yield from (indent + line for line in _step(step, width))
    for inner in trajectory.subagent_trajectories or ():
        yield ""
        yield f"{indent}sub-agent {inner.trajectory_id}"
        yield from lines(inner, width=width, indent=indent + "    ")


def _step(step: Step, width: int) -> Iterator[str]:
    yield _head(step)
    if step.reasoning_content:
        yield from _block("  ~ ", step.reasoning_content, width)
    if step.text:
        yield from _block("  ", step.text, width)
    results = list(step.observation.results if step.observation else ())
    for call in step.tool_calls or ():
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        yield from _block("  > ", f"{call.function_name} {arguments}", width)
        for result in [result for result in results if result.source_call_id == call.tool_call_id]:
            yield from _block("  < ", text_of(result.content), width)
            results.remove(result)
    for result in results:
        yield from _block("  < ", text_of(result.content), width)


def _head(step: Step) -> str:
    words = [f"{step.step_id}. {step.source}"]
    if step.timestamp:
        words.append(step.timestamp)
    if step.metrics and step.metrics.prompt_tokens is not None:
        words.append(f"{step.metrics.prompt_tokens} + {step.metrics.completion_tokens or 0} tokens")
    if step.metrics and step.metrics.cost_usd is not None:
        words.append(f"${step.metrics.cost_usd:.4f}")
    if step.is_copied_context:
        words.append("copied")
    return "  ".join(words)


def _block(lead: str, text: str, width: int) -> Iterator[str]:
    if width and len(text) > width:
        text = f"{text[:width]} ... ({len(text) - width} more characters)"
    pad = " " * len(lead)
    for index, line in enumerate(text.splitlines() or [""]):
        yield (lead if index == 0 else pad) + line


def stats(trajectory: Trajectory) -> dict[str, Any]:
    """Statistics of one trajectory, None where unknown. Tokens and cost are the totals in the file."""
    final = trajectory.final_metrics
    extra = (final.extra if final else None) or {}
    tools = Counter(call.function_name for step in trajectory.steps for call in step.tool_calls or ())
    results = [result for step in trajectory.steps if step.observation for result in step.observation.results]
    return {
        "agent": f"{trajectory.agent.name} {trajectory.agent.version}",
        "model": trajectory.agent.model_name,
        "steps": len(trajectory.steps),
        "agent_steps": len(trajectory.agent_steps),
        "llm_calls": sum(1 if step.llm_call_count is None else step.llm_call_count for step in trajectory.agent_steps),
        "tool_calls": sum(tools.values()),
        "tools": dict(tools.most_common()),
        "failed_results": sum(bool((result.extra or {}).get("is_error")) for result in results),
        "prompt_tokens": final.total_prompt_tokens if final else None,
        "completion_tokens": final.total_completion_tokens if final else None,
        "cached_tokens": final.total_cached_tokens if final else None,
        "peak_context_tokens": extra.get("peak_context_tokens"),
        "summarizations": extra.get("summarization_count"),
        "sub_agents": _sub_agents(trajectory),
        "cost_usd": final.total_cost_usd if final else None,
        "cost_source": extra.get("cost_source"),
        "seconds": _seconds(trajectory),
    }


def _sub_agents(trajectory: Trajectory) -> int:
    return sum(1 + _sub_agents(inner) for inner in trajectory.subagent_trajectories or ())


def _seconds(trajectory: Trajectory) -> float | None:
    stamps = [step.timestamp for step in trajectory.steps if step.timestamp]
    if len(stamps) < 2 or (first := time_of(stamps[0])) is None or (last := time_of(stamps[-1])) is None:
        return None
    return round((last - first).total_seconds(), 3)
