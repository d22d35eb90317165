"""OpenAI Responses, stateless: every call carries its whole history, as Codex sends it.

A call that refers to state at the provider (`previous_response_id`, `conversation`) is refused, since its prompt could
be neither recorded nor translated.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

from pier.gateway.canonical import (
    DialectName,
    ErrorKind,
    Part,
    Request,
    ResponseFormat,
    Sampling,
    StopReason,
    ToolCall,
    Turn,
)
from pier.gateway.dialect.contract import BadRequest, BadResponse, Route
from pier.gateway.dialect.openai import error_body, is_context_error, model_body, models_body, read_usage
from pier.gateway.dialect.responses_body import (
    parse_choice,
    parse_content,
    parse_input,
    parse_output,
    parse_tools,
    render_choice,
    render_input,
    render_output,
    render_tools,
    render_usage,
)
from pier.gateway.dialect.responses_stream import ResponsesParser, ResponsesRenderer
from pier.gateway.dialect.shared import (
    check_recordable,
    compact,
    error_text,
    fresh_id,
    kind_of_status,
    need_dict,
    need_str,
    take,
)

_FIELDS = (
    *("model", "input", "instructions", "tools", "tool_choice", "parallel_tool_calls", "max_output_tokens"),
    *("temperature", "top_p", "top_logprobs", "reasoning", "text", "stream", "previous_response_id", "conversation"),
)


class Responses:
    name: DialectName = "responses"

    def match(self, method: str, path: str, query: Mapping[str, str]) -> Route | None:
        if method == "POST" and re.fullmatch(r"(/v1)?/responses", path):
            return Route(self.name, "generate")
        if method == "POST" and re.fullmatch(r"(/v1)?/responses/input_tokens", path):
            return Route(self.name, "count_tokens")
        return None

    def parse_request(self, body: Mapping[str, Any], route: Route | None = None) -> Request:
        check_recordable(self.name, body)
        instructions = body.get("instructions")
        system, messages = parse_input(body.get("input") or [])
        reasoning, text = body.get("reasoning") or {}, body.get("text") or {}
        more = {"reasoning": take(reasoning, "effort"), "text": take(text, "format")}
        return Request(
            model=need_str(body.get("model"), "model"),
            messages=messages,
            system=(*((instructions,) if instructions else ()), *system),
            tools=tuple(parse_tools(body.get("tools"))),
            tool_choice=parse_choice(body.get("tool_choice")),
            parallel_tools=body.get("parallel_tool_calls"),
            sampling=Sampling(
                max_tokens=body.get("max_output_tokens"),
                temperature=body.get("temperature"),
                top_p=body.get("top_p"),
                effort=reasoning.get("effort"),
                top_logprobs=body.get("top_logprobs"),
            ),
            response_format=_parse_format(text.get("format")),
            stream=bool(body.get("stream")),
            dialect=self.name,
            extra={**take(body, *_FIELDS), **{key: value for key, value in more.items() if value}},
        )

    def render_request(self, request: Request) -> dict[str, Any]:
        sampling = request.sampling
        extra = dict(request.extra) if request.dialect == self.name else {}
        reasoning = compact({**extra.pop("reasoning", {}), "effort": sampling.effort})
        text = compact({**extra.pop("text", {}), "format": _render_format(request.response_format)})
        body = {
            "model": request.model,
            "instructions": request.system[0] if request.system else None,
            "input": render_input(request),
            "tools": render_tools(request.tools) or None,
            "tool_choice": render_choice(request.tool_choice),
            "parallel_tool_calls": request.parallel_tools,
            "max_output_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_logprobs": sampling.top_logprobs,
            "reasoning": reasoning or None,
            "text": text or None,
            "stream": request.stream or None,
        }
        return {**extra, **compact(body)}

    def request_path(self, request: Request) -> str:
        return "/v1/responses"

    def parse_response(self, body: Mapping[str, Any]) -> Turn:
        output = body.get("output")
        if not isinstance(output, list) or body.get("status") == "failed":
            raise BadResponse(f"the provider's answer failed: {error_text(dict(body))[:200]}")
        try:
            parts = tuple(part for item in output for part in _parse_item(need_dict(item, "an output item")))
        except BadRequest as error:
            raise BadResponse(error.message) from error
        stop, native = read_stop(body, any(isinstance(part, ToolCall) for part in parts))
        return Turn(
            parts=parts,
            stop=stop,
            usage=read_usage(body.get("usage")),
            id=body.get("id"),
            model=body.get("model"),
            native_stop=native,
        )

    def render_response(self, turn: Turn, request: Request) -> dict[str, Any]:
        return response_body(
            request,
            id_=turn.id or fresh_id("resp_"),
            output=list(render_output(turn.parts, answer=True)),
            stop=turn.stop,
            usage=render_usage(turn.usage),
        )

    def stream_parser(self) -> ResponsesParser:
        return ResponsesParser(read_stop)

    def stream_renderer(self, request: Request, route: Route | None = None) -> ResponsesRenderer:
        return ResponsesRenderer(request, response_body)

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
        return {"object": "response.input_tokens", "input_tokens": tokens}


def _parse_item(item: Mapping[str, Any]) -> list[Part]:
    return parse_content(item.get("content")) if item.get("type") == "message" else [parse_output(item)]


def read_stop(body: Mapping[str, Any], has_calls: bool) -> tuple[StopReason, str | None]:
    """The canonical stop and the native word; Responses has no word for calls, only the items themselves."""
    status = body.get("status")
    reason = (body.get("incomplete_details") or {}).get("reason")
    if status == "incomplete":
        known: dict[str, StopReason] = {"max_output_tokens": "length", "content_filter": "refusal"}
        return known.get(reason or "", "other"), reason
    return "tool_use" if has_calls else "end", status


def response_body(
    request: Request,
    *,
    id_: str,
    output: list[dict[str, Any]],
    stop: StopReason | None,
    usage: dict[str, Any] | None,
) -> dict[str, Any]:
    """A response object; without `stop` it is still in progress."""
    reasons: dict[StopReason, str] = {
        "length": "max_output_tokens",
        "context": "max_output_tokens",
        "refusal": "content_filter",
    }
    reason = reasons.get(stop) if stop else None
    return {
        "id": id_,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress" if stop is None else "incomplete" if reason else "completed",
        "error": None,
        "incomplete_details": {"reason": reason} if reason else None,
        "instructions": None,
        "max_output_tokens": request.sampling.max_tokens,
        "model": request.model,
        "output": output,
        "parallel_tool_calls": request.parallel_tools is not False,
        "previous_response_id": None,
        "reasoning": {"effort": request.sampling.effort, "summary": None},
        "store": False,
        "temperature": request.sampling.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": render_choice(request.tool_choice) or "auto",
        "tools": render_tools(request.tools) if request.dialect == "responses" else [],
        "top_p": request.sampling.top_p,
        "truncation": "disabled",
        "usage": usage,
        "metadata": {},
    }


def _parse_format(raw: Any) -> ResponseFormat | None:
    if not isinstance(raw, dict) or raw.get("type") not in ("json_object", "json_schema"):
        return None
    return ResponseFormat(raw.get("schema"), raw.get("name"), raw.get("strict"))


def _render_format(wanted: ResponseFormat | None) -> dict[str, Any] | None:
    if wanted is None:
        return None
    if wanted.schema is None:
        return {"type": "json_object"}
    body = {"type": "json_schema", "name": wanted.name or "answer", "schema": wanted.schema, "strict": wanted.strict}
    return compact(body)
