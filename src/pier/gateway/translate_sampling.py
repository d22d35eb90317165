"""Sampling parameters on their way to another dialect: renamed where there is a like one, left out where not."""

from __future__ import annotations

import re
from dataclasses import replace

from pier.gateway.canonical import Edit, Message, Reasoning, Request, Sampling, ToolCall
from pier.gateway.dialect.anthropic import DEFAULT_MAX_TOKENS

_BUDGETS = {"none": 0, "minimal": 1024, "low": 2048, "medium": 8192, "high": 16_384, "xhigh": 32_000, "max": 32_000}
_GEMINI_THINKS = re.compile(r"gemini-(2\.5|[3-9])")
_UNKNOWN = {
    "chat": ("top_k", "thinking_budget"),
    "responses": ("top_k", "thinking_budget", "stop", "seed", "presence_penalty", "frequency_penalty", "logprobs"),
    "anthropic": ("effort", "seed", "presence_penalty", "frequency_penalty", "logprobs", "top_logprobs"),
    "gemini": ("effort",),
}


def fit_sampling(request: Request, edits: list[Edit]) -> Request:
    """A request whose sampling the target, its `dialect`, understands."""
    target = request.dialect or "chat"
    sampling = request.sampling
    fitted = replace(sampling, effort=_effort(sampling), thinking_budget=_budget(sampling))
    if target == "anthropic":
        fitted = _for_anthropic(request, fitted, edits)
    if target == "gemini":
        return _for_gemini(request, _without(fitted, target, edits, sampling))
    return replace(request, sampling=_without(fitted, target, edits, sampling))


def _without(fitted: Sampling, target: str, edits: list[Edit], asked: Sampling) -> Sampling:
    blank = Sampling()
    for name in _UNKNOWN[target]:
        is_reasoning = name in ("effort", "thinking_budget")
        if getattr(asked, name) != getattr(blank, name) and not is_reasoning:
            edits.append(Edit("removed", name, f"{target} has no such parameter"))
        fitted = replace(fitted, **{name: getattr(blank, name)})
    return fitted


def _effort(sampling: Sampling) -> str | None:
    if sampling.effort:
        return {"xhigh": "high", "max": "high"}.get(sampling.effort, sampling.effort)
    budget = sampling.thinking_budget
    if budget is None or budget <= 0:
        return None
    return "low" if budget <= 2048 else "medium" if budget <= 8192 else "high"


def _budget(sampling: Sampling) -> int | None:
    if sampling.thinking_budget is not None:
        return sampling.thinking_budget
    return _BUDGETS.get(sampling.effort) if sampling.effort else None


def _for_anthropic(request: Request, sampling: Sampling, edits: list[Edit]) -> Sampling:
    budget = sampling.thinking_budget
    forced = request.tool_choice is not None and request.tool_choice.mode in ("any", "tool")
    if budget is not None and (budget <= 0 or forced or not _can_think(request.messages)):
        if budget > 0:
            edits.append(Edit("removed", "thinking", "the history holds calls without Anthropic's own reasoning"))
        budget = None
    limit = sampling.max_tokens or DEFAULT_MAX_TOKENS
    if budget:
        budget = max(budget, 1024)
        limit = limit if limit > budget else limit + budget
        return replace(sampling, thinking_budget=budget, max_tokens=limit, temperature=None, top_k=None, top_p=None)
    temperature = None if sampling.temperature is None else min(sampling.temperature, 1.0)
    top_p = sampling.top_p if temperature is None else None
    return replace(sampling, thinking_budget=None, max_tokens=limit, temperature=temperature, top_p=top_p)


def _can_think(messages: tuple[Message, ...]) -> bool:
    """Anthropic wants the reasoning of a tool loop back; a loop that began without it must go on without it."""
    for message in reversed(messages):
        if message.role == "assistant" and any(isinstance(part, ToolCall) for part in message.parts):
            return any(isinstance(part, Reasoning) for part in message.parts)
    return True


def _for_gemini(request: Request, sampling: Sampling) -> Request:
    if not _GEMINI_THINKS.search(request.model):
        return replace(request, sampling=replace(sampling, thinking_budget=None))
    if sampling.thinking_budget is None or sampling.thinking_budget == 0:
        return replace(request, sampling=sampling)
    extra = {"generationConfig": {"thinkingConfig": {"includeThoughts": True}}}
    return replace(request, sampling=sampling, extra=extra)
