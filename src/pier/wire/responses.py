"""OpenAI Responses, stateless: every call contains its whole history, as with Codex.

A call that refers to state at the provider (`previous_response_id`, `conversation`) is refused, since its prompt can
be neither recorded nor translated. A stream consists of typed, numbered events about output items.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from pier.wire.chat import (
    LOCAL_FIELDS,
    OpenAI,
    has_link,
    has_web_url,
    parse_choice,
    parse_format,
    parse_tool,
    render_choice,
    render_format,
    render_tool,
    render_usage,
)
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
    StopReason,
    StreamError,
    Text,
    Tool,
    ToolCall,
    ToolResult,
    Turn,
    TurnEnd,
    TurnStart,
    Usage,
)
from pier.wire.values import (
    BadRequest,
    BadResponse,
    ParsedMessage,
    compact,
    data_url,
    error_text,
    fresh_id,
    gather_messages,
    media_at,
    need_dict,
    need_str,
    parse_data_url,
    parse_parts,
    result_parts,
    sign,
    unsign,
    without,
)

_SAMPLING = {"max_tokens": "max_output_tokens", **{name: name for name in ("temperature", "top_p", "top_logprobs")}}
_FIELDS = (
    *("model", "input", "instructions", "tools", "tool_choice", "parallel_tool_calls", "reasoning", "text"),
    *("stream", "previous_response_id", "conversation", *_SAMPLING.values()),
)
_CODES: dict[ErrorKind, str] = {
    "context_length": "context_length_exceeded",
    "budget": "insufficient_quota",
    "rate_limit": "rate_limit_exceeded",
    "invalid_request": "invalid_prompt",
}
_FAILURES: dict[Any, tuple[ErrorKind, int]] = {
    "context_length_exceeded": ("context_length", 400),
    "rate_limit_exceeded": ("rate_limit", 429),
    "insufficient_quota": ("permission", 403),
}
_REASONS: dict[StopReason, str] = {
    "length": "max_output_tokens",
    "context": "max_output_tokens",
    "refusal": "content_filter",
}
_CUSTOM_CALL = ("custom_tool_call", "input", "ctc_")
_FUNCTION_CALL = ("function_call", "arguments", "fc_")
_SUMMARY: dict[str, Any] = {"summary_index": 0}
_REASONING_MODEL = re.compile(r"(^|/)(o\d|codex|gpt-([5-9]|\d\d)(?!.*chat))")
"""OpenAI's models that reason by default. Others refuse requests for encrypted reasoning."""


def _parse_input_item(item: Mapping[str, Any]) -> ParsedMessage:
    """Parse an item; consecutive items of the model become one message."""
    kind = item.get("type") or "message"
    if kind == "message":
        parts = parse_parts(item.get("content"), _parse_piece)
        match item.get("role"):
            case "system" | "developer":
                return "system", parts, None
            case "user":
                return "user", parts, None
            case "assistant":
                return "assistant", parts, "assistant"
            case role:
                raise BadRequest(f"unknown role {role!r}")
    if kind in ("function_call_output", "custom_tool_call_output"):
        parts = result_parts(parse_parts(item.get("output"), _parse_piece))
        call_id = need_str(item.get("call_id"), f"a {kind}'s call_id")
        return "user", [ToolResult(call_id, parts, custom=kind.startswith("custom"))], "results"
    if kind.endswith("_output"):
        return "user", [Opaque("responses", item)], "results"
    return "assistant", [parse_output(item)], "assistant"


def parse_output(item: Mapping[str, Any]) -> Part:
    """Parse an item of the model other than a message."""
    match item.get("type"):
        case "function_call" | "custom_tool_call" as kind:
            custom, name = kind == "custom_tool_call", need_str(item.get("name"), f"a {kind}'s name")
            text, space = item.get("input" if custom else "arguments") or "", item.get("namespace")
            return ToolCall(item.get("call_id") or fresh_id("call_"), name, text, custom, None if custom else space)
        case "reasoning":
            signature, origin = unsign(item.get("encrypted_content"), "responses")
            text = "\n\n".join(piece.get("text") or "" for piece in item.get("summary") or ())
            text = text or "".join(piece.get("text") or "" for piece in item.get("content") or ())
            return Reasoning(text, signature, origin or "responses", id=item.get("id"))
        case _:
            return Opaque("responses", item)


