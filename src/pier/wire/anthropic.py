"""Anthropic Messages.

System prompts keep their block boundaries. Thinking of another provider is shown to the client with a prefixed
signature, and is never sent to Anthropic.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from pier.wire.contract import REMOVED, AnswerProgress, Dialect, Route
from pier.wire.sse import EventParser, EventRenderer, sse
from pier.wire.turn import (
    Delta,
    Edit,
    ErrorKind,
    Media,
    Message,
    Opaque,
    Part,
    Ping,
    Reasoning,
    Refusal,
    Request,
    ResponseFormat,
    Sampling,
    StopReason,
    StreamError,
    Text,
    Tool,
    ToolCall,
    ToolChoice,
    ToolResult,
    Turn,
    TurnEnd,
    TurnStart,
    Usage,
)
from pier.wire.values import (
    BadRequest,
    as_count,
    compact,
    error_text,
    fresh_id,
    join_results,
    need_dict,
    need_list,
    need_str,
    parse_arguments,
    parse_parts,
    result_parts,
    sign,
    split_results,
    unsign,
    without,
)

DEFAULT_MAX_TOKENS = 16_384
"""The limit for requests without one, since Anthropic requires it."""
BILLING = "x-anthropic-billing-header:"
"""Claude Code's first system block, which changes with every call and defeats the caches of other providers."""
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
_ERRORS: dict[ErrorKind, tuple[str, int]] = {
    "invalid_request": ("invalid_request_error", 400),
    "authentication": ("authentication_error", 401),
    "permission": ("permission_error", 403),
    "not_found": ("not_found_error", 404),
    "too_large": ("request_too_large", 413),
    "rate_limit": ("rate_limit_error", 429),
    "server": ("api_error", 502),
    "overloaded": ("overloaded_error", 529),
    "timeout": ("timeout_error", 502),
    "context_length": ("invalid_request_error", 400),
    "budget": ("invalid_request_error", 400),
}
_KINDS: dict[str, ErrorKind] = {
    name: kind for kind, (name, _) in _ERRORS.items() if kind not in ("context_length", "budget")
}
_SAMPLING = {name: name for name in ("max_tokens", "temperature", "top_p", "top_k")} | {"stop": "stop_sequences"}
_FIELDS = (
    *("model", "messages", "system", "tools", "tool_choice", "stream", "thinking", "output_config"),
    *_SAMPLING.values(),
)
_DELTAS: dict[Any, tuple[str, str]] = {
    **dict.fromkeys((Text, Refusal), ("text_delta", "text")),
    Reasoning: ("thinking_delta", "thinking"),
    ToolCall: ("input_json_delta", "partial_json"),
}
"""The type of a part's delta, and its field with the text."""
_STRING = {"type": "string"}
_CLIENT_SIDE: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "bash": ("Run a command in a persistent bash session.", {"command": _STRING, "restart": {"type": "boolean"}}, []),
    "text_editor": (
        "View, create and edit files. Commands: view, create, str_replace, insert.",
        {
            "command": {"type": "string", "enum": ["view", "create", "str_replace", "insert"]},
            "path": _STRING,
            "file_text": _STRING,
            "old_str": _STRING,
            "new_str": _STRING,
            "insert_line": {"type": "integer"},
            "insert_text": _STRING,
            "view_range": {"type": "array", "items": {"type": "integer"}},
        },
        ["command", "path"],
    ),
}
"""Typed tools of Anthropic that the agent itself runs; other models get them as plain functions."""


def parse_messages(raw: list[Any]) -> tuple[Message, ...]:
    """Messages, with tool results in separate messages as in every other dialect."""
    messages: list[Message] = []
    for position, item in enumerate(raw):
        message = need_dict(item, f"messages[{position}]")
        role = message.get("role")
        if role not in ("user", "assistant", "system"):
            raise BadRequest(f"messages[{position}] has the unknown role {role!r}")
        parts = parse_parts(message.get("content"), parse_block)
        if role == "user":
            messages.extend(Message("user", group) for group in split_results(parts))
        else:
            messages.append(Message(role, tuple(parts)))
    return tuple(messages)


