"""Policies for tests: exact tokens without a tokenizer, since every byte is a token."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pier.wire.turn import Delta, Message, Reasoning, Request, Text, Tokens, ToolCall, ToolResult, Turn, stream_turn

ROLE = {"system": 256, "user": 257, "assistant": 258}
END = 259
VOCABULARY = 260

Play = Sequence[Turn | BaseException] | Callable[[Request], Turn]


def spelled(message: Message) -> list[int]:
    """The ids of a message's body."""
    texts: list[str] = []
    for part in message.parts:
        match part:
            case Text(text=text) | Reasoning(text=text):
                texts.append(text)
            case ToolCall(name=name, arguments=arguments):
                texts.append(f"<{name}>{arguments}")
            case ToolResult(parts=parts):
                texts += [f"[{piece.text}]" for piece in parts if isinstance(piece, Text)]
            case _:
                texts.append("?")
    return list("".join(texts).encode(errors="replace"))


def prompt_of(request: Request) -> tuple[int, ...]:
    """A chat template: a mark for the role, the bytes, a mark for the end."""
    ids = [ROLE["system"], *"\n".join(request.system).encode(), END]
    for message in request.messages:
        ids += [ROLE[message.role], *spelled(message), END]
    return (*ids, ROLE["assistant"])


def tokens_of(request: Request, turn: Turn) -> Tokens:
    """The exact tokens of an answer; the log-prob of a token is -id/1000."""
    ids = (*spelled(Message("assistant", turn.parts)), END)
    return Tokens(prompt_of(request), ids, tuple(-token / 1000 for token in ids))


def call(command: str, number: int = 1) -> Turn:
    """A call of the tool `bash`, with arguments spaced as no client would write them again."""
    arguments = f'{{"command":   {json.dumps(command)}}}'
    return Turn((ToolCall(f"call_{number}", "bash", arguments),), "tool_use")


def says(text: str) -> Turn:
    return Turn((Text(text),))


class BytePolicy:
    """Answers with `play`, in order for each session, with exact tokens; streams if it is asked to."""

    vocab_size = VOCABULARY

    def __init__(self, play: Play, *, version: str | None = None, streams: bool = False) -> None:
        self.play, self.version, self.streams = play, version, streams
        self.requests: list[Request] = []
        self.sessions: list[Mapping[str, str]] = []
        self._used = 0

    def for_session(self, labels: Mapping[str, str]) -> BytePolicy:
        self.sessions.append(labels)
        one = BytePolicy(self.play, version=None, streams=self.streams)
        one.requests = self.requests
        return one

    def __call__(self, request: Request) -> Any:
        self.requests.append(request)
        return self._stream(request) if self.streams else self._answer(request)

    async def _stream(self, request: Request) -> AsyncIterator[Delta]:
        for delta in stream_turn(await self._answer(request), 4):
            yield delta

    async def _answer(self, request: Request) -> Turn:
        if callable(self.play):
            turn = self.play(request)
        else:
            turn = self.play[min(self._used, len(self.play) - 1)]
            self._used += 1
        if isinstance(turn, BaseException):
            raise turn
        return turn if turn.tokens else replace(turn, tokens=tokens_of(request, turn))