def _parse_piece(piece: dict[str, Any]) -> Part:
    kind = piece.get("type")
    if kind in ("input_text", "output_text", "text"):
        return Text(piece.get("text") or "")
    if kind == "refusal":
        return Refusal(piece.get("refusal") or "")
    if kind == "input_image":
        if piece.get("file_id"):
            return Media(file_id=piece["file_id"])
        return media_at(piece.get("image_url") or "")
    if kind == "input_file" and isinstance(piece.get("file_data"), str):
        inline = parse_data_url(piece["file_data"]) or ("application/pdf", piece["file_data"])
        return Media(inline[0], inline[1], name=piece.get("filename"))
    return Opaque("responses", piece)


def render_input(request: Request) -> list[dict[str, Any]]:
    items = [_message("developer", [Text(text)]) for text in request.system[1:]]
    for message in request.messages:
        if message.role == "assistant":
            items.extend(render_output(message.parts, answer=False))
            continue
        rest: list[Part] = []
        for part in message.parts:
            if isinstance(part, ToolResult):
                items.append(_render_result(part))
            elif isinstance(part, Opaque) and str(part.value.get("type")).endswith("_output"):
                items.append(dict(part.value))
            else:
                rest.append(part)
        if rest or not message.parts:
            items.append(_message("developer" if message.role == "system" else message.role, rest))
    return items


def _message(role: str, parts: Iterable[Part]) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [piece for part in parts if (piece := _render_piece(part))]}


def _render_result(result: ToolResult) -> dict[str, Any]:
    kind = "custom_tool_call_output" if result.custom else "function_call_output"
    if all(isinstance(part, Text) for part in result.parts) and len(result.parts) <= 1:
        output: Any = "".join(part.text for part in result.parts if isinstance(part, Text))
    else:
        output = [piece for part in result.parts if (piece := _render_piece(part))]
    return {"type": kind, "call_id": result.call_id, "output": output}


def _render_piece(part: Part) -> dict[str, Any] | None:
    match part:
        case Text(text=text):
            return {"type": "input_text", "text": text}
        case Media(file_id=str(file_id)):
            return {"type": "input_image", "file_id": file_id}
        case Media(data=str(data)) if part.is_image:
            return {"type": "input_image", "image_url": data_url(part.media_type, data)}
        case Media(data=str(data)):
            name = part.name or "file"
            return {"type": "input_file", "filename": name, "file_data": data_url(part.media_type, data)}
        case Media(url=str(url)):
            return {"type": "input_image", "image_url": url}
        case Opaque(dialect="responses", value=value):
            return dict(value)
        case _:
            return None


def render_output(parts: Iterable[Part], *, answer: bool) -> Iterator[dict[str, Any]]:
    """Render the items of a model's answer; adjacent texts become one message. Only an `answer` has ids."""
    content: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, Text | Refusal):
            content.append(render_text(part))
            continue
        if content:
            yield message_item(content, answer=answer)
            content = []
        item = render_item(part, answer=answer)
        if item:
            yield item
    if content:
        yield message_item(content, answer=answer)


def render_text(part: Text | Refusal) -> dict[str, Any]:
    if isinstance(part, Refusal):
        return {"type": "refusal", "refusal": part.text}
    return {"type": "output_text", "text": part.text, "annotations": []}


def message_item(content: list[dict[str, Any]], *, answer: bool, id_: str | None = None) -> dict[str, Any]:
    item = {"type": "message", "role": "assistant", "content": content}
    return {"id": id_ or fresh_id("msg_"), "status": "completed", **item} if answer else item


