"""OpenAI Chat Completions, as implemented by OpenAI, vLLM, OpenRouter, DeepSeek and many others.

System prompts are the leading system messages; later ones keep their position. Tool results are separate messages.
Reasoning is in `reasoning_content`, and in `reasoning_details` if the server sent those. `OpenAI` is the base that
Responses shares: usage, errors, the list of models.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from pier.wire.contract import REMOVED, AnswerProgress, Dialect, Route
from pier.wire.sse import EventParser, EventRenderer, sse
from pier.wire.turn import (
    Delta,
    ErrorKind,
    Media,
    Opaque,
    Part,
    Reasoning,
    Refusal,
    Request,
    ResponseFormat,
    Sampling,
    StopReason,
    StreamError,
    Text,
    Tokens,
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
    ParsedMessage,
    as_count,
    compact,
    data_url,
    error_text,
    fresh_id,
    gather_messages,
    kind_of_status,
    media_at,
    need_dict,
    need_str,
    parse_parts,
    result_parts,
    without,
)

STOPS: dict[str, StopReason] = {
    "stop": "end",
    "length": "length",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}
_FINISHES = {"length": "length", "context": "length", "tool_use": "tool_calls", "refusal": "content_filter"}
"""The finish reasons other than `stop`."""
_SAMPLING = {
    **{name: name for name in ("max_tokens", "temperature", "top_p", "top_k", "stop", "seed", "presence_penalty")},
    **{name: name for name in ("frequency_penalty", "logprobs", "top_logprobs")},
    "effort": "reasoning_effort",
}
_DELTAS: dict[Any, str] = {Text: "content", Refusal: "refusal", Reasoning: "reasoning_content"}
_NEW_MAX = re.compile(r"(^|/)(o[1-9]|gpt-[5-9]|codex)", re.IGNORECASE)
_FIELDS = (
    *("model", "messages", "tools", "tool_choice", "parallel_tool_calls", "stream", "stream_options", "n"),
    *("max_completion_tokens", "response_format", *_SAMPLING.values()),
)
_SCHEME = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]*://")
_PROSE = ("text", "refusal", "thinking", "content", "annotations")
_CONTENT = AnswerProgress(content=True)
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
LOCAL_FIELDS = """
    temperature top_p top_k min_p top_a typical_p seed stop stop_token_ids presence_penalty frequency_penalty
    repetition_penalty length_penalty logit_bias logprobs top_logprobs prompt_logprobs min_tokens bad_words ignore_eos
    skip_special_tokens spaces_between_special_tokens include_stop_str_in_output return_token_ids
    return_tokens_as_token_ids chat_template_kwargs structured_outputs guided_json guided_regex guided_choice
    guided_grammar cache_salt priority
"""


def _table(raw: Mapping[str, Any], name: str, other: str) -> Mapping[str, Any]:
    found = raw.get(name) or raw.get(other)
    return found if isinstance(found, dict) else {}


class OpenAI(Dialect):
    """The base of OpenAI's two dialects."""

    def error_body(self, status: int, message: str, kind: ErrorKind) -> dict[str, Any]:
        type_, code = _ERROR_TYPES[kind]
        return {"error": {"message": message, "type": type_, "param": None, "code": code}}

    def read_usage(self, raw: Any) -> Usage:
        """Usage with the names of Chat or Responses, and of DeepSeek (cache hits) and OpenRouter (cost)."""
        if not isinstance(raw, dict):
            return Usage()
        prompt = _table(raw, "prompt_tokens_details", "input_tokens_details")
        completion = _table(raw, "completion_tokens_details", "output_tokens_details")
        cached, cost = as_count(prompt.get("cached_tokens")), raw.get("cost")
        return Usage(
            input_tokens=as_count(raw.get("prompt_tokens", raw.get("input_tokens"))),
            output_tokens=as_count(raw.get("completion_tokens", raw.get("output_tokens"))),
            cached_tokens=cached if cached is not None else as_count(raw.get("prompt_cache_hit_tokens")),
            cache_write_tokens=as_count(prompt.get("cache_write_tokens")),
            reasoning_tokens=as_count(completion.get("reasoning_tokens")),
            cost_usd=float(cost) if isinstance(cost, int | float) and 0 <= cost < math.inf else None,
        )

    def models_body(self, models: tuple[str, ...]) -> dict[str, Any]:
        return {"object": "list", "data": [self.model_body(model) for model in models]}

    def model_body(self, model: str) -> dict[str, Any]:
        return {"id": model, "object": "model", "created": 0, "owned_by": "pier"}


