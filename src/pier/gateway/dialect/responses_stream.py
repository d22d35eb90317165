"""OpenAI Responses as a stream of typed, numbered events around output items."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pier.gateway.canonical import (
    Delta,
    ErrorKind,
    Part,
    PartDelta,
    PartEnd,
    PartStart,
    Ping,
    Reasoning,
    Refusal,
    Request,
    StopReason,
    StreamError,
    Text,
    ToolCall,
    TurnEnd,
    TurnStart,
)
from pier.gateway.dialect.openai import read_usage
from pier.gateway.dialect.responses_body import (
    message_item,
    parse_content,
    parse_output,
    render_item,
    render_text,
    render_usage,
)
from pier.gateway.dialect.shared import SSE, EventParser, error_text, fresh_id, sse

_CODES: dict[ErrorKind, str] = {
    "context_length": "context_length_exceeded",
    "budget": "insufficient_quota",
    "rate_limit": "rate_limit_exceeded",
    "invalid_request": "invalid_prompt",
}


class ResponsesParser(EventParser):
    """Events to deltas. Items come from their deltas, or whole from `output_item.done` where a server sent none."""

    def __init__(self, read_stop: Callable[[Mapping[str, Any], bool], tuple[StopReason, str | None]]) -> None:
        super().__init__()
        self._read_stop = read_stop
        self._started = False
        self._count = 0
        self._open: tuple[int, Part] | None = None
        self._text_key: tuple[Any, Any] | None = None
        self._grown = False
        self._texts = 0
        self._has_calls = False

    def on_event(self, event: str | None, data: Mapping[str, Any]) -> Iterator[Delta]:
        kind = str(data.get("type") or event)
        match kind:
            case "response.created" | "response.in_progress":
                yield from self._begin(data.get("response") or {})
            case "response.output_item.added":
                yield from self._added(data["item"])
            case "response.output_text.delta":
                yield from self._on_text(Text(""), data)
            case "response.refusal.delta":
                yield from self._on_text(Refusal(""), data)
            case "response.reasoning_summary_part.added":
                if self._grown and self._open and isinstance(self._open[1], Reasoning):
                    yield PartDelta(self._open[0], "\n\n")
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

    def _begin(self, response: Mapping[str, Any]) -> Iterator[Delta]:
        if not self._started:
            self._started = True
            yield TurnStart(response.get("id"), response.get("model"))

    def _added(self, item: Mapping[str, Any]) -> Iterator[Delta]:
        yield from self._shut()
        self._texts = 0
        if item.get("type") == "reasoning":
            yield from self._start(Reasoning("", origin="responses", id=item.get("id")))
        elif item.get("type") in ("function_call", "custom_tool_call"):
            part = parse_output(item)
            if isinstance(part, ToolCall):
                blank = ToolCall(part.id, part.name, "", part.custom, part.namespace)
                self._has_calls = True
                yield from self._start(blank)

    def _on_text(self, part: Text | Refusal, data: Mapping[str, Any]) -> Iterator[Delta]:
        key = (data.get("output_index"), data.get("content_index"))
        if self._open is None or type(self._open[1]) is not type(part) or key != self._text_key:
            yield from self._shut()
            yield from self._start(part)
            self._text_key = key
            self._texts += 1
        yield from self._grow(data.get("delta") or "")

    def _grow(self, text: str) -> Iterator[Delta]:
        if self._open is None:
            raise ValueError("a delta outside of any item")
        if text:
            self._grown = True
            yield PartDelta(self._open[0], text)

    def _item_done(self, item: Mapping[str, Any]) -> Iterator[Delta]:
        if item.get("type") == "message":
            yield from self._shut()
            for part in [] if self._texts else parse_content(item.get("content")):
                yield from self._whole(part)
            self._texts = 0
            return
        part = parse_output(item)
        if self._open is not None and isinstance(part, ToolCall | Reasoning):
            if not self._grown:
                yield from self._grow(part.arguments if isinstance(part, ToolCall) else part.text)
            if part.signature:
                yield PartDelta(self._open[0], signature=part.signature)
            yield from self._shut()
        else:
            self._has_calls |= isinstance(part, ToolCall)
            yield from self._whole(part)

    def _whole(self, part: Part) -> Iterator[Delta]:
        yield from self._start(part)
        yield from self._shut()

    def _start(self, part: Part) -> Iterator[Delta]:
        self._open, self._grown, self._text_key = (self._count, part), False, None
        self._count += 1
        yield PartStart(self._open[0], part)

    def _shut(self) -> Iterator[Delta]:
        if self._open is not None:
            yield PartEnd(self._open[0])
            self._open = None

    def _end(self, response: Mapping[str, Any]) -> Iterator[Delta]:
        yield from self._begin(response)
        yield from self._shut()
        self.done = True
        stop, native = self._read_stop(response, self._has_calls)
        yield TurnEnd(stop, read_usage(response.get("usage")), native)


def _failure(data: Mapping[str, Any]) -> StreamError:
    response = data.get("response")
    error = response.get("error") if isinstance(response, Mapping) else data.get("error") or data
    code = error.get("code") if isinstance(error, Mapping) else None
    kinds: dict[Any, tuple[ErrorKind, int]] = {
        "context_length_exceeded": ("context_length", 400),
        "rate_limit_exceeded": ("rate_limit", 429),
        "insufficient_quota": ("permission", 403),
    }
    kind, status = kinds.get(code, ("server", 502))
    return StreamError(error_text(dict(error) if isinstance(error, Mapping) else error), kind, status)


class ResponsesRenderer:
    content_type = SSE

    def __init__(self, request: Request, response_body: Callable[..., dict[str, Any]]) -> None:
        self._request = request
        self._response_body = response_body
        self._id = fresh_id("resp_")
        self._begun = False
        self._number = 0
        self._output: list[dict[str, Any]] = []
        self._part: Part | None = None
        self._item_id = ""
        self._text: list[str] = []
        self._signature: str | None = None
        self._message: list[dict[str, Any]] | None = None
        self._message_id = ""

    def render(self, delta: Delta) -> bytes:
        match delta:
            case TurnStart(id=id_):
                return b"" if self._begun else self._begin(id_)
            case PartStart(part=part):
                return self._start(part)
            case PartDelta(text=text, signature=signature):
                self._signature = signature or self._signature
                return self._grow(text)
            case PartEnd():
                return self._shut()
            case TurnEnd():
                return self._end(delta)
            case StreamError(message=message, kind=kind, status=status):
                return self.error(status, message, kind)
            case Ping():
                return self.keep_alive()
            case _:
                return b""

    def keep_alive(self) -> bytes:
        # Codex counts events, not bytes, so a comment would not keep it waiting.
        return self._progress() if self._begun else self._begin(None)

    def error(self, status: int, message: str, kind: ErrorKind) -> bytes:
        response = self._response(None, None)
        response.update(status="failed", error={"code": _CODES.get(kind, "server_error"), "message": message})
        return self._event("response.failed", response=response)

    def _begin(self, id_: str | None) -> bytes:
        self._begun = True
        self._id = id_ or self._id
        return self._event("response.created", response=self._response(None, None)) + self._progress()

    def _progress(self) -> bytes:
        return self._event("response.in_progress", response=self._response(None, None))

    def _start(self, part: Part) -> bytes:
        self._part, self._text, self._signature = part, [], None
        if isinstance(part, Text | Refusal):
            return self._start_text(part)
        data = self._close_message()
        prefix = (
            "rs_" if isinstance(part, Reasoning) else "ctc_" if isinstance(part, ToolCall) and part.custom else "fc_"
        )
        self._item_id = fresh_id(prefix)
        item = render_item(part, answer=True, id_=self._item_id)
        if item is None:
            self._part = None
            return data
        self._item_id = item.get("id") or self._item_id
        if isinstance(part, ToolCall | Reasoning):
            self._signature = part.signature
            item = {key: value for key, value in item.items() if key != "encrypted_content"}
            blank = {"arguments": "", "input": "", "summary": [], "status": "in_progress"}
            item.update({key: value for key, value in blank.items() if key in item})
        data += self._event("response.output_item.added", output_index=len(self._output), item=item)
        if isinstance(part, Reasoning):
            data += self._on_item("response.reasoning_summary_part.added", part=_summary(""), **_SUMMARY)
            return data + self._grow(part.text)
        return data + (self._grow(part.arguments) if isinstance(part, ToolCall) else b"")

    def _start_text(self, part: Text | Refusal) -> bytes:
        data = b""
        if self._message is None:
            self._message, self._message_id = [], fresh_id("msg_")
            item = {**message_item([], answer=True, id_=self._message_id), "status": "in_progress"}
            data = self._event("response.output_item.added", output_index=len(self._output), item=item)
        self._item_id = self._message_id
        blank = render_text(Text("") if isinstance(part, Text) else Refusal(""))
        data += self._on_item("response.content_part.added", content_index=len(self._message), part=blank)
        return data + self._grow(part.text)

    def _grow(self, text: str) -> bytes:
        if not text or self._part is None:
            return b""
        self._text.append(text)
        match self._part:
            case Text():
                return self._on_text("response.output_text.delta", delta=text, logprobs=[])
            case Refusal():
                return self._on_text("response.refusal.delta", delta=text)
            case Reasoning():
                return self._on_item("response.reasoning_summary_text.delta", delta=text, **_SUMMARY)
            case ToolCall(custom=True):
                return self._on_item("response.custom_tool_call_input.delta", delta=text)
            case ToolCall():
                return self._on_item("response.function_call_arguments.delta", delta=text)
            case _:
                return b""

    def _shut(self) -> bytes:
        part, self._part = self._part, None
        text = "".join(self._text)
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
        response = self._response(end.stop, render_usage(end.usage))
        return data + self._event(f"response.{response['status']}", response=response)

    def _response(self, stop: StopReason | None, usage: dict[str, Any] | None) -> dict[str, Any]:
        output = list(self._output) if stop else []
        return self._response_body(self._request, id_=self._id, output=output, stop=stop, usage=usage)

    def _on_text(self, kind: str, **fields: Any) -> bytes:
        return self._on_item(kind, content_index=len(self._message or ()), **fields)

    def _on_item(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._item_id, output_index=len(self._output), **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return sse(data, kind)


_SUMMARY: dict[str, Any] = {"summary_index": 0}


def _prefix(part: Part) -> str:
    if isinstance(part, ToolCall):
        return "ctc_" if part.custom else "fc_"
    return "rs_"


def _summary(text: str) -> dict[str, Any]:
    return {"type": "summary_text", "text": text}
