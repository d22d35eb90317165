"""OpenAI Chat Completions, as OpenAI, vLLM, OpenRouter, DeepSeek and many others speak it.

System prompts are the leading system messages; later ones stay where they are. Tool results are separate messages.
Reasoning travels as `reasoning_content`, or with its `reasoning_details` where a server gave those.

The parts of a chat body: messages, tools, choices and sampling, both ways.

Chat Completions as a stream: chunks of one choice, then usage, then `[DONE]`.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pier.wire.contract import (
    SSE,
    BadRequest,
    BadResponse,
    EventParser,
    Route,
    check_recordable,
    compact,
    data_url,
    error_text,
    fresh_id,
    kind_of_status,
    need_dict,
    need_list,
    need_str,
    parse_data_url,
    sse,
    take,
)
from pier.wire.openai import chat_usage, error_body, is_context_error, model_body, models_body, parse_tokens, read_usage
from pier.wire.turn import (
    Delta,
    DialectName,
    ErrorKind,
    Media,
    Message,
    Opaque,
    Part,
    PartDelta,
    PartEnd,
    PartStart,
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


def parse_messages(raw: list[Any]) -> tuple[tuple[str, ...], tuple[Message, ...]]:
    system: list[str] = []
    messages: list[Message] = []
    after_tool = False
    for position, item in enumerate(raw):
        message = need_dict(item, f"messages[{position}]")
        role = message.get("role")
        is_tool = role == "tool"
        if role in ("system", "developer"):
            parts = _parse_content(message.get("content"))
            if not messages:
                system.extend(part.text for part in parts if isinstance(part, Text))
            else:
                messages.append(Message("system", tuple(parts)))
        elif role == "user":
            messages.append(Message("user", tuple(_parse_content(message.get("content")))))
        elif role == "assistant":
            messages.append(Message("assistant", tuple(parse_assistant(message, BadRequest))))
        elif is_tool:
            result = _parse_result(message)
            if after_tool:
                messages[-1] = Message("user", (*messages[-1].parts, result))
            else:
                messages.append(Message("user", (result,)))
        else:
            raise BadRequest(f"messages[{position}] has the unknown role {role!r}")
        after_tool = is_tool
    return tuple(system), tuple(messages)


def _parse_result(message: Mapping[str, Any]) -> ToolResult:
    parts = tuple(part for part in _parse_content(message.get("content")) if isinstance(part, Text | Media | Opaque))
    return ToolResult(need_str(message.get("tool_call_id"), "tool_call_id"), parts, name=message.get("name"))


def _parse_content(content: Any) -> list[Part]:
    if content is None or content == "":
        return []
    if isinstance(content, str):
        return [Text(content)]
    return [_parse_part(need_dict(part, "a content part")) for part in need_list(content, "content")]


def _parse_part(part: dict[str, Any]) -> Part:
    kind = part.get("type")
    if kind == "text":
        return Text(part.get("text") or "")
    if kind == "refusal":
        return Refusal(part.get("refusal") or "")
    if kind == "image_url" and isinstance(part.get("image_url"), dict) and set(part["image_url"]) == {"url"}:
        url = need_str(part["image_url"]["url"], "image_url.url")
        if inline := parse_data_url(url):
            return Media(inline[0], inline[1])
        return Media(url=url)
    return Opaque("chat", part)


def parse_assistant(message: Mapping[str, Any], error: type[BadRequest] | type[BadResponse]) -> list[Part]:
    parts: list[Part] = []
    details = message.get("reasoning_details")
    signature = json.dumps(details, ensure_ascii=False) if details else None
    thought = message.get("reasoning_content") or message.get("reasoning") or ""
    if thought or signature:
        parts.append(Reasoning(thought, signature, "chat"))
    parts.extend(_parse_content(message.get("content")))
    if message.get("refusal"):
        parts.append(Refusal(message["refusal"]))
    for call in message.get("tool_calls") or ():
        if not isinstance(call, dict):
            raise error("a tool call must be an object")
        parts.append(_parse_call(call, error))
    return parts


def _parse_call(call: Mapping[str, Any], error: type[BadRequest] | type[BadResponse]) -> ToolCall:
    custom = call.get("type") == "custom"
    body = call.get("custom" if custom else "function")
    if not isinstance(body, dict) or not isinstance(body.get("name"), str):
        raise error("a tool call must name its function")
    raw = body.get("input" if custom else "arguments")
    text = raw if isinstance(raw, str) else "" if raw is None else json.dumps(raw, ensure_ascii=False)
    return ToolCall(call.get("id") or fresh_id("call_"), body["name"], text, custom=custom)


def parse_tool(raw: Any) -> Tool:
    tool = need_dict(raw, "a tool")
    kind = tool.get("type")
    if kind == "function":
        function = need_dict(tool.get("function"), "tools[].function")
        return Tool(
            need_str(function.get("name"), "tools[].function.name"),
            function.get("description"),
            function.get("parameters"),
            function.get("strict"),
        )
    if kind == "custom" and isinstance(tool.get("custom"), dict):
        custom = tool["custom"]
        return Tool(need_str(custom.get("name"), "a tool's name"), custom.get("description"), kind="custom", raw=tool)
    return Tool(str(kind), kind="hosted", raw=tool)


def render_tool(tool: Tool) -> dict[str, Any]:
    if tool.kind == "hosted" and tool.raw is not None:
        return dict(tool.raw)
    if tool.kind == "custom":
        if tool.raw is not None and "custom" in tool.raw:
            return dict(tool.raw)
        return {"type": "custom", "custom": compact({"name": tool.name, "description": tool.description})}
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.schema,
        "strict": tool.strict,
    }
    return {"type": "function", "function": compact(function)}


def parse_choice(raw: Any) -> ToolChoice | None:
    if raw in ("auto", "none"):
        return ToolChoice(raw)
    if raw == "required":
        return ToolChoice("any")
    if isinstance(raw, dict):
        named = raw.get(raw.get("type") or "")
        if isinstance(named, dict) and isinstance(named.get("name"), str):
            return ToolChoice("tool", named["name"])
    return None


def render_choice(choice: ToolChoice | None) -> Any:
    if choice is None:
        return None
    if choice.mode == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.mode == "any" else choice.mode


def parse_sampling(body: Mapping[str, Any]) -> Sampling:
    stop = body.get("stop")
    limit = body.get("max_completion_tokens")
    return Sampling(
        max_tokens=limit if limit is not None else body.get("max_tokens"),
        temperature=body.get("temperature"),
        top_p=body.get("top_p"),
        top_k=body.get("top_k"),
        stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
        seed=body.get("seed"),
        presence_penalty=body.get("presence_penalty"),
        frequency_penalty=body.get("frequency_penalty"),
        effort=body.get("reasoning_effort"),
        logprobs=bool(body.get("logprobs")),
        top_logprobs=body.get("top_logprobs"),
    )


def parse_format(raw: Any) -> ResponseFormat | None:
    if not isinstance(raw, dict) or raw.get("type") not in ("json_object", "json_schema"):
        return None
    inner = raw.get("json_schema") or {}
    return ResponseFormat(inner.get("schema"), inner.get("name"), inner.get("strict"))


def render_format(wanted: ResponseFormat | None) -> dict[str, Any] | None:
    if wanted is None:
        return None
    if wanted.schema is None:
        return {"type": "json_object"}
    inner = {"name": wanted.name or "answer", "schema": wanted.schema, "strict": wanted.strict}
    return {"type": "json_schema", "json_schema": compact(inner)}


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
                # A tool message takes text only, so its pictures follow in the user's name.
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
    """An assistant message. As an `answer` it shows all reasoning; as history only what a chat server gave."""
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


ReadStop = Callable[[Any, Any, bool], StopReason]


class ChatParser(EventParser):
    """Chunks to deltas. The end is held back until `[DONE]` or the close, since usage comes after the finish reason."""

    def __init__(self, read_stop: ReadStop) -> None:
        super().__init__()
        self._read_stop = read_stop
        self._started = False
        self._count = 0
        self._open: tuple[int, Part] | None = None
        self._call_key: int | None = None
        self._calls: set[int] = set()
        self._details: list[dict[str, Any]] = []
        self._finish: tuple[Any, Any] | None = None
        self._usage = Usage()

    def on_event(self, event: str | None, data: Mapping[str, Any]) -> Iterator[Delta]:
        if data.get("error"):
            yield _error(data)
            return
        if not self._started:
            self._started = True
            yield TurnStart(data.get("id"), data.get("model"))
        if data.get("usage"):
            self._usage = read_usage(data["usage"])
        choices = data.get("choices") or []
        choice = choices[0] if choices else {}
        if tokens := parse_tokens(data, choice):
            yield tokens
        yield from self._on_delta(choice.get("delta") or {})
        if choice.get("finish_reason"):
            self._finish = (choice["finish_reason"], choice.get("stop_reason"))
            yield from self._shut()
            self.done = True

    def on_close(self) -> Iterator[Delta]:
        if self._finish is None:
            return
        native, matched = self._finish
        self._finish = None
        stop = self._read_stop(native, matched, bool(self._calls))
        yield TurnEnd(stop, self._usage, native, matched if isinstance(matched, str) else None)

    def _on_delta(self, delta: Mapping[str, Any]) -> Iterator[Delta]:
        for detail in delta.get("reasoning_details") or ():
            _merge_detail(self._details, detail)
        thought = delta.get("reasoning_content") or delta.get("reasoning")
        if thought:
            yield from self._grow(Reasoning("", origin="chat"), thought)
        elif delta.get("reasoning_details") and not (self._open and isinstance(self._open[1], Reasoning)):
            yield from self._switch(Reasoning("", origin="chat"))
        if delta.get("content"):
            yield from self._grow(Text(""), delta["content"])
        if delta.get("refusal"):
            yield from self._grow(Refusal(""), delta["refusal"])
        for fragment in delta.get("tool_calls") or ():
            yield from self._on_call(fragment)

    def _on_call(self, fragment: Mapping[str, Any]) -> Iterator[Delta]:
        custom = fragment.get("type") == "custom" or "custom" in fragment
        body = fragment.get("custom" if custom else "function") or {}
        key = fragment.get("index")
        current = self._open[1] if self._open and isinstance(self._open[1], ToolCall) else None
        call_id, name = fragment.get("id"), body.get("name")
        # Some servers number all parallel calls 0, or not at all; a new id with a name is a new call all the same.
        renewed = bool(call_id and name and current and call_id != current.id)
        if current is None or renewed or (key is not None and key != self._call_key):
            if not name:
                raise ValueError(f"arguments for tool call {key}, which is not open")
            yield from self._switch(ToolCall(call_id or fresh_id("call_"), name, "", custom=custom))
            self._call_key = key
            self._calls.add(self._count)
        text = body.get("input" if custom else "arguments")
        if text and self._open:
            yield PartDelta(self._open[0], text if isinstance(text, str) else json.dumps(text, ensure_ascii=False))

    def _grow(self, part: Part, text: str) -> Iterator[Delta]:
        if self._open is None or type(self._open[1]) is not type(part):
            yield from self._switch(part)
        if self._open:
            yield PartDelta(self._open[0], text)

    def _switch(self, part: Part) -> Iterator[Delta]:
        yield from self._shut()
        self._open = (self._count, part)
        self._count += 1
        yield PartStart(self._open[0], part)

    def _shut(self) -> Iterator[Delta]:
        if self._open is None:
            return
        index, part = self._open
        if isinstance(part, Reasoning) and self._details:
            yield PartDelta(index, signature=json.dumps(self._details, ensure_ascii=False))
            self._details = []
        yield PartEnd(index)
        self._open = None


def _merge_detail(details: list[dict[str, Any]], new: Any) -> None:
    """Streamed reasoning details come in fragments; those of one block are joined again."""
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


def _error(data: Mapping[str, Any]) -> StreamError:
    inner = data["error"]
    code = inner.get("code") if isinstance(inner, Mapping) else None
    status = code if isinstance(code, int) and 400 <= code < 600 else 502
    return StreamError(error_text(dict(data)), kind_of_status(status), status)


class ChatRenderer:
    content_type = SSE

    def __init__(self, request: Request, finishes: Mapping[StopReason, str]) -> None:
        self._request = request
        self._finishes = finishes
        self._id = fresh_id("chatcmpl-")
        self._created = int(time.time())
        self._calls = -1
        self._part: Part | None = None

    def render(self, delta: Delta) -> bytes:
        match delta:
            case TurnStart(id=id_):
                self._id = id_ or self._id
                return self._chunk({"role": "assistant", "content": ""})
            case PartStart(part=part):
                return self._start(part)
            case PartDelta(text=text) if text:
                return self._grow(text)
            case TurnEnd():
                return self._end(delta)
            case StreamError(message=message, kind=kind, status=status):
                return self.error(status, message, kind)
            case Ping():
                return self.keep_alive()
            case _:
                return b""

    def keep_alive(self) -> bytes:
        # Without a blank line after it this is not an event, so even careless clients do not try to decode it.
        return b": keep-alive\n"

    def error(self, status: int, message: str, kind: ErrorKind) -> bytes:
        return sse(error_body(status, message, kind))

    def _start(self, part: Part) -> bytes:
        self._part = part
        if isinstance(part, ToolCall):
            self._calls += 1
            body = {"name": part.name, "input" if part.custom else "arguments": part.arguments}
            kind = "custom" if part.custom else "function"
            return self._chunk({"tool_calls": [{"index": self._calls, "id": part.id, "type": kind, kind: body}]})
        if isinstance(part, Text | Reasoning | Refusal) and part.text:
            return self._grow(part.text)
        return b""

    def _grow(self, text: str) -> bytes:
        match self._part:
            case Text():
                return self._chunk({"content": text})
            case Refusal():
                return self._chunk({"refusal": text})
            case Reasoning():
                return self._chunk({"reasoning_content": text})
            case ToolCall(custom=custom):
                kind, field = ("custom", "input") if custom else ("function", "arguments")
                return self._chunk({"tool_calls": [{"index": self._calls, kind: {field: text}}]})
            case _:
                return b""

    def _end(self, end: TurnEnd) -> bytes:
        choice = {"stop_reason": end.stop_sequence} if end.stop_sequence is not None else {}
        data = self._chunk({}, finish=self._finishes[end.stop], **choice)
        usage = chat_usage(end.usage)
        if self._request.stream_usage and usage:
            data += sse({**self._head(), "choices": [], "usage": usage})
        return data + b"data: [DONE]\n\n"

    def _chunk(self, delta: Mapping[str, Any], finish: str | None = None, **more: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, **more}
        usage = {"usage": None} if self._request.stream_usage else {}
        return sse({**self._head(), "choices": [choice], **usage})

    def _head(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._request.model,
        }


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
