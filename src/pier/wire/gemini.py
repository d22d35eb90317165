"""Google Gemini: `generateContent` and `streamGenerateContent`, as events or as one JSON array.

Field names are accepted in camelCase and snake_case, and written in camelCase. A stream consists of whole answers that
each hold new parts; calls arrive in one piece.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from pier.wire.chat import stream_error
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
    Reasoning,
    Refusal,
    Request,
    ResponseFormat,
    Sampling,
    StopReason,
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
    BadResponse,
    as_count,
    compact,
    dump,
    error_text,
    fresh_id,
    join_results,
    need_dict,
    need_list,
    need_str,
    parse_arguments,
    split_results,
    without,
)

_REFUSALS = ("SAFETY", "RECITATION", "BLOCKLIST", "PROHIBITED_CONTENT", "SPII", "IMAGE_SAFETY")
STOPS: dict[str, StopReason] = {"STOP": "end", "MAX_TOKENS": "length", **dict.fromkeys(_REFUSALS, "refusal")}
_FINISHES = {"length": "MAX_TOKENS", "context": "MAX_TOKENS", "refusal": "SAFETY", "other": "OTHER"}
"""The finish reasons other than `STOP`."""
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
_METHODS = ("generateContent", "streamGenerateContent", "countTokens")
_FIELDS = ("contents", "systemInstruction", "tools", "toolConfig", "generationConfig", "model")
_SAMPLING = {
    "max_tokens": "maxOutputTokens",
    "temperature": "temperature",
    "top_p": "topP",
    "top_k": "topK",
    "stop": "stopSequences",
    "seed": "seed",
    "presence_penalty": "presencePenalty",
    "frequency_penalty": "frequencyPenalty",
    "logprobs": "responseLogprobs",
    "top_logprobs": "logprobs",
}
_CONFIG = (
    *_SAMPLING.values(),
    *("thinkingConfig", "responseMimeType", "candidateCount", "responseSchema", "responseJsonSchema"),
)
_decoder = json.JSONDecoder()
_KEPT_TOOLS = ("functionDeclarations", "function_declarations", "computerUse", "computer_use")
_THINKS = re.compile(r"gemini-(2\.5|[3-9])")
_WANTS_SIGNATURES = re.compile(r"gemini-[3-9]")
_FILLER = "skip_thought_signature_validator"
"""Google's placeholder for the signature of a call of another model."""


def camel(body: Any, what: str) -> dict[str, Any]:
    """Convert an object's top-level names to camelCase."""
    return {
        re.sub(r"_([a-z])", lambda found: found[1].upper(), key): value for key, value in need_dict(body, what).items()
    }


class Contents:
    """Reads contents in order, and assigns ids to calls without one, so that results can refer to them."""

    def __init__(self) -> None:
        self._calls = 0
        self._waiting: dict[str, deque[str]] = {}
        """Ids of calls, by the function's name."""
        self._unanswered: set[str] = set()

    def parse(self, raw: Any) -> Iterator[Message]:
        listed = [raw] if isinstance(raw, dict) else need_list(raw, "contents")
        for position, value in enumerate(listed):
            if isinstance(value, str):
                yield Message("user", (Text(value),))
                continue
            content = need_dict(value, f"contents[{position}]")
            parts = [part for raw_part in content.get("parts") or () for part in self._part(camel(raw_part, "a part"))]
            if content.get("role") == "model":
                yield Message("assistant", tuple(parts))
                continue
            yield from (Message("user", group) for group in split_results(parts))

    def _part(self, part: dict[str, Any]) -> Iterator[Part]:
        if isinstance(part.get("functionCall"), dict):
            call = part["functionCall"]
            name = need_str(call.get("name"), "a functionCall's name")
            self._calls += 1
            call_id = call.get("id") or f"call_{self._calls}_{name}"
            self._waiting.setdefault(name, deque()).append(call_id)
            self._unanswered.add(call_id)
            yield parse_call({**call, "id": call_id}, part.get("thoughtSignature"))
        elif isinstance(part.get("functionResponse"), dict):
            yield self._result(part["functionResponse"])
        else:
            yield from parse_part(part)

    def _result(self, response: Mapping[str, Any]) -> ToolResult:
        name = need_str(response.get("name"), "a functionResponse's name")
        call_id = response.get("id")
        found = call_id if call_id in self._unanswered else self._first(name)
        self._unanswered.discard(found)
        body = response.get("response")
        failed = isinstance(body, dict) and set(body) == {"error"}
        if isinstance(body, dict) and len(body) == 1 and set(body) <= {"output", "error", "result", "content"}:
            body = next(iter(body.values()))
        text = body if isinstance(body, str) else "" if body is None else json.dumps(body, ensure_ascii=False)
        parts = (Text(text),) if text else ()
        return ToolResult(call_id or found, parts, failed, name=name)

    def _first(self, name: str) -> str:
        """The first call of this function without a result; else the name itself."""
        waiting = self._waiting.get(name, deque())
        while waiting and waiting[0] not in self._unanswered:
            waiting.popleft()
        return waiting[0] if waiting else name