def render_usage(usage: Usage, given: str = "prompt", sampled: str = "completion") -> dict[str, Any] | None:
    """Usage with the names of Chat or Responses."""
    if usage.total_tokens is None:
        return None
    cached = {"cached_tokens": usage.cached_tokens, "cache_write_tokens": usage.cache_write_tokens}
    body = {
        f"{given}_tokens": usage.input_tokens or 0,
        f"{given}_tokens_details": compact(cached) or None,
        f"{sampled}_tokens": usage.output_tokens or 0,
        f"{sampled}_tokens_details": compact({"reasoning_tokens": usage.reasoning_tokens}) or None,
        "total_tokens": usage.total_tokens,
        "cost": usage.cost_usd,
    }
    return compact(body)


def parse_tokens(body: Mapping[str, Any], choice: Mapping[str, Any]) -> Tokens | None:
    """Token ids and log-probs of an answer or chunk in vLLM's format (`return_token_ids`, or log-probs whose tokens are
    `token_id:N`), and the version of the weights in SGLang's (`meta_info`)."""
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
    """The token ids in the entries of log-probs; None unless each entry has one."""
    found = [entry.get("token_id", str(entry.get("token", "")).removeprefix("token_id:")) for entry in content]
    named = all("token_id" in entry or str(entry.get("token", "")).startswith("token_id:") for entry in content)
    return [int(each) for each in found] if named else None


def _weights(body: Mapping[str, Any], choice: Mapping[str, Any]) -> str | None:
    for place in (body, choice, body.get("meta_info"), choice.get("meta_info"), body.get("metadata")):
        if isinstance(place, Mapping) and place.get("weight_version") is not None:
            return str(place["weight_version"])
    return None


def _parse_message(message: Mapping[str, Any]) -> ParsedMessage:
    role = message.get("role")
    if role == "assistant":
        return "assistant", parse_assistant(message), None
    parts = parse_parts(message.get("content"), _parse_part)
    if role == "tool":
        call_id = need_str(message.get("tool_call_id"), "tool_call_id")
        return "user", [ToolResult(call_id, result_parts(parts), name=message.get("name"))], "results"
    if role not in ("system", "developer", "user"):
        raise BadRequest(f"unknown role {role!r}")
    return "user" if role == "user" else "system", parts, None


def _parse_part(part: dict[str, Any]) -> Part:
    kind = part.get("type")
    if kind == "text":
        return Text(part.get("text") or "")
    if kind == "refusal":
        return Refusal(part.get("refusal") or "")
    if kind == "image_url" and isinstance(part.get("image_url"), dict) and set(part["image_url"]) == {"url"}:
        return media_at(need_str(part["image_url"]["url"], "image_url.url"))
    return Opaque("chat", part)


def parse_assistant(message: Mapping[str, Any]) -> list[Part]:
    parts: list[Part] = []
    details = message.get("reasoning_details")
    signature = json.dumps(details, ensure_ascii=False) if details else None
    thought = message.get("reasoning_content") or message.get("reasoning") or ""
    if thought or signature:
        parts.append(Reasoning(thought, signature, "chat"))
    parts.extend(parse_parts(message.get("content"), _parse_part))
    if message.get("refusal"):
        parts.append(Refusal(message["refusal"]))
    parts.extend(_parse_call(need_dict(call, "a tool call")) for call in message.get("tool_calls") or ())
    return parts


def _parse_call(call: Mapping[str, Any]) -> ToolCall:
    custom = call.get("type") == "custom"
    body = call.get("custom" if custom else "function")
    if not isinstance(body, dict) or not isinstance(body.get("name"), str):
        raise BadRequest("a tool call must name its function")
    raw = body.get("input" if custom else "arguments")
    text = raw if isinstance(raw, str) else "" if raw is None else json.dumps(raw, ensure_ascii=False)
    return ToolCall(call.get("id") or fresh_id("call_"), body["name"], text, custom=custom)


def parse_tool(raw: Any, namespace: str | None = None, *, flat: bool = False) -> Tool:
    """Parse a tool in the format of Chat or, if `flat`, of Responses, whose tools have no nested object."""
    tool = need_dict(raw, "a tool")
    kind = tool.get("type")
    body = tool if flat else tool.get(str(kind))
    if kind not in ("function", "custom") or (kind == "custom" and not isinstance(body, dict)):
        return Tool(str(kind), kind="hosted", raw=tool)
    body = need_dict(body, f"tools[].{kind}")
    name, description = need_str(body.get("name"), f"the name of a {kind}"), body.get("description")
    if kind == "custom":
        return Tool(name, description, kind="custom", namespace=namespace, raw=tool)
    return Tool(name, description, body.get("parameters"), body.get("strict"), namespace=namespace)


