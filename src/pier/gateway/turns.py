"""Turns as they stream: deltas added up to a turn, and a turn taken apart into deltas."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from pier.gateway.canonical import (
    Delta,
    Part,
    PartDelta,
    PartEnd,
    PartStart,
    Ping,
    Reasoning,
    Refusal,
    StreamError,
    Text,
    Tokens,
    ToolCall,
    Turn,
    TurnEnd,
    TurnStart,
    Usage,
)


class TurnBuilder:
    """Adds deltas up to a turn. `turn` is what has come so far; `ended` says whether that is all of it."""

    def __init__(self) -> None:
        self._start = TurnStart()
        self._parts: list[Part] = []
        self._texts: list[list[str]] = []
        self._signatures: list[str | None] = []
        self._tokens: list[Tokens] = []
        self.end: TurnEnd | None = None
        self.error: StreamError | None = None

    @property
    def ended(self) -> bool:
        return self.end is not None

    def add(self, delta: Delta) -> None:
        match delta:
            case TurnStart():
                self._start = delta
            case PartStart(part=part):
                self._parts.append(part)
                self._texts.append([])
                self._signatures.append(None)
            case PartDelta(index=index, text=text, signature=signature):
                self._texts[index].append(text)
                self._signatures[index] = signature or self._signatures[index]
            case TurnEnd():
                self.end = delta
            case StreamError():
                self.error = delta
            case Tokens():
                self._tokens.append(delta)
            case PartEnd() | Ping():
                pass

    def extend(self, deltas: Iterable[Delta]) -> TurnBuilder:
        for delta in deltas:
            self.add(delta)
        return self

    def turn(self) -> Turn:
        """What has come so far, as a turn."""
        parts = zip(self._parts, self._texts, self._signatures, strict=True)
        end = self.end or TurnEnd("other", self._start.usage or Usage())
        return Turn(
            parts=tuple(_grown(part, "".join(texts), signature) for part, texts, signature in parts),
            stop=end.stop,
            usage=end.usage,
            id=self._start.id,
            model=self._start.model,
            native_stop=end.native_stop,
            stop_sequence=end.stop_sequence,
            tokens=joined(self._tokens),
        )


def _grown(part: Part, text: str, signature: str | None) -> Part:
    match part:
        case Text() | Refusal():
            return replace(part, text=part.text + text)
        case Reasoning():
            return replace(part, text=part.text + text, signature=signature or part.signature)
        case ToolCall():
            return replace(part, arguments=part.arguments + text, signature=signature or part.signature)
        case _:
            return part


def joined(pieces: list[Tokens]) -> Tokens | None:
    """Tokens as they streamed, in one."""
    if not pieces:
        return None
    prompt = next((piece.prompt_ids for piece in pieces if piece.prompt_ids is not None), None)
    ids = [token for piece in pieces for token in piece.completion_ids or ()]
    logprobs = [value for piece in pieces for value in piece.logprobs or ()]
    has_ids = any(piece.completion_ids is not None for piece in pieces)
    has_logprobs = any(piece.logprobs is not None for piece in pieces)
    weights = next((piece.weights for piece in reversed(pieces) if piece.weights is not None), None)
    return Tokens(prompt, tuple(ids) if has_ids else None, tuple(logprobs) if has_logprobs else None, weights)


def stream_turn(turn: Turn, chunk: int = 64) -> Iterator[Delta]:
    """A whole turn as deltas, its texts in pieces of `chunk` characters."""
    yield TurnStart(turn.id, turn.model, replace(turn.usage, output_tokens=None, reasoning_tokens=None, cost_usd=None))
    for index, part in enumerate(turn.parts):
        match part:
            case Text(text=text) | Refusal(text=text):
                start, signature = replace(part, text=""), None
            case Reasoning(text=text, signature=signature):
                start = part if part.redacted else replace(part, text="", signature=None)
                signature = None if part.redacted else signature
            case ToolCall(arguments=text, signature=signature):
                start = replace(part, arguments="", signature=None)
            case _:
                start, text, signature = part, "", None
        yield PartStart(index, start)
        for offset in range(0, len(text), chunk):
            yield PartDelta(index, text[offset : offset + chunk])
        if signature:
            yield PartDelta(index, signature=signature)
        yield PartEnd(index)
    if turn.tokens:
        yield turn.tokens
    yield TurnEnd(turn.stop, turn.usage, turn.native_stop, turn.stop_sequence)