def parse_call(call: Mapping[str, Any], signature: str | None) -> ToolCall:
    arguments = json.dumps(call.get("args") or {}, ensure_ascii=False)
    call_id = call.get("id") or fresh_id("call_")
    return ToolCall(call_id, need_str(call.get("name"), "a functionCall's name"), arguments, signature=signature)


def parse_part(part: Mapping[str, Any]) -> Iterator[Part]:
    """Parse a part other than a call or a result. A signature on a text becomes an empty thought after it."""
    signature = part.get("thoughtSignature")
    if isinstance(part.get("text"), str):
        if part.get("thought"):
            yield Reasoning(part["text"], signature, "gemini")
            return
        if part["text"]:
            yield Text(part["text"])
        if signature:
            yield Reasoning("", signature, "gemini")
    elif isinstance(part.get("inlineData"), dict):
        data = camel(part["inlineData"], "inlineData")
        yield Media(data.get("mimeType"), data.get("data") or "", name=data.get("displayName"))
    elif isinstance(part.get("fileData"), dict):
        data = camel(part["fileData"], "fileData")
        yield Media(data.get("mimeType"), url=data.get("fileUri"))
    else:
        yield Opaque("gemini", dict(part))


def _contents(messages: Iterable[Message]) -> Iterator[tuple[Message, str, list[dict[str, Any]]]]:
    names: dict[str, str] = {}
    for message in messages:
        parts: list[dict[str, Any]] = []
        for part in message.parts:
            if isinstance(part, ToolCall):
                names[part.id] = part.name
            if isinstance(part, ToolResult):
                parts.extend(_render_result(part, names.get(part.call_id) or part.name or part.call_id))
            elif rendered := render_part(part):
                parts.append(rendered)
        yield message, "model" if message.role == "assistant" else "user", parts


def _render_result(result: ToolResult, name: str) -> Iterator[dict[str, Any]]:
    text = "".join(part.text for part in result.parts if isinstance(part, Text))
    response = {"error" if result.is_error else "output": text}
    yield {"functionResponse": {"id": result.call_id, "name": name, "response": response}}
    for part in result.parts:
        if isinstance(part, Media) and (rendered := render_part(part)):
            yield rendered


