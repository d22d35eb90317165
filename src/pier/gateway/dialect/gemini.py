"""Google Gemini: `generateContent` and `streamGenerateContent`, as events or as one JSON array."""

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
from pier.gateway.dialect.contract import BadRequest, BadResponse, Route
from pier.gateway.dialect.gemini_body import (
    Contents,
    camel,
    parse_call,
    parse_choice,
    parse_part,
    parse_system,
    parse_tools,
    read_usage,
    render_choice,
    render_contents,
    render_part,
    render_tools,
    render_usage,
)
from pier.gateway.dialect.gemini_stream import GeminiParser, GeminiRenderer
from pier.gateway.dialect.shared import check_recordable, compact, error_text, fresh_id, kind_of_status, need_str, take

STOPS: dict[str, StopReason] = {
    "STOP": "end",
    "MAX_TOKENS": "length",
    "SAFETY": "refusal",
    "RECITATION": "refusal",
    "BLOCKLIST": "refusal",
    "PROHIBITED_CONTENT": "refusal",
    "SPII": "refusal",
    "IMAGE_SAFETY": "refusal",
}
FINISHES: dict[StopReason, str] = {
    "end": "STOP",
    "length": "MAX_TOKENS",
    "tool_use": "STOP",
    "stop_sequence": "STOP",
    "refusal": "SAFETY",
    "pause": "STOP",
    "context": "MAX_TOKENS",
    "other": "OTHER",
}
_STATUSES: dict[ErrorKind, str] = {
    "invalid_request": "INVALID_ARGUMENT",
    "authentication": "UNAUTHENTICATED",
    "permission": "PERMISSION_DENIED",
    "not_found": "NOT_FOUND",
    "too_large": "INVALID_ARGUMENT",
    "rate_limit": "RESOURCE_EXHAUSTED",
    "server": "INTERNAL",
    "overloaded": "UNAVAILABLE",
    "timeout": "DEADLINE_EXCEEDED",
    "context_length": "INVALID_ARGUMENT",
    "budget": "FAILED_PRECONDITION",
}
_METHODS = re.compile(r"(?:/v\d\w*)?(?:/.+)?/models/(.+):(generateContent|streamGenerateContent|countTokens)")
_FIELDS = ("contents", "systemInstruction", "tools", "toolConfig", "generationConfig", "model")
_CONFIG = (
    *("temperature", "topP", "topK", "maxOutputTokens", "stopSequences", "seed", "presencePenalty"),
    *("frequencyPenalty", "responseLogprobs", "logprobs", "thinkingConfig", "responseMimeType", "candidateCount"),
    *("responseSchema", "responseJsonSchema"),
)


