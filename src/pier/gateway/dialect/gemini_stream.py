"""Gemini as a stream: whole answers that each hold what is new; calls come in one piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
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
from pier.gateway.dialect.gemini_body import camel, parse_call, parse_part, read_usage, render_part, render_usage
from pier.gateway.dialect.shared import SSE, EventParser, dumps, error_text, fresh_id, kind_of_status, sse


class GeminiParser(EventParser):
    """Chunks to deltas, from events or from one JSON array. The end is held back until the close: usage may follow."""

    def __init__(self, read_stop: Callable[[Any, bool], StopReason]) -> None:
        super().__init__()
        self._read_stop = read_stop
        self._array: ArrayReader | None = None
        self._sniffed = False
        self._started = False
        self._count = 0
        self._open: tuple[int, Part] | None = None
        self._has_calls = False
        self._finish: str | None = None
        self._blocked = False
        self._usage: dict[str, Any] = {}

    def feed(self, data: bytes) -> list[Delta]:
        if not self._sniffed and data.strip():
            self._sniffed = True
            if data.lstrip().startswith(b"["):
                self._array = ArrayReader()
        if self._array is None:
            return super().feed(data)
        return [delta for item in self._array.feed(data) for delta in self._decode(None, item)]

    def on_event(self, event: str | None, data: Mapping[str, Any]) -> Iterator[Delta]:
        if data.get("error"):
            code = data["error"].get("code")
            status = code if isinstance(code, int) and 400 <= code < 600 else 502
            yield StreamError(error_text(dict(data)), kind_of_status(status), status)
            return
        if not self._started:
            self._started = True
            yield TurnStart(data.get("responseId"), data.get("modelVersion"))
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
        yield from self._shut()
        if self._finish is not None:
            native, self._finish = self._finish, None
            stop = "refusal" if self._blocked else self._read_stop(native, self._has_calls)
            yield TurnEnd(stop, read_usage(self._usage), native)

    def _on_part(self, raw: Mapping[str, Any]) -> Iterator[Delta]:
        if isinstance(raw.get("functionCall"), dict):
            self._has_calls = True
            yield from self._whole(parse_call(raw["functionCall"], raw.get("thoughtSignature")))
            return
        if raw.get("text") == "" and raw.get("thought") and not raw.get("thoughtSignature"):
            return
        for part in parse_part(raw):
            match part:
                case Text(text=text) | Reasoning(text=text) if text or self._continues(part):
                    yield from self._grow(part, text)
                case _:
                    yield from self._whole(part)

    def _continues(self, part: Part) -> bool:
        """A thought's signature comes after its text, in a part without text."""
        return isinstance(part, Reasoning) and self._open is not None and isinstance(self._open[1], Reasoning)

    def _grow(self, part: Text | Reasoning, text: str) -> Iterator[Delta]:
        if self._open is None or type(self._open[1]) is not type(part):
            yield from self._shut()
            blank = Text("") if isinstance(part, Text) else Reasoning("", origin="gemini")
            self._open = (self._count, blank)
            self._count += 1
            yield PartStart(self._open[0], blank)
        signature = part.signature if isinstance(part, Reasoning) else None
        if text or signature:
            yield PartDelta(self._open[0], text, signature)
        if signature:
            yield from self._shut()

    def _whole(self, part: Part) -> Iterator[Delta]:
        yield from self._shut()
        yield PartStart(self._count, part)
        yield PartEnd(self._count)
        self._count += 1

    def _shut(self) -> Iterator[Delta]:
        if self._open is not None:
            yield PartEnd(self._open[0])
            self._open = None