def render_item(part: Part, *, answer: bool, id_: str | None = None) -> dict[str, Any] | None:
    """Render an item other than a message. A history holds only reasoning of this dialect's models."""
    match part:
        case ToolCall(custom=custom):
            kind, field, prefix = _CUSTOM_CALL if custom else _FUNCTION_CALL
            body = {"type": kind, "call_id": part.id, "name": part.name, field: part.arguments}
            if part.namespace and not custom:
                body["namespace"] = part.namespace
            return {"id": id_ or fresh_id(prefix), "status": "completed", **body} if answer else body
        case Reasoning():
            if not answer and part.origin != "responses":
                return None
            item: dict[str, Any] = {"type": "reasoning", "summary": [_summary(part.text)] if part.text else []}
            if answer or part.id:
                item["id"] = part.id or id_ or fresh_id("rs_")
            if signature := sign(part, "responses"):
                item["encrypted_content"] = signature
            return item
        case Opaque(dialect="responses", value=value):
            return dict(value)
        case _:
            return None


def parse_tools(raw: Any, namespace: str | None = None) -> Iterator[Tool]:
    for value in raw or ():
        if need_dict(value, "a tool").get("type") == "namespace":
            yield from parse_tools(value.get("tools"), need_str(value.get("name"), "the name of a namespace"))
        else:
            yield parse_tool(value, namespace, flat=True)


def render_tools(tools: Iterable[Tool]) -> list[dict[str, Any]]:
    rendered: list[dict[str, Any]] = []
    spaces: dict[str, list[dict[str, Any]]] = {}
    for tool in tools:
        if tool.namespace is None:
            rendered.append(render_tool(tool, flat=True))
            continue
        if tool.namespace not in spaces:
            spaces[tool.namespace] = []
            space = {"type": "namespace", "name": tool.namespace, "description": tool.namespace}
            rendered.append({**space, "tools": spaces[tool.namespace]})
        spaces[tool.namespace].append(render_tool(tool, flat=True))
    return rendered


def _usage(usage: Usage) -> dict[str, Any] | None:
    """Usage with all details, which clients of Responses expect."""
    known = replace(usage, cached_tokens=usage.cached_tokens or 0, reasoning_tokens=usage.reasoning_tokens or 0)
    return render_usage(known, "input", "output")


class ResponsesParser(EventParser):
    """Events to deltas. Items are read from their deltas, or from `output_item.done` if there were none."""

    def __init__(self, dialect: Dialect) -> None:
        super().__init__(dialect)
        self._text_key: tuple[Any, Any] | None = None
        self._grown = False
        self._texts = 0

    def on_event(self, event: str | None, data: Mapping[str, Any]) -> Iterator[Delta]:
        kind = str(data.get("type") or event)
        match kind:
            case "response.created" | "response.in_progress":
                response = data.get("response") or {}
                yield from self._begin(response.get("id"), response.get("model"))
            case "response.output_item.added":
                yield from self._added(data["item"])
            case "response.output_text.delta":
                yield from self._on_text(Text(""), data)
            case "response.refusal.delta":
                yield from self._on_text(Refusal(""), data)
            case "response.reasoning_summary_part.added":
                if self._grown and self._is_open(Reasoning("")):
                    yield from self._grow("\n\n")
            case (
                "response.function_call_arguments.delta"
                | "response.custom_tool_call_input.delta"
                | "response.reasoning_summary_text.delta"
                | "response.reasoning_text.delta"
            ):
                yield from self._grow(data.get("delta") or "")
            case "response.output_item.done":
                yield from self._item_done(data["item"])
            case "response.completed" | "response.incomplete":
                yield from self._end(data["response"])
            case "response.failed" | "error":
                yield _failure(data)

    def _added(self, item: Mapping[str, Any]) -> Iterator[Delta]:
        yield from self._end_part()
        self._texts = 0
        if item.get("type") == "reasoning":
            yield from self._start(Reasoning("", origin="responses", id=item.get("id")))
        elif item.get("type") in ("function_call", "custom_tool_call"):
            part = parse_output(item)
            if isinstance(part, ToolCall):
                yield from self._start(ToolCall(part.id, part.name, "", part.custom, part.namespace))

    def _on_text(self, part: Text | Refusal, data: Mapping[str, Any]) -> Iterator[Delta]:
        key = (data.get("output_index"), data.get("content_index"))
        if self._open is None or type(self._open[1]) is not type(part) or key != self._text_key:
            yield from self._end_part()
            yield from self._start(part)
            self._text_key = key
            self._texts += 1
        yield from self._grow(data.get("delta") or "")

    def _grow(self, text: str, signature: str | None = None) -> Iterator[Delta]:
        self._grown |= bool(text)
        yield from super()._grow(text, signature)

    def _start(self, part: Part) -> Iterator[Delta]:
        yield from super()._start(part)
        self._grown, self._text_key = False, None

    def _item_done(self, item: Mapping[str, Any]) -> Iterator[Delta]:
        if item.get("type") == "message":
            yield from self._end_part()
            for part in [] if self._texts else parse_parts(item.get("content"), _parse_piece):
                yield from self._whole(part)
            self._texts = 0
            return
        part = parse_output(item)
        if self._open is not None and isinstance(part, ToolCall | Reasoning):
            if not self._grown:
                yield from self._grow(part.arguments if isinstance(part, ToolCall) else part.text)
            yield from self._grow("", part.signature)
            yield from self._end_part()
        else:
            yield from self._whole(part)

    def _end(self, response: Mapping[str, Any]) -> Iterator[Delta]:
        yield from self._begin(response.get("id"), response.get("model"))
        yield from self._end_part()
        self.done = True
        stop, native = read_stop(response, self._has_calls)
        yield TurnEnd(stop, self.dialect.read_usage(response.get("usage")), native)


