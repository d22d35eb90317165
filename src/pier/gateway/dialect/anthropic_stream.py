"""Anthropic Messages as a stream: `message_start`, one block after the other, `message_delta`, `message_stop`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pier.gateway.canonical import (
    Delta,
    ErrorKind,
    Opaque,
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
from pier.gateway.dialect.anthropic_body import parse_block, read_usage, render_part, render_usage
from pier.gateway.dialect.shared import SSE, EventParser, error_text, fresh_id, sign, sse

_STATUS: dict[ErrorKind, int] = {
    "invalid_request": 400,
    "authentication": 401,
    "permission": 403,
    "not_found": 404,
    "too_large": 413,
    "rate_limit": 429,
    "overloaded": 529,
}


class AnthropicParser(EventParser):
    def __init__(self, read_stop: Callable[[Any, bool], StopReason], kinds: Mapping[str, ErrorKind]) -> None:
        super().__init__()
        self._read_stop = read_stop
        self._kinds = kinds
        self._count = 0
        self._block: dict[str, Any] | None = None
        self._open: int | None = None
        self._pieces: list[str] = []
        self._signature: list[str] = []
        self._has_calls = False
        self._usage: dict[str, Any] = {}
        self._stop: tuple[str | None, str | None] = (None, None)

    def on_event(self, event: str | None, data: Mapping[str, Any]) -> Iterator[Delta]:
        match data.get("type") or event:
            case "message_start":
                message = data["message"]
                self._usage.update(message.get("usage") or {})
                yield TurnStart(message.get("id"), message.get("model"), read_usage(self._usage))
            case "content_block_start":
                yield from self._start(dict(data["content_block"]))
            case "content_block_delta":
                yield from self._grow(data["delta"])
            case "content_block_stop":
                yield from self._shut()
            case "message_delta":
                delta = data.get("delta") or {}
                self._stop = (delta.get("stop_reason"), delta.get("stop_sequence"))
                self._usage.update(
                    {key: value for key, value in (data.get("usage") or {}).items() if value is not None}
                )
            case "message_stop":
                self.done = True
                native, sequence = self._stop
                stop = self._read_stop(native, self._has_calls)
                yield TurnEnd(stop, read_usage(self._usage), native, sequence)
            case "ping":
                yield Ping()
            case "error":
                error = data.get("error") or {}
                kind = self._kinds.get(error.get("type") or "", "server")
                yield StreamError(error_text(dict(data)), kind, _STATUS.get(kind, 502))

    def _start(self, block: dict[str, Any]) -> Iterator[Delta]:
        yield from self._shut()
        self._block, self._pieces, self._signature = block, [], []
        part = parse_block(block)
        if isinstance(part, Opaque):
            return
        if isinstance(part, ToolCall):
            self._has_calls = True
            if not block.get("input"):
                part = ToolCall(part.id, part.name, "")
        if isinstance(part, Reasoning) and not part.redacted:
            part = Reasoning(part.text, origin="anthropic")
        self._open = self._count
        self._count += 1
        yield PartStart(self._open, part)

    def _grow(self, delta: Mapping[str, Any]) -> Iterator[Delta]:
        if self._block is None:
            raise ValueError("a delta outside of any block")
        kind = delta.get("type")
        text = delta.get({"text_delta": "text", "input_json_delta": "partial_json"}.get(str(kind), "thinking")) or ""
        if kind == "signature_delta":
            self._signature.append(delta.get("signature") or "")
        elif self._open is None:
            self._pieces.append(text)
        elif text:
            yield PartDelta(self._open, text)

    def _shut(self) -> Iterator[Delta]:
        block, self._block = self._block, None
        if block is None:
            return
        if self._open is None:
            # A block that only Anthropic knows comes whole, with the input that was streamed for it.
            if self._pieces:
                block = {**block, "input": json.loads("".join(self._pieces) or "{}")}
            yield PartStart(self._count, Opaque("anthropic", block))
            yield PartEnd(self._count)
            self._count += 1
            return
        if signature := "".join(self._signature):
            yield PartDelta(self._open, signature=signature)
        yield PartEnd(self._open)
        self._open = None


class AnthropicRenderer:
    content_type = SSE

    def __init__(
        self,
        request: Request,
        native: Mapping[StopReason, str],
        error_body: Callable[[int, str, ErrorKind], dict[str, Any]],
    ) -> None:
        self._request = request
        self._native = native
        self._error_body = error_body
        self._index = -1
        self._part: Part | None = None
        self._signature: str | None = None

    def render(self, delta: Delta) -> bytes:
        match delta:
            case TurnStart():
                return self._begin(delta)
            case PartStart(part=part):
                return self._start(part)
            case PartDelta(text=text, signature=signature):
                self._signature = signature or self._signature
                return self._grow(text)
            case PartEnd():
                return self._shut()
            case TurnEnd():
                end = {"stop_reason": self._native[delta.stop], "stop_sequence": delta.stop_sequence}
                data = {"type": "message_delta", "delta": end, "usage": render_usage(delta.usage)}
                return _event(data) + _event({"type": "message_stop"})
            case StreamError(message=message, kind=kind, status=status):
                return self.error(status, message, kind)
            case Ping():
                return self.keep_alive()
            case _:
                return b""

    def keep_alive(self) -> bytes:
        return _event({"type": "ping"})

    def error(self, status: int, message: str, kind: ErrorKind) -> bytes:
        return _event(self._error_body(status, message, kind))

    def _begin(self, start: TurnStart) -> bytes:
        message = {
            "id": start.id or fresh_id("msg_"),
            "type": "message",
            "role": "assistant",
            "model": self._request.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": render_usage(start.usage or read_usage(None)),
        }
        return _event({"type": "message_start", "message": message})

    def _start(self, part: Part) -> bytes:
        self._part, self._signature = part, None
        match part:
            case Text() | Refusal():
                block: dict[str, Any] | None = {"type": "text", "text": ""}
            case Reasoning(redacted=False):
                block = {"type": "thinking", "thinking": "", "signature": ""}
                self._signature = part.signature
            case ToolCall():
                block = {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
            case _:
                block = render_part(part, answer=True)
        if block is None:
            self._part = None
            return b""
        self._index += 1
        data = _event({"type": "content_block_start", "index": self._index, "content_block": block})
        match part:
            case Text(text=text) | Refusal(text=text) | Reasoning(text=text, redacted=False) | ToolCall(arguments=text):
                return data + self._grow(text)
            case _:
                return data

    def _grow(self, text: str) -> bytes:
        if not text:
            return b""
        match self._part:
            case Text() | Refusal():
                return self._delta({"type": "text_delta", "text": text})
            case Reasoning():
                return self._delta({"type": "thinking_delta", "thinking": text})
            case ToolCall():
                return self._delta({"type": "input_json_delta", "partial_json": text})
            case _:
                return b""

    def _shut(self) -> bytes:
        part, self._part = self._part, None
        if part is None:
            return b""
        data = b""
        if isinstance(part, Reasoning) and not part.redacted:
            signed = Reasoning("", self._signature, part.origin)
            data = self._delta({"type": "signature_delta", "signature": sign(signed, "anthropic") or ""})
        return data + _event({"type": "content_block_stop", "index": self._index})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event({"type": "content_block_delta", "index": self._index, "delta": delta})


def _event(data: dict[str, Any]) -> bytes:
    return sse(data, data["type"])
