"""A trajectory as text for a terminal: one paragraph per step, long texts cut."""

from __future__ import annotations

import json
from collections.abc import Iterator

from pier.trajectory.model import Step, Trajectory, text_of


def lines(trajectory: Trajectory, *, width: int = 2000, indent: str = "") -> Iterator[str]:
    """What to print. A text of more than `width` characters is cut; 0 cuts nothing."""
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