def render_messages(messages: tuple[Message, ...]) -> list[dict[str, Any]]:
    """Render without empty texts and without white space at the end of a prefill: Anthropic refuses both."""
    rows = [(each, each.role, [block for part in each.parts if (block := render_part(part))]) for each in messages]
    blocks = rows[-1][2] if rows and rows[-1][1] == "assistant" else []
    if blocks and blocks[-1]["type"] == "text":
        blocks[-1]["text"] = blocks[-1]["text"].rstrip()
        if not blocks[-1]["text"]:
            blocks.pop()
    return join_results(rows, "content")


def parse_block(block: Mapping[str, Any]) -> Part:
    match block.get("type"):
        case "text":
            return Text(block.get("text") or "")
        case "thinking":
            signature, origin = unsign(block.get("signature"), "anthropic")
            return Reasoning(block.get("thinking") or "", signature, origin)
        case "redacted_thinking":
            signature, origin = unsign(block.get("data"), "anthropic")
            return Reasoning("", signature, origin, redacted=True)
        case "tool_use":
            name = need_str(block.get("name"), "a tool_use's name")
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            return ToolCall(need_str(block.get("id"), "a tool_use's id"), name, arguments)
        case "tool_result":
            parts = result_parts(parse_parts(block.get("content"), parse_block))
            call_id = need_str(block.get("tool_use_id"), "a tool_result's tool_use_id")
            return ToolResult(call_id, parts, bool(block.get("is_error")))
        case "image" | "document":
            return _parse_media(block)
        case _:
            return Opaque("anthropic", block)


def _parse_media(block: Mapping[str, Any]) -> Part:
    source = block.get("source")
    if not isinstance(source, dict):
        return Opaque("anthropic", block)
    document = block["type"] == "document"
    media_type = source.get("media_type") or ("application/pdf" if document else None)
    name = block.get("title") if document else None
    match source.get("type"):
        case "base64":
            return Media(media_type, source.get("data") or "", name=name)
        case "url":
            return Media(media_type, url=source.get("url"), name=name)
        case "file":
            return Media(media_type, file_id=source.get("file_id"), name=name)
        case _:
            return Opaque("anthropic", block)


def render_part(part: Part, *, answer: bool = False) -> dict[str, Any] | None:
    """Render a block. An `answer` shows all reasoning, a history only what Anthropic signed."""
    match part:
        case Text(text=text) | Refusal(text=text):
            return {"type": "text", "text": text} if text else None
        case Reasoning():
            if not answer and part.origin != "anthropic":
                return None
            if part.redacted:
                return {"type": "redacted_thinking", "data": sign(part, "anthropic") or ""}
            return {"type": "thinking", "thinking": part.text, "signature": sign(part, "anthropic") or ""}
        case ToolCall():
            return {"type": "tool_use", "id": part.id, "name": part.name, "input": parse_arguments(part.arguments)}
        case ToolResult():
            content = [block for piece in part.parts if (block := render_part(piece))]
            error = {"is_error": True} if part.is_error else {}
            return {"type": "tool_result", "tool_use_id": part.call_id, "content": content, **error}
        case Media():
            return _render_media(part)
        case Opaque(dialect="anthropic", value=value):
            return dict(value)
        case _:
            return None


def _render_media(media: Media) -> dict[str, Any]:
    if media.data is not None:
        source = {"type": "base64", "media_type": media.media_type or "image/png", "data": media.data}
    elif media.file_id is not None:
        source = {"type": "file", "file_id": media.file_id}
    else:
        source = {"type": "url", "url": media.url}
    block: dict[str, Any] = {"type": "image" if media.is_image else "document", "source": source}
    if media.name and not media.is_image:
        block["title"] = media.name
    return block


def parse_tool(raw: Any) -> Tool:
    tool = need_dict(raw, "a tool")
    if isinstance(tool.get("input_schema"), dict) and tool.get("type") in (None, "custom"):
        name = need_str(tool.get("name"), "a tool's name")
        return Tool(name, tool.get("description"), tool["input_schema"], tool.get("strict"))
    return Tool(str(tool.get("name") or tool.get("type")), kind="hosted", raw=tool)


