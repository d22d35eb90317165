"""OpenAI Chat Completions, as OpenAI, vLLM, OpenRouter, DeepSeek and many others speak it.

System prompts are the leading system messages; later ones stay where they are. Tool results are separate messages.
Reasoning travels as `reasoning_content`, or with its `reasoning_details` where a server gave those.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

from pier.gateway.canonical import (
    DialectName,
    ErrorKind,
    Request,
    StopReason,
    ToolCall,
    Turn,
)
from pier.gateway.dialect.chat_body import (
    parse_assistant,
    parse_choice,
    parse_format,
    parse_messages,
    parse_sampling,
    parse_tool,
    render_assistant,
    render_choice,
    render_format,
    render_messages,
    render_tool,
)
from pier.gateway.dialect.chat_stream import ChatParser, ChatRenderer
from pier.gateway.dialect.contract import BadResponse, Route
from pier.gateway.dialect.openai import (
    chat_usage,
    error_body,
    is_context_error,
    model_body,
    models_body,
    parse_tokens,
    read_usage,
)
from pier.gateway.dialect.shared import (
    check_recordable,
    compact,
    error_text,
    fresh_id,
    kind_of_status,
    need_list,
    need_str,
    take,
)

STOPS: dict[str, StopReason] = {
    "stop": "end",
    "length": "length",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}
FINISHES: dict[StopReason, str] = {
    "end": "stop",
    "length": "length",
    "tool_use": "tool_calls",
    "stop_sequence": "stop",
    "refusal": "content_filter",
    "pause": "stop",
    "context": "length",
    "other": "stop",
}
_NEW_MAX = re.compile(r"(^|/)(o[1-9]|gpt-[5-9]|codex)", re.IGNORECASE)
_FIELDS = (
    *("model", "messages", "tools", "tool_choice", "parallel_tool_calls", "stream", "stream_options", "n"),
    *("max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "stop", "seed", "presence_penalty"),
    *("frequency_penalty", "reasoning_effort", "logprobs", "top_logprobs", "response_format"),
)


class Chat:
    name: DialectName = "chat"

    def match(self, method: str, path: str, query: Mapping[str, str]) -> Route | None:
        if method == "POST" and re.fullmatch(r"(/api)?(/v1)?/chat/completions", path):
            return Route(self.name, "generate")
        if method == "GET" and re.fullmatch(r"(/api)?(/v1)?/models", path):
            return Route(self.name, "models")
        if method == "GET" and (found := re.fullmatch(r"(?:/api)?/v1/models/(.+)", path)):
            return Route(self.name, "model", model=found[1])
        return None

    def parse_request(self, body: Mapping[str, Any], route: Route | None = None) -> Request:
        check_recordable(self.name, body)
        system, messages = parse_messages(need_list(body.get("messages"), "messages"))
        options = body.get("stream_options")
        return Request(
            model=need_str(body.get("model"), "model"),
            messages=messages,
            system=system,
            tools=tuple(parse_tool(tool) for tool in body.get("tools") or ()),
            tool_choice=parse_choice(body.get("tool_choice")),
            parallel_tools=body.get("parallel_tool_calls"),
            sampling=parse_sampling(body),
            response_format=parse_format(body.get("response_format")),
            stream=bool(body.get("stream")),
            stream_usage=bool(isinstance(options, dict) and options.get("include_usage")),
            dialect=self.name,
            extra=take(body, *_FIELDS),
        )

    def render_request(self, request: Request) -> dict[str, Any]:
        sampling = request.sampling
        limit = "max_completion_tokens" if _NEW_MAX.search(request.model) else "max_tokens"
        body = {
            "model": request.model,
            "messages": render_messages(request),
            "tools": [render_tool(tool) for tool in request.tools] or None,
            "tool_choice": render_choice(request.tool_choice),
            "parallel_tool_calls": request.parallel_tools,
            limit: sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "stop": list(sampling.stop) or None,
            "seed": sampling.seed,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "reasoning_effort": sampling.effort,
            "logprobs": sampling.logprobs or None,
            "top_logprobs": sampling.top_logprobs,
            "response_format": render_format(request.response_format),
            "stream": request.stream or None,
            "stream_options": {"include_usage": True} if request.stream and request.stream_usage else None,
        }
        return {**(request.extra if request.dialect == self.name else {}), **compact(body)}

    def request_path(self, request: Request) -> str:
        return "/v1/chat/completions"

    def parse_response(self, body: Mapping[str, Any]) -> Turn:
        choices = body.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            raise BadResponse(f"the provider's answer has no choices: {error_text(dict(body))[:200]}")
        choice = choices[0]
        message = choice.get("message")
        if not isinstance(message, dict):
            raise BadResponse("the provider's answer has no message")
        parts = tuple(parse_assistant(message, BadResponse))
        native = choice.get("finish_reason")
        matched = choice.get("stop_reason")
        return Turn(
            parts=parts,
            stop=read_stop(native, matched, any(isinstance(part, ToolCall) for part in parts)),
            usage=read_usage(body.get("usage")),
            id=body.get("id"),
            model=body.get("model"),
            native_stop=native,
            stop_sequence=matched if isinstance(matched, str) else None,
            tokens=parse_tokens(body, choice),
        )

    def render_response(self, turn: Turn, request: Request) -> dict[str, Any]:
        message = render_assistant(turn.parts, answer=True)
        choice: dict[str, Any] = {
            "index": 0,
            "message": message,
            "finish_reason": FINISHES[turn.stop],
            "logprobs": None,
        }
        if turn.stop_sequence is not None:
            choice["stop_reason"] = turn.stop_sequence
        return compact(
            {
                "id": turn.id or fresh_id("chatcmpl-"),
                "object": "chat.completion",
                "created": int(time.time()),
                "model": request.model,
                "choices": [choice],
                "usage": chat_usage(turn.usage),
            }
        )

    def stream_parser(self) -> ChatParser:
        return ChatParser(read_stop)

    def stream_renderer(self, request: Request, route: Route | None = None) -> ChatRenderer:
        return ChatRenderer(request, FINISHES)

    def error_body(self, status: int, message: str, kind: ErrorKind) -> dict[str, Any]:
        return error_body(status, message, kind)

    def parse_error(self, status: int, body: Any) -> tuple[str, ErrorKind]:
        message = error_text(body)
        return message, "context_length" if is_context_error(body, message) else kind_of_status(status)

    def models_body(self, models: tuple[str, ...]) -> dict[str, Any]:
        return models_body(models)

    def model_body(self, model: str) -> dict[str, Any]:
        return model_body(model)

    def count_tokens_body(self, tokens: int) -> dict[str, Any]:
        return {"input_tokens": tokens}


def read_stop(native: Any, matched: Any, has_calls: bool) -> StopReason:
    """The canonical stop: calls outrank a plain `stop`, and vLLM names the stop string that it hit."""
    stop = STOPS.get(native or "stop", "other")
    if stop == "end" and has_calls:
        return "tool_use"
    return "stop_sequence" if stop == "end" and isinstance(matched, str) else stop