def render_tool(tool: Tool, *, flat: bool = False) -> dict[str, Any]:
    custom = tool.kind == "custom"
    if tool.raw is not None and (tool.kind == "hosted" or (custom and (flat or "custom" in tool.raw))):
        return dict(tool.raw)
    kind, body = "custom" if custom else "function", {"name": tool.name, "description": tool.description}
    body = compact(body if custom else {**body, "parameters": tool.schema, "strict": tool.strict})
    return {"type": kind, **(body if flat else {kind: body})}


def parse_choice(raw: Any) -> ToolChoice | None:
    """Parse a choice in the format of Chat or Responses."""
    if raw in ("auto", "none"):
        return ToolChoice(raw)
    if raw == "required":
        return ToolChoice("any")
    if isinstance(raw, dict):
        named = raw.get(raw.get("type") or "", raw)
        if isinstance(named, dict) and isinstance(named.get("name"), str):
            return ToolChoice("tool", named["name"])
    return None


def render_choice(choice: ToolChoice | None, *, flat: bool = False) -> Any:
    if choice is None:
        return None
    if choice.mode == "tool":
        named = {"name": choice.name}
        return {"type": "function", **(named if flat else {"function": named})}
    return "required" if choice.mode == "any" else choice.mode


def parse_format(raw: Any) -> ResponseFormat | None:
    if not isinstance(raw, dict) or raw.get("type") not in ("json_object", "json_schema"):
        return None
    inner = raw.get("json_schema") or raw
    return ResponseFormat(inner.get("schema"), inner.get("name"), inner.get("strict"))


def render_format(format_: ResponseFormat | None, *, flat: bool = False) -> dict[str, Any] | None:
    if format_ is None:
        return None
    if format_.schema is None:
        return {"type": "json_object"}
    inner = compact({"name": format_.name or "answer", "schema": format_.schema, "strict": format_.strict})
    return {"type": "json_schema", **(inner if flat else {"json_schema": inner})}


def render_messages(request: Request) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if request.system:
        messages.append({"role": "system", "content": "\n\n".join(request.system)})
    for message in request.messages:
        if message.role == "assistant":
            messages.append(render_assistant(message.parts, answer=False))
            continue
        rest: list[Part] = []
        for part in message.parts:
            if isinstance(part, ToolResult):
                text = "".join(piece.text for piece in part.parts if isinstance(piece, Text))
                messages.append({"role": "tool", "tool_call_id": part.call_id, "content": text})
                # a tool message holds only text, so its pictures follow in a user's message
                rest.extend(piece for piece in part.parts if not isinstance(piece, Text))
            else:
                rest.append(part)
        if rest or not message.parts:
            messages.append({"role": message.role, "content": _render_content(rest)})
    return messages


def _render_content(parts: list[Part]) -> str | list[dict[str, Any]]:
    if not parts:
        return ""
    if len(parts) == 1 and isinstance(parts[0], Text):
        return parts[0].text
    rendered: list[dict[str, Any]] = []
    for part in parts:
        match part:
            case Text(text=text) | Refusal(text=text):
                rendered.append({"type": "text", "text": text})
            case Media(data=str(data)) if part.is_image:
                rendered.append({"type": "image_url", "image_url": {"url": data_url(part.media_type, data)}})
            case Media(data=str(data)):
                file = {"filename": part.name or "file", "file_data": data_url(part.media_type, data)}
                rendered.append({"type": "file", "file": file})
            case Media(url=str(url)):
                rendered.append({"type": "image_url", "image_url": {"url": url}})
            case Opaque(dialect="chat", value=value):
                rendered.append(dict(value))
            case _:
                pass
    return rendered or ""


def render_assistant(parts: tuple[Part, ...], *, answer: bool) -> dict[str, Any]:
    """Render an assistant message. An `answer` shows all reasoning, a history only that of a chat server."""
    texts = [part.text for part in parts if isinstance(part, Text)]
    refusals = [part.text for part in parts if isinstance(part, Refusal)]
    thoughts = [part for part in parts if isinstance(part, Reasoning) and (answer or part.origin == "chat")]
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) if texts else None}
    if refusals:
        message["refusal"] = "".join(refusals)
    if thought := "".join(part.text for part in thoughts):
        message["reasoning_content"] = thought
    for part in thoughts:
        if part.signature and part.origin == "chat":
            message["reasoning_details"] = json.loads(part.signature)
    calls = [_render_call(part) for part in parts if isinstance(part, ToolCall)]
    if calls:
        message["tool_calls"] = calls
    elif message["content"] is None and not answer:
        message["content"] = ""
    return message