def render_part(part: Part, *, answer: bool = False) -> dict[str, Any] | None:
    """Render a part. An `answer` shows all thoughts, a history only those of Gemini."""
    match part:
        case Text(text=text) | Refusal(text=text):
            return {"text": text} if text else None
        case Reasoning():
            is_native = part.origin == "gemini"
            if not is_native and not answer:
                return None
            signature = part.signature if is_native else None
            if not part.text and not signature:
                return None
            return compact({"text": part.text, "thought": True if part.text else None, "thoughtSignature": signature})
        case ToolCall():
            call = {"id": part.id, "name": part.name, "args": parse_arguments(part.arguments)}
            return compact({"functionCall": call, "thoughtSignature": part.signature})
        case Media(data=str(data)):
            return {"inlineData": {"mimeType": part.media_type or "image/png", "data": data}}
        case Media(url=str(url)):
            return {"fileData": compact({"mimeType": part.media_type, "fileUri": url})}
        case Opaque(dialect="gemini", value=value):
            return dict(value)
        case _:
            return None


def parse_tools(raw: Any) -> Iterator[Tool]:
    for value in raw or ():
        for key, content in camel(value, "a tool").items():
            if key != "functionDeclarations":
                yield Tool(key, kind="hosted", raw={key: content})
                continue
            for declaration in need_list(content, "functionDeclarations"):
                function = camel(declaration, "a function declaration")
                schema = function.get("parametersJsonSchema") or _plain_schema(function.get("parameters"))
                yield Tool(need_str(function.get("name"), "a function's name"), function.get("description"), schema)


def _plain_schema(schema: Any) -> Any:
    """Convert an OpenAPI schema with upper-case types, as Gemini uses it, to JSON Schema."""
    if isinstance(schema, dict):
        return {
            key: value.lower() if key == "type" and isinstance(value, str) else _plain_schema(value)
            for key, value in schema.items()
        }
    return [_plain_schema(item) for item in schema] if isinstance(schema, list) else schema


def render_tools(tools: Iterable[Tool]) -> list[dict[str, Any]]:
    declarations: list[dict[str, Any]] = []
    rendered: list[dict[str, Any]] = []
    for tool in tools:
        if tool.kind == "hosted" and tool.raw is not None:
            rendered.append(dict(tool.raw))
        else:
            body = {"name": tool.name, "description": tool.description, "parametersJsonSchema": tool.schema}
            declarations.append(compact(body))
    return [*([{"functionDeclarations": declarations}] if declarations else []), *rendered]


def parse_choice(raw: Any) -> ToolChoice | None:
    if not isinstance(raw, dict):
        return None
    config = camel(camel(raw, "toolConfig").get("functionCallingConfig") or {}, "functionCallingConfig")
    names = config.get("allowedFunctionNames") or []
    match str(config.get("mode") or "").upper():
        case "ANY":
            return ToolChoice("tool", names[0]) if len(names) == 1 else ToolChoice("any")
        case "NONE":
            return ToolChoice("none")
        case "AUTO" | "VALIDATED":
            return ToolChoice("auto")
        case _:
            return None