def render_tool(tool: Tool) -> dict[str, Any]:
    if tool.kind == "hosted" and tool.raw is not None:
        return dict(tool.raw)
    schema = {"type": "object", **(tool.schema or {})}
    return compact({"name": tool.name, "description": tool.description, "input_schema": schema, "strict": tool.strict})


def parse_choice(raw: Any) -> tuple[ToolChoice | None, bool | None]:
    """The choice, and whether parallel calls are allowed; Anthropic's field is negated."""
    if not isinstance(raw, dict):
        return None, None
    disabled = raw.get("disable_parallel_tool_use")
    mode = raw.get("type")
    choice = ToolChoice(mode, raw.get("name")) if mode in ("auto", "any", "tool", "none") else None
    return choice, None if disabled is None else not disabled


def render_choice(choice: ToolChoice | None, parallel: bool | None, has_tools: bool) -> dict[str, Any] | None:
    if not has_tools or (choice is None and parallel is not False):
        return None
    rendered: dict[str, Any] = {"type": choice.mode if choice else "auto"}
    if choice and choice.mode == "tool":
        rendered["name"] = choice.name
    if parallel is not None and rendered["type"] != "none":
        rendered["disable_parallel_tool_use"] = not parallel
    return rendered


def render_usage(usage: Usage) -> dict[str, Any]:
    cached, written = usage.cached_tokens or 0, usage.cache_write_tokens or 0
    return {
        "input_tokens": max((usage.input_tokens or 0) - cached - written, 0),
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.output_tokens or 0,
    }


class AnthropicParser(EventParser):
    """`message_start`, one block after the other, `message_delta`, `message_stop`."""

    def __init__(self, dialect: Dialect) -> None:
        super().__init__(dialect)
        self._block: dict[str, Any] | None = None
        self._pieces: list[str] = []
        self._signatures: list[str] = []
        self._usage: dict[str, Any] = {}
        self._stop: tuple[str | None, str | None] = (None, None)

    def on_event(self, event: str | None, data: Mapping[str, Any]) -> Iterator[Delta]:
        match data.get("type") or event:
            case "message_start":
                message = data["message"]
                self._usage.update(message.get("usage") or {})
                yield from self._begin(message.get("id"), message.get("model"), self.dialect.read_usage(self._usage))
            case "content_block_start":
                yield from self._start_block(dict(data["content_block"]))
            case "content_block_delta":
                yield from self._grow_block(data["delta"])
            case "content_block_stop":
                yield from self._end_block()
            case "message_delta":
                delta = data.get("delta") or {}
                self._stop = (delta.get("stop_reason"), delta.get("stop_sequence"))
                self._usage.update(compact(data.get("usage") or {}))
            case "message_stop":
                self.done = True
                native, sequence = self._stop
                stop, usage = read_stop(native, self._has_calls), self.dialect.read_usage(self._usage)
                yield TurnEnd(stop, usage, native, sequence)
            case "ping":
                yield Ping()
            case "error":
                error = data.get("error") or {}
                kind = _KINDS.get(error.get("type") or "", "server")
                yield StreamError(error_text(dict(data)), kind, _ERRORS[kind][1])

    def _start_block(self, block: dict[str, Any]) -> Iterator[Delta]:
        yield from self._end_block()
        self._block, self._pieces, self._signatures = block, [], []
        part = parse_block(block)
        if isinstance(part, Opaque):
            return
        if isinstance(part, ToolCall) and not block.get("input"):
            part = ToolCall(part.id, part.name, "")
        if isinstance(part, Reasoning) and not part.redacted:
            part = Reasoning(part.text, origin="anthropic")
        yield from self._start(part)

    def _grow_block(self, delta: Mapping[str, Any]) -> Iterator[Delta]:
        if self._block is None:
            raise ValueError("a delta outside of any block")
        kind = delta.get("type")
        text = delta.get(dict(_DELTAS.values()).get(str(kind), "thinking")) or ""
        if kind == "signature_delta":
            self._signatures.append(delta.get("signature") or "")
        elif self._open is None:
            self._pieces.append(text)
        else:
            yield from self._grow(text)

    def _end_block(self) -> Iterator[Delta]:
        block, self._block = self._block, None
        if block is None:
            return
        if self._open is None:
            # a block that only Anthropic has is passed whole, with its streamed input
            if self._pieces:
                block = {**block, "input": json.loads("".join(self._pieces) or "{}")}
            yield from self._whole(Opaque("anthropic", block))
            return
        yield from self._grow("", "".join(self._signatures) or None)
        yield from self._end_part()