def _render_call(call: ToolCall) -> dict[str, Any]:
    if call.custom:
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


class ChatParser(EventParser):
    """Chunks to deltas. The end is deferred to `[DONE]` or the close, since usage follows the finish reason."""

    def __init__(self, dialect: Dialect) -> None:
        super().__init__(dialect)
        self._call_key: int | None = None
        self._details: list[dict[str, Any]] = []
        self._finish: tuple[Any, Any] | None = None
        self._usage = Usage()

    def on_event(self, event: str | None, data: Mapping[str, Any]) -> Iterator[Delta]:
        if data.get("error"):
            yield stream_error(data)
            return
        yield from self._begin(data.get("id"), data.get("model"))
        if data.get("usage"):
            self._usage = self.dialect.read_usage(data["usage"])
        choices = data.get("choices") or []
        choice = choices[0] if choices else {}
        if tokens := parse_tokens(data, choice):
            yield tokens
        yield from self._on_delta(choice.get("delta") or {})
        if choice.get("finish_reason"):
            self._finish = (choice["finish_reason"], choice.get("stop_reason"))
            yield from self._end_part()
            self.done = True

    def on_close(self) -> Iterator[Delta]:
        if self._finish is None:
            return
        native, matched = self._finish
        self._finish = None
        stop = read_stop(native, matched, self._has_calls)
        yield TurnEnd(stop, self._usage, native, matched if isinstance(matched, str) else None)

    def _on_delta(self, delta: Mapping[str, Any]) -> Iterator[Delta]:
        for detail in delta.get("reasoning_details") or ():
            _merge_detail(self._details, detail)
        thought = delta.get("reasoning_content") or delta.get("reasoning")
        if thought or delta.get("reasoning_details"):
            yield from self._add(Reasoning("", origin="chat"), thought or "")
        if delta.get("content"):
            yield from self._add(Text(""), delta["content"])
        if delta.get("refusal"):
            yield from self._add(Refusal(""), delta["refusal"])
        for fragment in delta.get("tool_calls") or ():
            yield from self._on_call(fragment)

    def _on_call(self, fragment: Mapping[str, Any]) -> Iterator[Delta]:
        custom = fragment.get("type") == "custom" or "custom" in fragment
        body = fragment.get("custom" if custom else "function") or {}
        key = fragment.get("index")
        current = self._open[1] if self._open and isinstance(self._open[1], ToolCall) else None
        call_id, name = fragment.get("id"), body.get("name")
        # some servers number all parallel calls 0, or not at all: a new id with a name is a new call too
        renewed = bool(call_id and name and current and call_id != current.id)
        if current is None or renewed or (key is not None and key != self._call_key):
            if not name:
                raise ValueError(f"arguments for tool call {key}, which is not open")
            yield from self._start(ToolCall(call_id or fresh_id("call_"), name, "", custom=custom))
            self._call_key = key
        text = body.get("input" if custom else "arguments")
        if text:
            yield from self._grow(text if isinstance(text, str) else json.dumps(text, ensure_ascii=False))

    def _end_part(self) -> Iterator[Delta]:
        if self._details and self._open and isinstance(self._open[1], Reasoning):
            yield from self._grow("", json.dumps(self._details, ensure_ascii=False))
            self._details = []
        yield from super()._end_part()


def _merge_detail(details: list[dict[str, Any]], new: Any) -> None:
    """Append a fragment of streamed reasoning details; those of one block are joined."""
    if not isinstance(new, dict):
        raise ValueError("a reasoning detail that is not an object")
    last = details[-1] if details else None
    if last is None or (last.get("type"), last.get("index")) != (new.get("type"), new.get("index")):
        details.append(dict(new))
        return
    for key, value in new.items():
        if key in ("text", "summary", "data", "signature") and isinstance(value, str):
            last[key] = (last.get(key) or "") + value
        else:
            last.setdefault(key, value)


def stream_error(data: Mapping[str, Any]) -> StreamError:
    """The error in an event, whose code may be a status."""
    inner = data["error"]
    code = inner.get("code") if isinstance(inner, Mapping) else None
    status = code if isinstance(code, int) and 400 <= code < 600 else 502
    return StreamError(error_text(dict(data)), kind_of_status(status), status)