def render_choice(choice: ToolChoice | None) -> dict[str, Any] | None:
    if choice is None:
        return None
    if choice.mode == "tool":
        return {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": [choice.name]}}
    return {"functionCallingConfig": {"mode": choice.mode.upper()}}


def parse_system(raw: Any) -> tuple[str, ...]:
    if raw is None:
        return ()
    if isinstance(raw, str):
        return (raw,)
    parts = need_dict(raw, "systemInstruction").get("parts") or []
    listed = [parts] if isinstance(parts, dict) else parts
    if not all(isinstance(part, dict) for part in listed):
        raise BadRequest("systemInstruction's parts must be objects")
    return tuple(part["text"] for part in listed if part.get("text"))


def render_usage(usage: Usage) -> dict[str, Any] | None:
    if usage.total_tokens is None:
        return None
    spoken = None if usage.output_tokens is None else max(usage.output_tokens - (usage.reasoning_tokens or 0), 0)
    return compact(
        {
            "promptTokenCount": usage.input_tokens,
            "candidatesTokenCount": spoken,
            "thoughtsTokenCount": usage.reasoning_tokens,
            "cachedContentTokenCount": usage.cached_tokens,
            "totalTokenCount": usage.total_tokens,
        }
    )


class GeminiParser(EventParser):
    """Chunks to deltas, from events or one JSON array. The end is deferred to the close, since usage may follow it."""

    def __init__(self, dialect: Dialect) -> None:
        super().__init__(dialect)
        self._array: bytearray | None = None
        """The answer so far if it is a JSON array, which is read at the close."""
        self._sniffed = False
        self._finish: str | None = None
        self._blocked = False
        self._usage: dict[str, Any] = {}

    def feed(self, data: bytes) -> list[Delta]:
        if not self._sniffed and data.strip():
            self._sniffed = True
            if data.lstrip().startswith(b"["):
                self._array = bytearray()
        if self._array is None:
            return super().feed(data)
        self._array += data
        return []

    def close(self) -> list[Delta]:
        items = _array_items(bytes(self._array or b""))
        deltas = [delta for item in items if not self._failed for delta in self._decode(None, item)]
        return deltas + super().close()

    def on_event(self, event: str | None, data: Mapping[str, Any]) -> Iterator[Delta]:
        if data.get("error"):
            yield stream_error(data)
            return
        yield from self._begin(data.get("responseId"), data.get("modelVersion"))
        self._usage.update(data.get("usageMetadata") or {})
        candidates = data.get("candidates") or []
        candidate = candidates[0] if candidates else {}
        for raw in (candidate.get("content") or {}).get("parts") or ():
            yield from self._on_part(camel(raw, "a part"))
        blocked = (data.get("promptFeedback") or {}).get("blockReason")
        self._blocked |= bool(blocked)
        if finish := candidate.get("finishReason") or blocked:
            self._finish = finish
            self.done = True

    def on_close(self) -> Iterator[Delta]:
        yield from self._end_part()
        if self._finish is not None:
            native, self._finish = self._finish, None
            stop = "refusal" if self._blocked else read_stop(native, self._has_calls)
            yield TurnEnd(stop, self.dialect.read_usage(self._usage), native)

    def _on_part(self, raw: Mapping[str, Any]) -> Iterator[Delta]:
        if raw.get("text") == "" and raw.get("thought") and not raw.get("thoughtSignature"):
            return
        for part in read_part(raw):
            # the signature of a thought follows it in a part without text
            if isinstance(part, Text | Reasoning) and (part.text or (self._is_open(part) and part != Text(""))):
                signature = part.signature if isinstance(part, Reasoning) else None
                blank = Text("") if isinstance(part, Text) else Reasoning("", origin="gemini")
                yield from self._add(blank, part.text, signature)
                if signature:
                    yield from self._end_part()
            else:
                yield from self._whole(part)


def _array_items(raw: bytes) -> Iterator[str]:
    """The texts of the objects in a JSON array, whose end may be missing."""
    text = raw.decode(errors="replace")
    end = 0
    while (start := text.find("{", end)) >= 0:
        try:
            _, end = _decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            return
        yield text[start:end]


class GeminiRenderer(EventRenderer):
    def __init__(self, dialect: Dialect, request: Request, *, sse_form: bool) -> None:
        super().__init__(dialect, request)
        self.content_type = self.content_type if sse_form else "application/json"
        self._sse = sse_form
        self._first = True
        self._id = fresh_id("")

    def keep_alive(self) -> bytes:
        # Google's clients decode every line that is not blank, including comments
        return b"\n"

    def error(self, status: int, message: str, kind: ErrorKind) -> bytes:
        return self._frame(self.dialect.error_body(status, message, kind)) + self._tail()

    def _begin(self, start: TurnStart) -> bytes:
        self._id = start.id or self._id
        return b""

    def _start(self, part: Part) -> bytes:
        match part:
            case Text(text=text) | Refusal(text=text) | Reasoning(text=text) | ToolCall(arguments=text):
                return self._more(text)
            case _:
                return b""

    def _grow(self, text: str) -> bytes:
        if isinstance(self._part, ToolCall):
            return b""  # a call is sent in one piece
        return self._chunk([{"text": text, **({"thought": True} if isinstance(self._part, Reasoning) else {})}])

    def _end_part(self) -> bytes:
        match self._part:
            case ToolCall() as call:
                whole_call = replace(call, arguments="".join(self._text), signature=self._signature)
                return self._chunk([render_part(whole_call) or {}])
            case Reasoning(origin="gemini") if self._signature:
                shown = {"thought": True} if self._text else {}
                return self._chunk([{"text": "", **shown, "thoughtSignature": self._signature}])
            case Text() | Refusal() | Reasoning() | None:
                return b""
            case part:
                rendered = render_part(part, answer=True)
                return self._chunk([rendered]) if rendered else b""

    def _end(self, end: TurnEnd) -> bytes:
        # clients expect a part in the last chunk too
        return self._chunk([{"text": ""}], end.stop, end.usage) + self._tail()

    def _chunk(self, parts: list[dict[str, Any]], stop: StopReason | None = None, usage: Usage | None = None) -> bytes:
        return self._frame(_answer(self._request, self._id, parts, stop, usage))

    def _frame(self, body: dict[str, Any]) -> bytes:
        if self._sse:
            return sse(body)
        lead, self._first = (b"[" if self._first else b",\n"), False
        return lead + dump(body)

    def _tail(self) -> bytes:
        return b"" if self._sse else b"]"


def _answer(
    request: Request, id_: str, parts: list[dict[str, Any]], stop: StopReason | None, usage: Usage | None
) -> dict[str, Any]:
    finish = _FINISHES.get(stop, "STOP") if stop else None
    candidate = compact({"content": {"role": "model", "parts": parts}, "finishReason": finish, "index": 0})
    counts = render_usage(usage) if usage else None
    return compact(
        {"candidates": [candidate], "usageMetadata": counts, "modelVersion": request.model, "responseId": id_}
    )


class Gemini(Dialect):
    name = "gemini"
    parser = GeminiParser
    routes = (("GET", "/v1(?:beta|alpha)/models", "models"), ("GET", "/v1(?:beta|alpha)/models/(.+)", "model"))
    likely_headers = ("x-goog-api-key", "x-goog-api-client")
    likely_path = re.compile("/v1beta")
    key_header = "x-goog-api-key"
    client_headers = "x-goog-api-client x-gemini-*"
    ends_at_close = True
    usage_field = "usageMetadata"
    answer_field = "candidates"
    content_fields = ("candidates", "promptFeedback")
    sampling_names = _SAMPLING
    unknown_sampling = ("effort",)
    system_anywhere = False
    parallel_tools = False
    state_fields = ("cachedContent", "cached_content")
    count_fields = ("candidateCount", "candidate_count")
    local_fields = """
        model contents systemInstruction system_instruction tools toolConfig tool_config generationConfig
        generation_config safetySettings safety_settings labels serviceTier service_tier generateContentRequest
    """
    file_places = ("contents", "systemInstruction", "system_instruction")

    def match(self, method: str, path: str, query: Mapping[str, str]) -> Route | None:
        place, _, verb = path.rpartition(":")
        model = place.rpartition("/models/")[2] if "/models/" in place else ""
        if method == "POST" and model and verb in _METHODS:
            if verb == "countTokens":
                return Route(self.name, "count_tokens", model=model)
            stream = verb == "streamGenerateContent"
            return Route(self.name, "generate", model, stream, sse=query.get("alt") == "sse")
        return super().match(method, path, query)

    def check_recordable(self, body: Mapping[str, Any]) -> None:
        configs = [body.get(name) for name in ("generationConfig", "generation_config")]
        for fields in (body, *(config for config in configs if isinstance(config, Mapping))):
            super().check_recordable(fields)

    def with_sampling(self, body: Mapping[str, Any], sampling: Sampling) -> dict[str, Any]:
        place = "generation_config" if "generation_config" in body else "generationConfig"
        config = camel(body.get(place) or {}, place)
        return {**body, place: super().with_sampling(config, sampling)}

    def _parse_request(self, body: Mapping[str, Any], route: Route | None) -> Request:
        fields = camel(dict(body), "the body")
        if isinstance(fields.get("generateContentRequest"), dict):
            fields = camel(fields["generateContentRequest"], "generateContentRequest")
            self.check_recordable(fields)
        config = camel(fields.get("generationConfig") or {}, "generationConfig")
        model = (route.model if route else None) or fields.get("model")
        thinking = camel(config.get("thinkingConfig") or {}, "thinkingConfig")
        level, budget = thinking.get("thinkingLevel"), thinking.get("thinkingBudget")
        effort = level.lower() if isinstance(level, str) else None
        schema = config.get("responseJsonSchema") or config.get("responseSchema")
        rest = without(config, *_CONFIG)
        if more := without(thinking, "thinkingBudget", "thinkingLevel"):
            rest["thinkingConfig"] = more
        return Request(
            model=need_str(model, "model").removeprefix("models/"),
            messages=tuple(Contents().parse(fields.get("contents") or [])),
            system=parse_system(fields.get("systemInstruction")),
            tools=tuple(parse_tools(fields.get("tools"))),
            tool_choice=parse_choice(fields.get("toolConfig")),
            sampling=self.read_sampling(config, effort=effort, thinking_budget=budget),
            response_format=ResponseFormat(schema) if config.get("responseMimeType") == "application/json" else None,
            stream=bool(route and route.stream),
            dialect=self.name,
            extra={**without(fields, *_FIELDS), **({"generationConfig": rest} if rest else {})},
        )

    def _render_request(self, request: Request) -> dict[str, Any]:
        extra = dict(request.extra) if request.dialect == self.name else {}
        system = [{"text": text} for text in request.system if text]
        body = {
            "contents": join_results(_contents(request.messages), "parts"),
            "systemInstruction": {"parts": system} if system else None,
            "tools": render_tools(request.tools) or None,
            "toolConfig": render_choice(request.tool_choice),
            "generationConfig": self._render_config(request, extra.pop("generationConfig", {})) or None,
        }
        return {**extra, **compact(body)}

    def _render_config(self, request: Request, extra: Mapping[str, Any]) -> dict[str, Any]:
        sampling, format_ = request.sampling, request.response_format
        thinking = {
            **extra.get("thinkingConfig", {}),
            "thinkingBudget": sampling.thinking_budget,
            "thinkingLevel": sampling.effort.upper() if sampling.effort else None,
        }
        config = {
            **self.write_sampling(sampling),
            "thinkingConfig": compact(thinking) or None,
            "responseMimeType": "application/json" if format_ else None,
            "responseJsonSchema": format_.schema if format_ else None,
        }
        return {**without(extra, "thinkingConfig"), **compact(config)}

    def generate_path(self, model: str, stream: bool) -> str:
        verb = "streamGenerateContent?alt=sse" if stream else "generateContent"
        return f"/v1beta/models/{quote(model, safe='')}:{verb}"

    def count_path(self, model: str) -> str:
        return f"/v1beta/models/{quote(model, safe='')}:countTokens"

    def _parse_response(self, body: Mapping[str, Any]) -> Turn:
        candidates = body.get("candidates") or []
        blocked = (body.get("promptFeedback") or {}).get("blockReason")
        if not candidates and not blocked:
            raise BadResponse(f"the provider's answer has no candidates: {error_text(dict(body))[:200]}")
        candidate = candidates[0] if candidates else {}
        native = candidate.get("finishReason") or blocked
        raw = [camel(part, "a part") for part in (candidate.get("content") or {}).get("parts") or ()]
        parts = tuple(part for item in raw for part in read_part(item))
        stop = "refusal" if blocked else read_stop(native, any(isinstance(part, ToolCall) for part in parts))
        usage = self.read_usage(body.get("usageMetadata"))
        return Turn(parts, stop, usage, body.get("responseId"), body.get("modelVersion"), native)

    def render_response(self, turn: Turn, request: Request) -> dict[str, Any]:
        parts = [part for item in turn.parts if (part := render_part(item, answer=True))]
        return _answer(request, turn.id or fresh_id(""), parts or [{"text": ""}], turn.stop, turn.usage)

    def stream_renderer(self, request: Request, route: Route | None = None) -> GeminiRenderer:
        return GeminiRenderer(self, request, sse_form=route is None or route.sse)

    def error_body(self, status: int, message: str, kind: ErrorKind) -> dict[str, Any]:
        return {"error": {"code": status, "message": message, "status": _STATUSES[kind]}}

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

    def read_usage(self, raw: Any) -> Usage:
        """Add thoughts to the output and tool prompts to the input, from which Gemini counts them separately."""
        if not isinstance(raw, dict):
            return Usage()
        prompt, tools = as_count(raw.get("promptTokenCount")), as_count(raw.get("toolUsePromptTokenCount"))
        candidates, thoughts = as_count(raw.get("candidatesTokenCount")), as_count(raw.get("thoughtsTokenCount"))
        input_ = None if prompt is None else prompt + (tools or 0)
        output = None if candidates is None and thoughts is None else (candidates or 0) + (thoughts or 0)
        return Usage(input_, output, as_count(raw.get("cachedContentTokenCount")), reasoning_tokens=thoughts)

    def progress_of(self, event: Mapping[str, Any]) -> AnswerProgress | None:
        blocked = (event.get("promptFeedback") or {}).get("blockReason")
        ended = any(isinstance(each, dict) and each.get("finishReason") for each in event.get("candidates") or ())
        error = event if "error" in event else None
        return AnswerProgress(usage=event.get("usageMetadata"), finished=bool(blocked or ended), error=error)

    def adapt(self, request: Request, *, foreign: bool, edits: list[Edit]) -> Request:
        if _WANTS_SIGNATURES.search(request.model):
            request = replace(request, messages=tuple(_signed(message) for message in request.messages))
        if foreign and not _THINKS.search(request.model):
            return replace(request, sampling=replace(request.sampling, thinking_budget=None))
        if not foreign or not request.sampling.thinking_budget:
            return request
        return replace(request, extra={"generationConfig": {"thinkingConfig": {"includeThoughts": True}}})

    def close_tool(self, tool: dict[str, Any], removed: list[str]) -> dict[str, Any] | None:
        for key in ("functionDeclarations", "function_declarations"):
            declared = tool.get(key) or []
            if not isinstance(declared, list) or not all(isinstance(each, dict) for each in declared):
                raise BadRequest(f"invalid value for tools: expected a list of objects as {key}")
        removed.extend(key for key in tool if key not in _KEPT_TOOLS)
        return {key: value for key, value in tool.items() if key in _KEPT_TOOLS} or None

    def without_remote(self, part: Mapping[str, Any]) -> dict[str, Any] | None:
        return {"text": REMOVED} if part.get("filedata") or part.get("file_data") else None


def read_part(part: Mapping[str, Any]) -> list[Any]:
    if isinstance(part.get("functionCall"), dict):
        return [parse_call(part["functionCall"], part.get("thoughtSignature"))]
    return list(parse_part(part))


def read_stop(native: Any, has_calls: bool) -> StopReason:
    """The canonical stop; Gemini reports STOP for calls too."""
    stop = STOPS.get(native or "STOP", "other")
    return "tool_use" if stop == "end" and has_calls else stop


def _signed(message: Message) -> Message:
    """Sign the first call of a step, as Gemini requires."""
    for index, part in enumerate(message.parts):
        if isinstance(part, ToolCall):
            if part.signature:
                return message
            signed = replace(part, signature=_FILLER)
            return Message(message.role, (*message.parts[:index], signed, *message.parts[index + 1 :]))
    return message