def _failure(data: Mapping[str, Any]) -> StreamError:
    response = data.get("response")
    error = response.get("error") if isinstance(response, Mapping) else data.get("error") or data
    code = error.get("code") if isinstance(error, Mapping) else None
    kind, status = _FAILURES.get(code, ("server", 502))
    return StreamError(error_text(dict(error) if isinstance(error, Mapping) else error), kind, status)


class ResponsesRenderer(EventRenderer):
    def __init__(self, dialect: Dialect, request: Request) -> None:
        super().__init__(dialect, request)
        self._id = fresh_id("resp_")
        self._begun = False
        self._number = 0
        self._output: list[dict[str, Any]] = []
        self._item_id = ""
        self._message: list[dict[str, Any]] | None = None
        self._message_id = ""

    def keep_alive(self) -> bytes:
        # Codex counts events, not bytes, so a comment would not keep the connection alive
        return self._progress() if self._begun else self._begin(TurnStart())

    def error(self, status: int, message: str, kind: ErrorKind) -> bytes:
        response = self._response(None, None)
        response.update(status="failed", error={"code": _CODES.get(kind, "server_error"), "message": message})
        return self._event("response.failed", response=response)

    def _begin(self, start: TurnStart) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        self._id = start.id or self._id
        return self._event("response.created", response=self._response(None, None)) + self._progress()

    def _progress(self) -> bytes:
        return self._event("response.in_progress", response=self._response(None, None))

    def _start(self, part: Part) -> bytes:
        if isinstance(part, Text | Refusal):
            return self._start_text(part)
        data = self._close_message()
        is_call = isinstance(part, ToolCall)
        self._item_id = fresh_id("rs_" if isinstance(part, Reasoning) else "ctc_" if is_call and part.custom else "fc_")
        item = render_item(part, answer=True, id_=self._item_id)
        if item is None:
            self._part = None
            return data
        self._item_id = item.get("id") or self._item_id
        if isinstance(part, ToolCall | Reasoning):
            item = without(item, "encrypted_content")
            blank = {"arguments": "", "input": "", "summary": [], "status": "in_progress"}
            item.update({key: value for key, value in blank.items() if key in item})
        data += self._event("response.output_item.added", output_index=len(self._output), item=item)
        if isinstance(part, Reasoning):
            data += self._on_item("response.reasoning_summary_part.added", part=_summary(""), **_SUMMARY)
            return data + self._more(part.text)
        return data + (self._more(part.arguments) if isinstance(part, ToolCall) else b"")

    def _start_text(self, part: Text | Refusal) -> bytes:
        data = b""
        if self._message is None:
            self._message, self._message_id = [], fresh_id("msg_")
            item = {**message_item([], answer=True, id_=self._message_id), "status": "in_progress"}
            data = self._event("response.output_item.added", output_index=len(self._output), item=item)
        self._item_id = self._message_id
        blank = render_text(Text("") if isinstance(part, Text) else Refusal(""))
        data += self._on_item("response.content_part.added", content_index=len(self._message), part=blank)
        return data + self._more(part.text)

    def _grow(self, text: str) -> bytes:
        match self._part:
            case Text():
                return self._on_text("response.output_text.delta", delta=text, logprobs=[])
            case Refusal():
                return self._on_text("response.refusal.delta", delta=text)
            case Reasoning():
                return self._on_item("response.reasoning_summary_text.delta", delta=text, **_SUMMARY)
            case part:
                custom = isinstance(part, ToolCall) and part.custom
                kind = "custom_tool_call_input" if custom else "function_call_arguments"
                return self._on_item(f"response.{kind}.delta", delta=text)

    def _end_part(self) -> bytes:
        part, text = self._part, "".join(self._text)
        match part:
            case None:
                return b""
            case Text():
                done = self._on_text("response.output_text.done", text=text, logprobs=[])
                return done + self._part_done(Text(text))
            case Refusal():
                return self._on_text("response.refusal.done", refusal=text) + self._part_done(Refusal(text))
            case Reasoning():
                whole: Part = Reasoning(text, self._signature, part.origin, part.redacted, part.id)
                data = self._on_item("response.reasoning_summary_text.done", text=text, **_SUMMARY)
                data += self._on_item("response.reasoning_summary_part.done", part=_summary(text), **_SUMMARY)
            case ToolCall(custom=custom):
                whole = ToolCall(part.id, part.name, text, custom, part.namespace)
                kind = "custom_tool_call_input" if custom else "function_call_arguments"
                field = {"input": text} if custom else {"arguments": text}
                data = self._on_item(f"response.{kind}.done", **field)
            case _:
                whole, data = part, b""
        return data + self._item_done(render_item(whole, answer=True, id_=self._item_id) or {})

    def _part_done(self, part: Text | Refusal) -> bytes:
        content = self._message if self._message is not None else []
        data = self._on_text("response.content_part.done", part=render_text(part))
        content.append(render_text(part))
        return data

    def _close_message(self) -> bytes:
        content, self._message = self._message, None
        return b"" if content is None else self._item_done(message_item(content, answer=True, id_=self._message_id))

    def _item_done(self, item: dict[str, Any]) -> bytes:
        data = self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        return data

    def _end(self, end: TurnEnd) -> bytes:
        data = self._close_message()
        response = self._response(end.stop, _usage(end.usage))
        return data + self._event(f"response.{response['status']}", response=response)

    def _response(self, stop: StopReason | None, usage: dict[str, Any] | None) -> dict[str, Any]:
        output = list(self._output) if stop else []
        return response_body(self._request, self._id, output, stop, usage)

    def _on_text(self, kind: str, **fields: Any) -> bytes:
        return self._on_item(kind, content_index=len(self._message or ()), **fields)

    def _on_item(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._item_id, output_index=len(self._output), **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return sse(data, kind)


def _summary(text: str) -> dict[str, Any]:
    return {"type": "summary_text", "text": text}


class Responses(OpenAI):
    name = "responses"
    parser, renderer = ResponsesParser, ResponsesRenderer
    path = "/v1/responses"
    client_headers = """
        openai-beta originator version session_id session-id conversation_id thread-id x-codex-* x-openai-*
        x-session-affinity x-parent-session-id x-initiator x-interaction-type
    """
    client_query = re.compile(r"api-version=[\w.-]{1,32}")
    counting_path = "/v1/responses/input_tokens"
    routes = (("POST", "(?:/v1)?/responses", "generate"), ("POST", "(?:/v1)?/responses/input_tokens", "count_tokens"))
    likely_path = re.compile(".*/responses$")
    keep_alive = b'event: keepalive\ndata: {"type":"keepalive","sequence_number":0}\n\n'
    answer_field = "output"
    preludes = ("response.created", "response.queued", "response.in_progress", "keepalive")
    sampling_names = _SAMPLING
    unknown_sampling = ("top_k", "thinking_budget", "stop", "seed", "presence_penalty", "frequency_penalty", "logprobs")
    custom_tools = True
    state_fields = ("previous_response_id", "conversation", "prompt", "background")
    local_fields = f"""{LOCAL_FIELDS}
        model input instructions tools tool_choice parallel_tool_calls max_output_tokens max_tool_calls reasoning text
        stream stream_options store include metadata client_metadata service_tier truncation user safety_identifier
        prompt_cache_key prompt_cache_retention context_management
    """
    file_places = ("input", "instructions")
    untyped_tool = "parameters"
    tool_fields = "type name description parameters strict format defer_loading allowed_callers cache_control"
    typed_fields = "environment execution display_width display_height"
    local_tools = re.compile(r"function|custom|local_shell|apply_patch|tool_search|namespace|computer\w*")

    def _parse_request(self, body: Mapping[str, Any], route: Route | None) -> Request:
        instructions, raw = body.get("instructions"), body.get("input") or []
        raw = [{"role": "user", "content": raw}] if isinstance(raw, str) else raw
        system, messages = gather_messages(raw, "input", _parse_input_item)
        reasoning, text = body.get("reasoning") or {}, body.get("text") or {}
        more = {"reasoning": without(reasoning, "effort"), "text": without(text, "format")}
        return Request(
            model=need_str(body.get("model"), "model"),
            messages=messages,
            system=(*((instructions,) if instructions else ()), *system),
            tools=tuple(parse_tools(body.get("tools"))),
            tool_choice=parse_choice(body.get("tool_choice")),
            parallel_tools=body.get("parallel_tool_calls"),
            sampling=self.read_sampling(body, effort=reasoning.get("effort")),
            response_format=parse_format(text.get("format")),
            stream=bool(body.get("stream")),
            dialect=self.name,
            extra={**without(body, *_FIELDS), **{key: value for key, value in more.items() if value}},
        )

    def _render_request(self, request: Request) -> dict[str, Any]:
        extra = dict(request.extra) if request.dialect == self.name else {}
        reasoning = compact({**extra.pop("reasoning", {}), "effort": request.sampling.effort})
        text = compact({**extra.pop("text", {}), "format": render_format(request.response_format, flat=True)})
        body = {
            "model": request.model,
            "instructions": request.system[0] if request.system else None,
            "input": render_input(request),
            "tools": render_tools(request.tools) or None,
            "tool_choice": render_choice(request.tool_choice, flat=True),
            "parallel_tool_calls": request.parallel_tools,
            **self.write_sampling(request.sampling),
            "reasoning": reasoning or None,
            "text": text or None,
            "stream": request.stream or None,
        }
        return {**extra, **compact(body)}

    def _parse_response(self, body: Mapping[str, Any]) -> Turn:
        if body.get("status") == "failed":
            raise BadResponse(f"the provider's answer failed: {error_text(dict(body))[:200]}")
        parts = tuple(part for item in body["output"] for part in _parse_item(need_dict(item, "an output item")))
        stop, native = read_stop(body, any(isinstance(part, ToolCall) for part in parts))
        return Turn(parts, stop, self.read_usage(body.get("usage")), body.get("id"), body.get("model"), native)

    def render_response(self, turn: Turn, request: Request) -> dict[str, Any]:
        output = list(render_output(turn.parts, answer=True))
        return response_body(request, turn.id or fresh_id("resp_"), output, turn.stop, _usage(turn.usage))

    def count_tokens_body(self, tokens: int) -> dict[str, Any]:
        return {"object": "response.input_tokens", "input_tokens": tokens}

    def progress_of(self, event: Mapping[str, Any]) -> AnswerProgress | None:
        kind = event.get("type")
        if kind in ("response.completed", "response.incomplete", "response.failed"):
            response = event.get("response") or {}
            error = response if kind == "response.failed" else None
            return AnswerProgress(usage=response.get("usage"), finished=True, done=True, error=error)
        return AnswerProgress(error=event) if kind == "error" else None

    def adapt(self, request: Request, *, foreign: bool, edits: list[Edit]) -> Request:
        if not foreign:
            return request
        # tools are strict by default, and most schemas are invalid in strict mode
        loose = [tool.kind == "function" and tool.strict is None for tool in request.tools]
        tools = [replace(tool, strict=False) if free else tool for tool, free in zip(request.tools, loose, strict=True)]
        messages = tuple(_sealed(message) for message in request.messages)
        return replace(request, tools=tuple(tools), messages=messages, extra=_stateless(request))

    def close_tool(self, tool: dict[str, Any], removed: list[str]) -> dict[str, Any] | None:
        if tool.get("type") != "namespace":
            return super().close_tool(tool, removed)
        if not isinstance(tool.get("tools"), list):
            raise BadRequest("invalid value for tools of a namespace: expected a list")
        found = [self.close_tool(need_dict(inner, "a tool"), removed) for inner in tool["tools"]]
        inner = [each for each in found if each is not None]
        closed = super().close_tool(without(tool, "tools"), removed)
        return {**closed, "tools": inner} if closed and inner else None

    def without_remote(self, part: Mapping[str, Any]) -> dict[str, Any] | None:
        kind = part.get("type")
        by_id = kind == "item_reference" or (kind is None and "role" not in part and "content" not in part)
        if (by_id and "id" in part) or (kind == "image_generation_call" and not part.get("result")):
            return {"type": "message", "role": "user", "content": REMOVED}
        linked = has_link(part if str(kind).startswith("input_") else part.get("file_data"))
        away = part.get("file_id") or linked or has_web_url(part)
        return {"type": "input_text", "text": REMOVED} if away else None


def _stateless(request: Request) -> dict[str, Any]:
    """Fields that disable storage at the provider, and request encrypted reasoning of models that reason."""
    asks = request.sampling.effort not in (None, "none") or (request.sampling.thinking_budget or 0) > 0
    if not asks and not _REASONING_MODEL.search(request.model):
        return {"store": False}
    return {"store": False, "include": ["reasoning.encrypted_content"]}


def _sealed(message: Message) -> Message:
    """The message without reasoning that consists only of an id, since nothing is stored at the provider."""
    parts = (part for part in message.parts if not isinstance(part, Reasoning) or part.signature)
    return Message(message.role, tuple(parts))


def _parse_item(item: Mapping[str, Any]) -> list[Part]:
    return parse_parts(item.get("content"), _parse_piece) if item.get("type") == "message" else [parse_output(item)]


def read_stop(body: Mapping[str, Any], has_calls: bool) -> tuple[StopReason, str | None]:
    """The canonical stop and the native one; Responses has no status for calls."""
    status = body.get("status")
    reason = (body.get("incomplete_details") or {}).get("reason")
    if status == "incomplete":
        known: dict[str, StopReason] = {"max_output_tokens": "length", "content_filter": "refusal"}
        return known.get(reason or "", "other"), reason
    return "tool_use" if has_calls else "end", status


def response_body(
    request: Request, id_: str, output: list[dict[str, Any]], stop: StopReason | None, usage: dict[str, Any] | None
) -> dict[str, Any]:
    """A response object; without `stop` it is in progress."""
    reason = _REASONS.get(stop) if stop else None
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
        "tool_choice": render_choice(request.tool_choice, flat=True) or "auto",
        "tools": render_tools(request.tools) if request.dialect == "responses" else [],
        "top_p": request.sampling.top_p,
        "truncation": "disabled",
        "usage": usage,
        "metadata": {},
    }
