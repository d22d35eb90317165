"""Chat Completions as a stream: chunks of one choice, then usage, then `[DONE]`."""

from __future__ import annotations

import json
import time
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
    Usage,
)
from pier.gateway.dialect.openai import chat_usage, error_body, parse_tokens, read_usage
from pier.gateway.dialect.shared import SSE, EventParser, error_text, fresh_id, kind_of_status, sse

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
