"""What Chat Completions and Responses share: usage, exact tokens, errors and the list of models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pier.wire.contract import whole
from pier.wire.turn import ErrorKind, Tokens, Usage

_ERROR_TYPES: dict[ErrorKind, tuple[str, str | None]] = {
    "invalid_request": ("invalid_request_error", None),
    "authentication": ("invalid_request_error", "invalid_api_key"),
    "permission": ("invalid_request_error", "permission_denied"),
    "not_found": ("invalid_request_error", "not_found"),
    "too_large": ("invalid_request_error", "request_too_large"),
    "rate_limit": ("rate_limit_error", "rate_limit_exceeded"),
    "server": ("server_error", None),
    "overloaded": ("server_error", "overloaded"),
    "timeout": ("server_error", "timeout"),
    "context_length": ("invalid_request_error", "context_length_exceeded"),
    "budget": ("insufficient_quota", "insufficient_quota"),
}


def error_body(status: int, message: str, kind: ErrorKind) -> dict[str, Any]:
    type_, code = _ERROR_TYPES[kind]
    return {"error": {"message": message, "type": type_, "param": None, "code": code}}


def is_context_error(body: Any, message: str) -> bool:
    inner = body.get("error") if isinstance(body, dict) else None
    code = inner.get("code") if isinstance(inner, dict) else None
    return code == "context_length_exceeded" or "maximum context length" in message


def models_body(models: tuple[str, ...]) -> dict[str, Any]:
    return {"object": "list", "data": [model_body(model) for model in models]}


def model_body(model: str) -> dict[str, Any]:
    return {"id": model, "object": "model", "created": 0, "owned_by": "pier"}


def read_usage(raw: Any) -> Usage:
    """Usage in Chat's or Responses' words, with the extras of DeepSeek (cache hits) and OpenRouter (cost)."""
    if not isinstance(raw, Mapping):
        return Usage()
    prompt = _table(raw, "prompt_tokens_details", "input_tokens_details")
    completion = _table(raw, "completion_tokens_details", "output_tokens_details")
    cached = whole(prompt.get("cached_tokens"))
    cost = raw.get("cost")
    return Usage(
        input_tokens=whole(raw.get("prompt_tokens", raw.get("input_tokens"))),
        output_tokens=whole(raw.get("completion_tokens", raw.get("output_tokens"))),
        cached_tokens=cached if cached is not None else whole(raw.get("prompt_cache_hit_tokens")),
        cache_write_tokens=whole(prompt.get("cache_write_tokens")),
        reasoning_tokens=whole(completion.get("reasoning_tokens")),
        cost_usd=float(cost) if isinstance(cost, int | float) and 0 <= cost < math.inf else None,
    )


def _table(raw: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    found = next((raw[name] for name in names if raw.get(name)), None)
    return found if isinstance(found, Mapping) else {}


def chat_usage(usage: Usage) -> dict[str, Any] | None:
    if usage.total_tokens is None:
        return None
    body: dict[str, Any] = {
        "prompt_tokens": usage.input_tokens or 0,
        "completion_tokens": usage.output_tokens or 0,
        "total_tokens": usage.total_tokens,
    }
    prompt = {"cached_tokens": usage.cached_tokens, "cache_write_tokens": usage.cache_write_tokens}
    if any(value is not None for value in prompt.values()):
        body["prompt_tokens_details"] = {key: value for key, value in prompt.items() if value is not None}
    if usage.reasoning_tokens is not None:
        body["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    if usage.cost_usd is not None:
        body["cost"] = usage.cost_usd
    return body


def parse_tokens(body: Mapping[str, Any], choice: Mapping[str, Any]) -> Tokens | None:
    """Token ids and log-probs, of an answer or of one chunk: as vLLM gives them (`return_token_ids`, or log-probs whose
    tokens read `token_id:N`), and the version of the weights as SGLang gives it (`meta_info`)."""
    prompt = body.get("prompt_token_ids") or choice.get("prompt_token_ids")
    content = (choice.get("logprobs") or {}).get("content")
    ids = choice.get("token_ids")
    if ids is None and content:
        ids = _ids_in(content)
    weights = _weights(body, choice)
    if prompt is None and ids is None and content is None and weights is None:
        return None
    return Tokens(
        prompt_ids=tuple(prompt) if prompt is not None else None,
        completion_ids=tuple(ids) if ids is not None else None,
        logprobs=tuple(float(item["logprob"]) for item in content) if content is not None else None,
        weights=weights,
    )


def _ids_in(content: list[Mapping[str, Any]]) -> list[int] | None:
    """The ids that stand in the entries of log-probs; None unless all of them have one."""
    found = [entry.get("token_id", str(entry.get("token", "")).removeprefix("token_id:")) for entry in content]
    named = all("token_id" in entry or str(entry.get("token", "")).startswith("token_id:") for entry in content)
    return [int(each) for each in found] if named else None


def _weights(body: Mapping[str, Any], choice: Mapping[str, Any]) -> str | None:
    for place in (body, choice, body.get("meta_info"), choice.get("meta_info"), body.get("metadata")):
        if isinstance(place, Mapping) and place.get("weight_version") is not None:
            return str(place["weight_version"])
    return None