class Gemini:
    name: DialectName = "gemini"

    def match(self, method: str, path: str, query: Mapping[str, str]) -> Route | None:
        if method == "POST" and (found := _METHODS.fullmatch(path)):
            model, verb = found.groups()
            if verb == "countTokens":
                return Route(self.name, "count_tokens", model=model)
            stream = verb == "streamGenerateContent"
            return Route(self.name, "generate", model, stream, sse=query.get("alt") == "sse")
        if method == "GET" and re.fullmatch(r"/v1(beta|alpha)/models", path):
            return Route(self.name, "models")
        if method == "GET" and (found := re.fullmatch(r"/v1(?:beta|alpha)/models/(.+)", path)):
            return Route(self.name, "model", model=found[1])
        return None

    def parse_request(self, body: Mapping[str, Any], route: Route | None = None) -> Request:
        fields = camel(dict(body), "the body")
        if isinstance(fields.get("generateContentRequest"), dict):
            fields = camel(fields["generateContentRequest"], "generateContentRequest")
        check_recordable(self.name, fields)
        config = camel(fields.get("generationConfig") or {}, "generationConfig")
        model = (route.model if route else None) or fields.get("model")
        thinking = camel(config.get("thinkingConfig") or {}, "thinkingConfig")
        rest = take(config, *_CONFIG)
        if more := take(thinking, "thinkingBudget", "thinkingLevel"):
            rest["thinkingConfig"] = more
        return Request(
            model=need_str(model, "model").removeprefix("models/"),
            messages=tuple(Contents().parse(fields.get("contents") or [])),
            system=parse_system(fields.get("systemInstruction")),
            tools=tuple(parse_tools(fields.get("tools"))),
            tool_choice=parse_choice(fields.get("toolConfig")),
            sampling=_parse_sampling(config, thinking),
            response_format=_parse_format(config),
            stream=bool(route and route.stream),
            dialect=self.name,
            extra={**take(fields, *_FIELDS), **({"generationConfig": rest} if rest else {})},
        )

    def render_request(self, request: Request) -> dict[str, Any]:
        extra = dict(request.extra) if request.dialect == self.name else {}
        config = _render_config(request, extra.pop("generationConfig", {}))
        system = [{"text": text} for text in request.system if text]
        body = {
            "contents": render_contents(request.messages),
            "systemInstruction": {"parts": system} if system else None,
            "tools": render_tools(request.tools) or None,
            "toolConfig": render_choice(request.tool_choice),
            "generationConfig": config or None,
        }
        return {**extra, **compact(body)}

    def request_path(self, request: Request) -> str:
        verb = "streamGenerateContent?alt=sse" if request.stream else "generateContent"
        return f"/v1beta/models/{request.model}:{verb}"

    def parse_response(self, body: Mapping[str, Any]) -> Turn:
        candidates = body.get("candidates") or []
        blocked = (body.get("promptFeedback") or {}).get("blockReason")
        if not candidates and not blocked:
            raise BadResponse(f"the provider's answer has no candidates: {error_text(dict(body))[:200]}")
        candidate = candidates[0] if candidates else {}
        native = candidate.get("finishReason") or blocked
        try:
            raw = [camel(part, "a part") for part in (candidate.get("content") or {}).get("parts") or ()]
            parts = tuple(part for item in raw for part in read_part(item))
        except BadRequest as error:
            raise BadResponse(error.message) from error
        return Turn(
            parts=parts,
            stop="refusal" if blocked else read_stop(native, any(isinstance(part, ToolCall) for part in parts)),
            usage=read_usage(body.get("usageMetadata")),
            id=body.get("responseId"),
            model=body.get("modelVersion"),
            native_stop=native,
        )

    def render_response(self, turn: Turn, request: Request) -> dict[str, Any]:
        parts = [part for item in turn.parts if (part := render_part(item, answer=True))]
        candidate = {
            "content": {"role": "model", "parts": parts or [{"text": ""}]},
            "finishReason": FINISHES[turn.stop],
            "index": 0,
        }
        body = {
            "candidates": [candidate],
            "usageMetadata": render_usage(turn.usage),
            "modelVersion": request.model,
            "responseId": turn.id or fresh_id(""),
        }
        return compact(body)

    def stream_parser(self) -> GeminiParser:
        return GeminiParser(read_stop)

    def stream_renderer(self, request: Request, route: Route | None = None) -> GeminiRenderer:
        return GeminiRenderer(request, FINISHES, self.error_body, sse_form=route is None or route.sse)

    def error_body(self, status: int, message: str, kind: ErrorKind) -> dict[str, Any]:
        return {"error": {"code": status, "message": message, "status": _STATUSES[kind]}}

    def parse_error(self, status: int, body: Any) -> tuple[str, ErrorKind]:
        message = error_text(body)
        too_long = "exceeds the maximum number of tokens" in message
        return message, "context_length" if too_long else kind_of_status(status)

    def models_body(self, models: tuple[str, ...]) -> dict[str, Any]:
        return {"models": [self.model_body(model) for model in models]}

    def model_body(self, model: str) -> dict[str, Any]:
        return {
            "name": f"models/{model}",
            "version": "1",
            "displayName": model,
            "supportedGenerationMethods": ["generateContent", "streamGenerateContent", "countTokens"],
        }

    def count_tokens_body(self, tokens: int) -> dict[str, Any]:
        return {"totalTokens": tokens}


def read_part(part: Mapping[str, Any]) -> list[Any]:
    """The canonical parts of one part of an answer."""
    if isinstance(part.get("functionCall"), dict):
        return [parse_call(part["functionCall"], part.get("thoughtSignature"))]
    return list(parse_part(part))


def read_stop(native: Any, has_calls: bool) -> StopReason:
    """The canonical stop; Gemini says STOP for calls too."""
    stop = STOPS.get(native or "STOP", "other")
    return "tool_use" if stop == "end" and has_calls else stop


def _parse_sampling(config: Mapping[str, Any], thinking: Mapping[str, Any]) -> Sampling:
    level = thinking.get("thinkingLevel")
    return Sampling(
        max_tokens=config.get("maxOutputTokens"),
        temperature=config.get("temperature"),
        top_p=config.get("topP"),
        top_k=config.get("topK"),
        stop=tuple(config.get("stopSequences") or ()),
        seed=config.get("seed"),
        presence_penalty=config.get("presencePenalty"),
        frequency_penalty=config.get("frequencyPenalty"),
        effort=level.lower() if isinstance(level, str) else None,
        thinking_budget=thinking.get("thinkingBudget"),
        logprobs=bool(config.get("responseLogprobs")),
        top_logprobs=config.get("logprobs"),
    )


def _render_config(request: Request, extra: Mapping[str, Any]) -> dict[str, Any]:
    sampling, wanted = request.sampling, request.response_format
    thinking = {
        **extra.get("thinkingConfig", {}),
        "thinkingBudget": sampling.thinking_budget,
        "thinkingLevel": sampling.effort.upper() if sampling.effort else None,
    }
    config = {
        "temperature": sampling.temperature,
        "topP": sampling.top_p,
        "topK": sampling.top_k,
        "maxOutputTokens": sampling.max_tokens,
        "stopSequences": list(sampling.stop) or None,
        "seed": sampling.seed,
        "presencePenalty": sampling.presence_penalty,
        "frequencyPenalty": sampling.frequency_penalty,
        "responseLogprobs": sampling.logprobs or None,
        "logprobs": sampling.top_logprobs,
        "thinkingConfig": compact(thinking) or None,
        "responseMimeType": "application/json" if wanted else None,
        "responseJsonSchema": wanted.schema if wanted else None,
    }
    return {**take(extra, "thinkingConfig"), **compact(config)}


def _parse_format(config: Mapping[str, Any]) -> ResponseFormat | None:
    if config.get("responseMimeType") != "application/json":
        return None
    return ResponseFormat(config.get("responseJsonSchema") or config.get("responseSchema"))