class ChatRenderer(EventRenderer):
    """Writes the chunks of one choice, then usage, then `[DONE]`."""

    def __init__(self, dialect: Dialect, request: Request) -> None:
        super().__init__(dialect, request)
        self._id = fresh_id("chatcmpl-")
        self._created = int(time.time())
        self._calls = -1

    def keep_alive(self) -> bytes:
        # without a blank line this is not an event, so no client tries to decode it
        return b": keep-alive\n"

    def _begin(self, start: TurnStart) -> bytes:
        self._id = start.id or self._id
        return self._chunk({"role": "assistant", "content": ""})

    def _start(self, part: Part) -> bytes:
        if isinstance(part, ToolCall):
            self._calls += 1
            return self._chunk({"tool_calls": [{"index": self._calls, **_render_call(part)}]})
        return self._more(part.text) if isinstance(part, Text | Reasoning | Refusal) else b""

    def _grow(self, text: str) -> bytes:
        if isinstance(self._part, ToolCall):
            kind, field = ("custom", "input") if self._part.custom else ("function", "arguments")
            return self._chunk({"tool_calls": [{"index": self._calls, kind: {field: text}}]})
        return self._chunk({_DELTAS[type(self._part)]: text})

    def _end(self, end: TurnEnd) -> bytes:
        choice = {"stop_reason": end.stop_sequence} if end.stop_sequence is not None else {}
        data = self._chunk({}, finish=_FINISHES.get(end.stop, "stop"), **choice)
        usage = render_usage(end.usage)
        if self._request.stream_usage and usage:
            data += sse({**self._head(), "choices": [], "usage": usage})
        return data + b"data: [DONE]\n\n"

    def _chunk(self, delta: Mapping[str, Any], finish: str | None = None, **more: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, **more}
        usage = {"usage": None} if self._request.stream_usage else {}
        return sse({**self._head(), "choices": [choice], **usage})

    def _head(self) -> dict[str, Any]:
        model = self._request.model
        return {"id": self._id, "object": "chat.completion.chunk", "created": self._created, "model": model}