class AnthropicRenderer(EventRenderer):
    def __init__(self, dialect: Dialect, request: Request) -> None:
        super().__init__(dialect, request)
        self._index = -1

    def keep_alive(self) -> bytes:
        return _event({"type": "ping"})

    def error(self, status: int, message: str, kind: ErrorKind) -> bytes:
        return _event(self.dialect.error_body(status, message, kind))

    def _begin(self, start: TurnStart) -> bytes:
        message = _message(start.id, self._request, [], None, None, start.usage or Usage())
        return _event({"type": "message_start", "message": message})

    def _start(self, part: Part) -> bytes:
        match part:
            case Text(text=text) | Refusal(text=text):
                block: dict[str, Any] | None = {"type": "text", "text": ""}
            case Reasoning(text=text, redacted=False):
                block = {"type": "thinking", "thinking": "", "signature": ""}
            case ToolCall(arguments=text):
                block = {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
            case _:
                block, text = render_part(part, answer=True), ""
        if block is None:
            self._part = None
            return b""
        self._index += 1
        return _event({"type": "content_block_start", "index": self._index, "content_block": block}) + self._more(text)

    def _grow(self, text: str) -> bytes:
        kind, field = _DELTAS[type(self._part)]
        return self._delta({"type": kind, field: text})

    def _end_part(self) -> bytes:
        data = b""
        if isinstance(self._part, Reasoning) and not self._part.redacted:
            signed = Reasoning("", self._signature, self._part.origin)
            data = self._delta({"type": "signature_delta", "signature": sign(signed, "anthropic") or ""})
        return data + _event({"type": "content_block_stop", "index": self._index})

    def _end(self, end: TurnEnd) -> bytes:
        stop = {"stop_reason": NATIVE[end.stop], "stop_sequence": end.stop_sequence}
        last = _event({"type": "message_stop"})
        return _event({"type": "message_delta", "delta": stop, "usage": render_usage(end.usage)}) + last

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event({"type": "content_block_delta", "index": self._index, "delta": delta})


def _event(data: dict[str, Any]) -> bytes:
    return sse(data, data["type"])


def _message(
    id_: str | None, request: Request, content: list[Any], stop: str | None, sequence: str | None, usage: Usage
) -> dict[str, Any]:
    head = {"id": id_ or fresh_id("msg_"), "type": "message", "role": "assistant", "model": request.model}
    end = {"stop_reason": stop, "stop_sequence": sequence, "usage": render_usage(usage)}
    return {**head, "content": content, **end}


class Anthropic(Dialect):
    name = "anthropic"
    parser, renderer = AnthropicParser, AnthropicRenderer
    path = "/v1/messages"
    counting_path = "/v1/messages/count_tokens"
    routes = (
        ("POST", "(?:/v1)?/messages", "generate"),
        ("POST", "(?:/v1)?/messages/count_tokens", "count_tokens"),
        ("GET", "/v1/models", "models"),
        ("GET", "/v1/models/(.+)", "model"),
        ("HEAD", "/api/hello", "probe"),
    )
    likely_headers = ("anthropic-version", "anthropic-beta")
    likely_path = re.compile("/v1/messages")
    key_header = "x-api-key"
    headers = {"anthropic-version": "2023-06-01"}  # noqa: RUF012
    client_headers = "anthropic-version anthropic-beta anthropic-dangerous-direct-browser-access x-app x-claude-code-*"
    client_query = re.compile("beta=true")
    answer_field = "content"
    preludes = ("message_start", "ping")
    error_types = _KINDS
    sampling_names = _SAMPLING
    unknown_sampling = ("effort", "seed", "presence_penalty", "frequency_penalty", "logprobs", "top_logprobs")
    system_anywhere = False
    local_fields = """
        model messages system max_tokens metadata stop_sequences stream temperature top_p top_k tools tool_choice
        thinking service_tier context_management output_config output_format cache_control inference_geo speed betas
        anthropic_beta anthropic_version
    """
    file_places = ("messages", "system")
    untyped_tool = "input_schema"
    tool_fields = """
        type name description input_schema cache_control strict defer_loading input_examples allowed_callers
        eager_input_streaming
    """
    typed_fields = "display_width_px display_height_px display_number enable_zoom max_characters max_results"
    local_tools = re.compile(r"custom|(bash|text_editor|computer|memory)_\d+|tool_search_tool_\w+")

    def error_body(self, status: int, message: str, kind: ErrorKind) -> dict[str, Any]:
        return {"type": "error", "error": {"type": _ERRORS[kind][0], "message": message}, "request_id": None}

    def read_usage(self, raw: Any) -> Usage:
        """Add cache reads and writes to the input, from which Anthropic counts them separately."""
        if not isinstance(raw, dict):
            return Usage()
        names = ("input_tokens", "output_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        fresh, output, cached, written = (as_count(raw.get(name)) for name in names)
        total = None if fresh is None else fresh + (cached or 0) + (written or 0)
        return Usage(total, output, cached_tokens=cached, cache_write_tokens=written)

    def _parse_request(self, body: Mapping[str, Any], route: Route | None) -> Request:
        choice, parallel = parse_choice(body.get("tool_choice"))
        output = body.get("output_config")
        output = output if isinstance(output, dict) else {}
        rest, raw = without(output, "effort", "format"), output.get("format")
        schema = raw if isinstance(raw, dict) and raw.get("type") == "json_schema" else None
        system = parse_parts(body.get("system"), parse_block)
        return Request(
            model=need_str(body.get("model"), "model"),
            messages=parse_messages(need_list(body.get("messages"), "messages")),
            system=tuple(part.text for part in system if isinstance(part, Text)),
            tools=tuple(parse_tool(tool) for tool in body.get("tools") or ()),
            tool_choice=choice,
            parallel_tools=parallel,
            sampling=self._parse_sampling(body, output.get("effort")),
            response_format=ResponseFormat(schema.get("schema")) if schema else None,
            stream=bool(body.get("stream")),
            dialect=self.name,
            extra={**without(body, *_FIELDS), **({"output_config": rest} if rest else {})},
        )

    def _parse_sampling(self, body: Mapping[str, Any], effort: str | None) -> Sampling:
        thinking = body.get("thinking")
        budget = None
        if isinstance(thinking, dict):
            kind = thinking.get("type")
            budget = 0 if kind == "disabled" else -1 if kind == "adaptive" else thinking.get("budget_tokens")
        return self.read_sampling(body, effort=effort, thinking_budget=budget)

    def _render_request(self, request: Request) -> dict[str, Any]:
        sampling = request.sampling
        extra = dict(request.extra) if request.dialect == self.name else {}
        output = {**extra.pop("output_config", {}), "effort": sampling.effort}
        if request.response_format is not None:
            output["format"] = {"type": "json_schema", "schema": request.response_format.schema}
        body = {
            "model": request.model,
            "system": [{"type": "text", "text": text} for text in request.system if text] or None,
            "messages": render_messages(request.messages),
            "tools": [render_tool(tool) for tool in request.tools] or None,
            "tool_choice": render_choice(request.tool_choice, request.parallel_tools, bool(request.tools)),
            "thinking": _render_thinking(sampling.thinking_budget),
            "output_config": compact(output) or None,
            **self.write_sampling(sampling),
            "max_tokens": sampling.max_tokens or DEFAULT_MAX_TOKENS,
            "stream": request.stream or None,
        }
        return {**extra, **compact(body)}

    def _parse_response(self, body: Mapping[str, Any]) -> Turn:
        parts, native = tuple(parse_parts(body["content"], parse_block)), body.get("stop_reason")
        stop = read_stop(native, any(isinstance(part, ToolCall) for part in parts))
        usage, sequence = self.read_usage(body.get("usage")), body.get("stop_sequence")
        return Turn(parts, stop, usage, body.get("id"), body.get("model"), native, sequence)

    def render_response(self, turn: Turn, request: Request) -> dict[str, Any]:
        content = [block for part in turn.parts if (block := render_part(part, answer=True))]
        return _message(turn.id, request, content, NATIVE[turn.stop], turn.stop_sequence, turn.usage)

    def models_body(self, models: tuple[str, ...]) -> dict[str, Any]:
        first, last = (models[0], models[-1]) if models else (None, None)
        data = [self.model_body(model) for model in models]
        return {"data": data, "has_more": False, "first_id": first, "last_id": last}

    def model_body(self, model: str) -> dict[str, Any]:
        return {"type": "model", "id": model, "display_name": model, "created_at": "1970-01-01T00:00:00Z"}

    def progress_of(self, event: Mapping[str, Any]) -> AnswerProgress | None:
        match event.get("type"):
            case "message_start":
                return AnswerProgress(usage=(event.get("message") or {}).get("usage"))
            case "message_delta":
                return AnswerProgress(usage=event.get("usage"), finished=True)
            case "message_stop":
                return AnswerProgress(finished=True, done=True)
            case "error":
                return AnswerProgress(error=event)
            case _:
                return None

    def adapt(self, request: Request, *, foreign: bool, edits: list[Edit]) -> Request:
        return replace(request, sampling=_fit_sampling(request, edits)) if foreign else request

    def private_system(self, text: str) -> str | None:
        return "the billing line of Claude Code is for Anthropic only" if text.startswith(BILLING) else None

    def as_function(self, tool: Tool) -> Tool | None:
        kind = re.sub(r"_\d{8}$", "", str((tool.raw or {}).get("type")))
        if kind not in _CLIENT_SIDE:
            return None
        description, properties, required = _CLIENT_SIDE[kind]
        return Tool(tool.name, description, {"type": "object", "properties": properties, "required": required})

    def without_remote(self, part: Mapping[str, Any]) -> dict[str, Any] | None:
        kind, source = part.get("type"), part.get("source")
        if isinstance(source, dict):
            away = source.get("type") not in ("base64", "text", "content")
        else:  # the source of a search result is its name
            away = source is not None and kind != "search_result"
        linked = any(name.endswith("_url") for name in part)
        return {"type": "text", "text": REMOVED} if away or linked or kind == "container_upload" else None


def read_stop(native: Any, has_calls: bool) -> StopReason:
    """The canonical stop; an answer with calls is `tool_use` even if the server reports `end_turn`."""
    stop = STOPS.get(native or "", "other")
    return "tool_use" if has_calls and stop in ("end", "other") else stop


def _render_thinking(budget: int | None) -> dict[str, Any] | None:
    if budget is None:
        return None
    if budget <= 0:
        return {"type": "disabled" if budget == 0 else "adaptive"}
    return {"type": "enabled", "budget_tokens": budget}


def _fit_sampling(request: Request, edits: list[Edit]) -> Sampling:
    """Sampling that Anthropic accepts: thinking only if the history allows it, and then without a temperature."""
    sampling = request.sampling
    budget = sampling.thinking_budget
    forced = request.tool_choice is not None and request.tool_choice.mode in ("any", "tool")
    if budget is not None and (budget <= 0 or forced or not _can_think(request.messages)):
        if budget > 0:
            edits.append(Edit("removed", "thinking", "the history holds calls without Anthropic's reasoning"))
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
    """Whether thinking can be enabled: Anthropic requires the reasoning of the current tool loop in the history."""
    for message in reversed(messages):
        if message.role == "assistant" and any(isinstance(part, ToolCall) for part in message.parts):
            return any(isinstance(part, Reasoning) for part in message.parts)
    return True
