"""Anthropic Messages.

System prompts keep their block boundaries. Thinking that another provider gave is shown to the client under a marked
signature, and is never sent to Anthropic as if it were its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pier.gateway.canonical import (
    DialectName,
    ErrorKind,
    Request,
    ResponseFormat,
    Sampling,
    StopReason,
    ToolCall,
    Turn,
)
from pier.gateway.dialect.anthropic_body import (
    parse_block,
    parse_choice,
    parse_messages,
    parse_tool,
    read_usage,
    render_choice,
    render_messages,
    render_part,
    render_tool,
    render_usage,
)
from pier.gateway.dialect.anthropic_stream import AnthropicParser, AnthropicRenderer
from pier.gateway.dialect.contract import BadRequest, BadResponse, Route
from pier.gateway.dialect.shared import (
    compact,
    error_text,
    fresh_id,
    kind_of_status,
    need_dict,
    need_list,
    need_str,
    take,
)

DEFAULT_MAX_TOKENS = 16_384
"""Anthropic wants a limit; this one is used where the client gave none."""

STOPS: dict[str, StopReason] = {
    "end_turn": "end",
    "max_tokens": "length",
    "stop_sequence": "stop_sequence",
    "tool_use": "tool_use",
    "pause_turn": "pause",
    "refusal": "refusal",
    "model_context_window_exceeded": "context",
}
NATIVE: dict[StopReason, str] = {**{stop: name for name, stop in STOPS.items()}, "other": "end_turn"}
_ERROR_TYPES: dict[ErrorKind, str] = {
    "invalid_request": "invalid_request_error",
    "authentication": "authentication_error",
    "permission": "permission_error",
    "not_found": "not_found_error",
    "too_large": "request_too_large",
    "rate_limit": "rate_limit_error",
    "server": "api_error",
    "overloaded": "overloaded_error",
    "timeout": "timeout_error",
    "context_length": "invalid_request_error",
    "budget": "invalid_request_error",
}
_KINDS: dict[str, ErrorKind] = {
    name: kind for kind, name in _ERROR_TYPES.items() if kind not in ("context_length", "budget")
}
_FIELDS = (
    *("model", "messages", "system", "tools", "tool_choice", "max_tokens", "temperature", "top_p", "top_k"),
    *("stop_sequences", "stream", "thinking", "output_config"),
)


class Anthropic:
    name: DialectName = "anthropic"

    def match(self, method: str, path: str, query: Mapping[str, str]) -> Route | None:
        if method == "POST" and re.fullmatch(r"(/v1)?/messages", path):
            return Route(self.name, "generate")
        if method == "POST" and re.fullmatch(r"(/v1)?/messages/count_tokens", path):
            return Route(self.name, "count_tokens")
        if method == "GET" and path == "/v1/models":
            return Route(self.name, "models")
        if method == "GET" and (found := re.fullmatch(r"/v1/models/(.+)", path)):
            return Route(self.name, "model", model=found[1])
        if method == "HEAD" and path == "/api/hello":
            return Route(self.name, "probe")
        return None

    def parse_request(self, body: Mapping[str, Any], route: Route | None = None) -> Request:
        choice, parallel = parse_choice(body.get("tool_choice"))
        output = body.get("output_config")
        output = output if isinstance(output, dict) else {}
        rest = take(output, "effort", "format")
        return Request(
            model=need_str(body.get("model"), "model"),
            messages=parse_messages(need_list(body.get("messages"), "messages")),
            system=_parse_system(body.get("system")),
            tools=tuple(parse_tool(tool) for tool in body.get("tools") or ()),
            tool_choice=choice,
            parallel_tools=parallel,
            sampling=_parse_sampling(body, output.get("effort")),
            response_format=_parse_format(output.get("format")),
            stream=bool(body.get("stream")),
            dialect=self.name,
            extra={**take(body, *_FIELDS), **({"output_config": rest} if rest else {})},
        )

    def render_request(self, request: Request) -> dict[str, Any]:
        sampling = request.sampling
        extra = dict(request.extra) if request.dialect == self.name else {}
        output = {**extra.pop("output_config", {}), "effort": sampling.effort}
        if request.response_format is not None:
            output["format"] = {"type": "json_schema", "schema": request.response_format.schema}
        body = {
            "model": request.model,
            "max_tokens": sampling.max_tokens or DEFAULT_MAX_TOKENS,
            "system": [{"type": "text", "text": text} for text in request.system if text] or None,
            "messages": render_messages(request.messages),
            "tools": [render_tool(tool) for tool in request.tools] or None,
            "tool_choice": render_choice(request.tool_choice, request.parallel_tools, bool(request.tools)),
            "thinking": _render_thinking(sampling.thinking_budget),
            "output_config": compact(output) or None,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "stop_sequences": list(sampling.stop) or None,
            "stream": request.stream or None,
        }
        return {**extra, **compact(body)}

    def request_path(self, request: Request) -> str:
        return "/v1/messages"

    def parse_response(self, body: Mapping[str, Any]) -> Turn:
        content = body.get("content")
        if not isinstance(content, list):
            raise BadResponse(f"the provider's answer has no content: {error_text(dict(body))[:200]}")
        try:
            parts = tuple(parse_block(need_dict(block, "a content block")) for block in content)
        except BadRequest as error:
            raise BadResponse(error.message) from error
        native = body.get("stop_reason")
        return Turn(
            parts=parts,
            stop=read_stop(native, any(isinstance(part, ToolCall) for part in parts)),
            usage=read_usage(body.get("usage")),
            id=body.get("id"),
            model=body.get("model"),
            native_stop=native,
            stop_sequence=body.get("stop_sequence"),
        )

    def render_response(self, turn: Turn, request: Request) -> dict[str, Any]:
        return {
            "id": turn.id or fresh_id("msg_"),
            "type": "message",
            "role": "assistant",
            "model": request.model,
            "content": [block for part in turn.parts if (block := render_part(part, answer=True))],
            "stop_reason": NATIVE[turn.stop],
            "stop_sequence": turn.stop_sequence,
            "usage": render_usage(turn.usage),
        }

    def stream_parser(self) -> AnthropicParser:
        return AnthropicParser(read_stop, _KINDS)

    def stream_renderer(self, request: Request, route: Route | None = None) -> AnthropicRenderer:
        return AnthropicRenderer(request, NATIVE, self.error_body)

    def error_body(self, status: int, message: str, kind: ErrorKind) -> dict[str, Any]:
        return {"type": "error", "error": {"type": _ERROR_TYPES[kind], "message": message}, "request_id": None}

    def parse_error(self, status: int, body: Any) -> tuple[str, ErrorKind]:
        message = error_text(body)
        inner = body.get("error") if isinstance(body, dict) else None
        type_ = inner.get("type") if isinstance(inner, dict) else None
        if message.startswith("prompt is too long"):
            return message, "context_length"
        return message, _KINDS.get(type_ or "", kind_of_status(status))

    def models_body(self, models: tuple[str, ...]) -> dict[str, Any]:
        return {
            "data": [self.model_body(model) for model in models],
            "has_more": False,
            "first_id": models[0] if models else None,
            "last_id": models[-1] if models else None,
        }

    def model_body(self, model: str) -> dict[str, Any]:
        return {"type": "model", "id": model, "display_name": model, "created_at": "1970-01-01T00:00:00Z"}

    def count_tokens_body(self, tokens: int) -> dict[str, Any]:
        return {"input_tokens": tokens}


def read_stop(native: Any, has_calls: bool) -> StopReason:
    """The canonical stop; an answer with calls is `tool_use` even where a server says `end_turn`."""
    stop = STOPS.get(native or "", "other")
    return "tool_use" if has_calls and stop in ("end", "other") else stop


def _parse_system(raw: Any) -> tuple[str, ...]:
    if raw is None or raw == "":
        return ()
    if isinstance(raw, str):
        return (raw,)
    blocks = (need_dict(block, "a system block") for block in need_list(raw, "system"))
    return tuple(block.get("text") or "" for block in blocks)


def _parse_sampling(body: Mapping[str, Any], effort: str | None) -> Sampling:
    thinking = body.get("thinking")
    budget = None
    if isinstance(thinking, dict):
        kind = thinking.get("type")
        budget = 0 if kind == "disabled" else -1 if kind == "adaptive" else thinking.get("budget_tokens")
    return Sampling(
        max_tokens=body.get("max_tokens"),
        temperature=body.get("temperature"),
        top_p=body.get("top_p"),
        top_k=body.get("top_k"),
        stop=tuple(body.get("stop_sequences") or ()),
        effort=effort,
        thinking_budget=budget,
    )


def _render_thinking(budget: int | None) -> dict[str, Any] | None:
    if budget is None:
        return None
    if budget <= 0:
        return {"type": "disabled" if budget == 0 else "adaptive"}
    return {"type": "enabled", "budget_tokens": budget}


def _parse_format(raw: Any) -> ResponseFormat | None:
    if isinstance(raw, dict) and raw.get("type") == "json_schema":
        return ResponseFormat(raw.get("schema"))
    return None