class Chat(OpenAI):
    name = "chat"
    parser, renderer = ChatParser, ChatRenderer
    path = "/v1/chat/completions"
    client_headers = """
        openai-beta http-referer x-title x-openrouter-* x-session-affinity x-parent-session-id agent-session-id
        x-initiator x-interaction-type x-dashscope-cachecontrol x-dashscope-useragent x-dashscope-authtype x-msh-*
        x-grok-*
    """
    client_query = re.compile(r"api-version=[\w.-]{1,32}")
    routes = (
        ("POST", "(?:/api)?(?:/v1)?/chat/completions", "generate"),
        ("GET", "(?:/api)?(?:/v1)?/models", "models"),
        ("GET", "(?:/api)?/v1/models/(.+)", "model"),
    )
    answer_field = "choices"
    content_fields = ("choices",)
    sampling_names = _SAMPLING
    unknown_sampling = ("top_k", "thinking_budget")
    count_fields = ("n",)
    local_fields = f"""{LOCAL_FIELDS}
        model messages tools tool_choice parallel_tool_calls functions function_call stream stream_options n
        max_tokens max_completion_tokens response_format reasoning reasoning_effort include_reasoning thinking
        enable_thinking thinking_budget verbosity modalities audio prediction user safety_identifier metadata store
        service_tier prompt_cache_key prompt_cache_retention provider transforms usage options keep_alive
    """
    file_places = ("messages",)
    untyped_tool = "function"
    tool_fields = "type function custom strict cache_control"

    def with_sampling(self, body: Mapping[str, Any], sampling: Sampling) -> dict[str, Any]:
        changed = super().with_sampling(body, sampling)
        new = "max_completion_tokens" in body or _NEW_MAX.search(str(body.get("model")))
        if sampling.max_tokens is not None and new:
            changed["max_completion_tokens"] = changed.pop("max_tokens")
        return changed

    def _parse_request(self, body: Mapping[str, Any], route: Route | None) -> Request:
        system, messages = gather_messages(body.get("messages"), "messages", _parse_message)
        options, limit = body.get("stream_options"), body.get("max_completion_tokens")
        parameters = body if limit is None else {**body, "max_tokens": limit}
        return Request(
            model=need_str(body.get("model"), "model"),
            messages=messages,
            system=system,
            tools=tuple(parse_tool(tool) for tool in body.get("tools") or ()),
            tool_choice=parse_choice(body.get("tool_choice")),
            parallel_tools=body.get("parallel_tool_calls"),
            sampling=self.read_sampling(parameters),
            response_format=parse_format(body.get("response_format")),
            stream=bool(body.get("stream")),
            stream_usage=bool(isinstance(options, dict) and options.get("include_usage")),
            dialect=self.name,
            extra=without(body, *_FIELDS),
        )

    def _render_request(self, request: Request) -> dict[str, Any]:
        body = {
            "model": request.model,
            "messages": render_messages(request),
            "tools": [render_tool(tool) for tool in request.tools] or None,
            "tool_choice": render_choice(request.tool_choice),
            "parallel_tool_calls": request.parallel_tools,
            **self.write_sampling(request.sampling),
            "response_format": render_format(request.response_format),
            "stream": request.stream or None,
            "stream_options": {"include_usage": True} if request.stream and request.stream_usage else None,
        }
        if _NEW_MAX.search(request.model):
            body["max_completion_tokens"] = body.pop("max_tokens")
        return {**(request.extra if request.dialect == self.name else {}), **compact(body)}

    def _parse_response(self, body: Mapping[str, Any]) -> Turn:
        choice = need_dict(body["choices"][0], "a choice")
        parts = tuple(parse_assistant(need_dict(choice.get("message"), "message")))
        native, matched = choice.get("finish_reason"), choice.get("stop_reason")
        return Turn(
            parts=parts,
            stop=read_stop(native, matched, any(isinstance(part, ToolCall) for part in parts)),
            usage=self.read_usage(body.get("usage")),
            id=body.get("id"),
            model=body.get("model"),
            native_stop=native,
            stop_sequence=matched if isinstance(matched, str) else None,
            tokens=parse_tokens(body, choice),
        )

    def render_response(self, turn: Turn, request: Request) -> dict[str, Any]:
        message, finish = render_assistant(turn.parts, answer=True), _FINISHES.get(turn.stop, "stop")
        choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
        if turn.stop_sequence is not None:
            choice["stop_reason"] = turn.stop_sequence
        return compact(
            {
                "id": turn.id or fresh_id("chatcmpl-"),
                "object": "chat.completion",
                "created": int(time.time()),
                "model": request.model,
                "choices": [choice],
                "usage": render_usage(turn.usage),
            }
        )

    def progress_of(self, event: Mapping[str, Any]) -> AnswerProgress | None:
        choices, usage = event.get("choices") or (), event.get("usage")
        error = event if "error" in event and "choices" not in event else None
        finished = any(isinstance(choice, dict) and choice.get("finish_reason") for choice in choices)
        if not (finished or usage or error):
            return _CONTENT if choices else None
        return AnswerProgress(usage=usage, content=bool(choices), finished=finished, error=error)

    def without_remote(self, part: Mapping[str, Any]) -> dict[str, Any] | None:
        """Replace parts with `..._url` fields and any other link, which servers fetch whatever the media type."""
        file = part.get("file")
        named = {**part, **{name.casefold(): value for name, value in file.items()}} if isinstance(file, dict) else part
        is_message = "role" in part and "type" not in part
        linked = has_link(file) or (not is_message and has_link(part))
        away = linked or has_web_url(named) or named.get("file_id")
        return {"type": "text", "text": REMOVED} if away else None


def has_web_url(part: Mapping[str, Any]) -> bool:
    """Whether a field of the part named `..._url` holds an address other than a `data:` URL."""
    links = (value for key, value in part.items() if key.endswith("_url"))
    urls = (link.get("url") if isinstance(link, dict) else link for link in links)
    return any(isinstance(url, str) and not url.startswith("data:") for url in urls)


def has_link(value: Any) -> bool:
    """Whether a part holds a link under any name; texts and their sources are ignored."""
    if isinstance(value, dict):
        return any(has_link(inner) for key, inner in value.items() if key not in _PROSE)
    if isinstance(value, list):
        return any(has_link(inner) for inner in value)
    return isinstance(value, str) and _SCHEME.match(value) is not None


def read_stop(native: Any, matched: Any, has_calls: bool) -> StopReason:
    """The canonical stop: calls take precedence over `stop`; `matched` is the stop string that vLLM reports."""
    stop = STOPS.get(native or "stop", "other")
    if stop == "end" and has_calls:
        return "tool_use"
    return "stop_sequence" if stop == "end" and isinstance(matched, str) else stop