class ArrayReader:
    """Splits a JSON array of objects into the texts of its items, wherever it is cut."""

    def __init__(self) -> None:
        self._item = bytearray()
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def feed(self, data: bytes) -> list[str]:
        items: list[str] = []
        for byte in data:
            if self._depth:
                self._item.append(byte)
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif byte == 0x5C:
                    self._escaped = True
                elif byte == 0x22:
                    self._in_string = False
            elif byte == 0x22:
                self._in_string = True
            elif byte == 0x7B:
                if not self._depth:
                    self._item = bytearray(b"{")
                self._depth += 1
            elif byte == 0x7D:
                self._depth -= 1
                if not self._depth:
                    items.append(self._item.decode(errors="replace"))
        return items


class GeminiRenderer:
    def __init__(
        self,
        request: Request,
        finishes: Mapping[StopReason, str],
        error_body: Callable[[int, str, ErrorKind], dict[str, Any]],
        *,
        sse_form: bool,
    ) -> None:
        self.content_type = SSE if sse_form else "application/json"
        self._request = request
        self._finishes = finishes
        self._error_body = error_body
        self._sse = sse_form
        self._first = True
        self._id = fresh_id("")
        self._part: Part | None = None
        self._text: list[str] = []
        self._signature: str | None = None

    def render(self, delta: Delta) -> bytes:
        match delta:
            case TurnStart(id=id_):
                self._id = id_ or self._id
                return b""
            case PartStart(part=part):
                return self._start(part)
            case PartDelta(text=text, signature=signature):
                self._signature = signature or self._signature
                return self._grow(text)
            case PartEnd():
                return self._shut()
            case TurnEnd():
                usage = render_usage(delta.usage)
                # The last chunk has a part: clients look for one without asking first.
                return self._chunk([{"text": ""}], finish=self._finishes[delta.stop], usage=usage) + self._tail()
            case StreamError(message=message, kind=kind, status=status):
                return self.error(status, message, kind)
            case Ping():
                return self.keep_alive()
            case _:
                return b""

    def keep_alive(self) -> bytes:
        # Google's clients decode every line that is not blank, comments too.
        return b"\n"

    def error(self, status: int, message: str, kind: ErrorKind) -> bytes:
        return self._frame(self._error_body(status, message, kind)) + self._tail()

    def _start(self, part: Part) -> bytes:
        self._part, self._text, self._signature = part, [], None
        match part:
            case Text(text=text) | Refusal(text=text) | Reasoning(text=text):
                self._signature = part.signature if isinstance(part, Reasoning) else None
                return self._grow(text)
            case ToolCall(arguments=text, signature=signature):
                self._signature = signature
                return self._grow(text)
            case _:
                return b""

    def _grow(self, text: str) -> bytes:
        if not text:
            return b""
        self._text.append(text)
        match self._part:
            case Text() | Refusal():
                return self._chunk([{"text": text}])
            case Reasoning():
                return self._chunk([{"text": text, "thought": True}])
            case _:
                return b""

    def _shut(self) -> bytes:
        part, self._part = self._part, None
        match part:
            case ToolCall():
                whole = replace(part, arguments="".join(self._text), signature=self._signature)
                return self._chunk([render_part(whole) or {}])
            case Reasoning(origin="gemini") if self._signature:
                shown = {"thought": True} if self._text else {}
                return self._chunk([{"text": "", **shown, "thoughtSignature": self._signature}])
            case Text() | Refusal() | Reasoning() | None:
                return b""
            case _:
                rendered = render_part(part, answer=True)
                return self._chunk([rendered]) if rendered else b""

    def _chunk(self, parts: list[dict[str, Any]], finish: str | None = None, usage: Any = None) -> bytes:
        candidate: dict[str, Any] = {"content": {"role": "model", "parts": parts}, "index": 0}
        if finish:
            candidate["finishReason"] = finish
        body = {"candidates": [candidate], "modelVersion": self._request.model, "responseId": self._id}
        return self._frame({**body, "usageMetadata": usage} if usage else body)

    def _frame(self, body: dict[str, Any]) -> bytes:
        if self._sse:
            return sse(body)
        lead, self._first = (b"[" if self._first else b",\n"), False
        return lead + dumps(body).encode()

    def _tail(self) -> bytes:
        return b"" if self._sse else b"]"
