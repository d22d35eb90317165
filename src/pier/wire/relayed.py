"""Calls relayed in the agent's own dialect: the progress of the answer, and additional fields requested for recording.

`AnswerWatch` follows the usage, end and failure of an answer without changing it. `ask` requests fields that the agent
did not ask for (token ids, log-probs, usage), and `Extras` removes them from the answer: the recording keeps what the
upstream sent, the agent receives what it asked for. This concerns Chat Completions only, in which servers such as vLLM
return token ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from json.decoder import JSONDecoder
from typing import Any

from pier.wire.body import Body
from pier.wire.contract import AnswerProgress
from pier.wire.dialects import DIALECTS
from pier.wire.faults import Failure, classify, error_in
from pier.wire.sse import MalformedAnswer, data_of, events_of
from pier.wire.translate import Memory
from pier.wire.turn import DialectName, Usage
from pier.wire.values import compact, dump, need_dict, need_list, without

_scan = JSONDecoder().scan_once  # pyright: ignore[reportAttributeAccessIssue]


class AnswerWatch:
    """The progress of a relayed answer."""

    def __init__(self, dialect: DialectName) -> None:
        self._dialect = DIALECTS[dialect]
        self._counts: dict[str, Any] = {}
        self._content = False
        self.done = False
        """Whether the dialect's proper last event was seen."""
        self.finished = False
        """Whether the model's turn is over, with or without a proper end of the stream."""
        self.failed: str | None = None
        self.failure: Failure | None = None
        """The classified error; `failed` is its message."""
        self.empty = False
        """Whether OpenAI's `[DONE]`, which any server may send, came without an answer before it."""
        self.usage: Usage | None = None

    def see(self, block: bytes) -> list[Any]:
        """Take in whole events and return the decoded data of each, None for an event without data. Raise
        `MalformedAnswer` for data that is not JSON."""
        values: list[Any] = []
        before = 0
        for event in events_of(block):
            data, value = data_of(event), None
            if data is not None and data.strip() == b"[DONE]":
                self.empty = not (self.finished or self._content)
                self.done = self.finished = True
            elif data is not None:
                value = _decoded(data, before)
                if isinstance(value, dict) and (progress := self._dialect.progress_of(value)):
                    self._take(progress)
            values.append(value)
            before += len(event)
        return values

    def _take(self, progress: AnswerProgress) -> None:
        self._content |= progress.content
        self.finished |= progress.finished
        self.done |= progress.done
        if progress.usage:
            self._count(progress.usage)
        if progress.error is not None:
            self._fail(progress.error)

    def _count(self, raw: Any) -> None:
        if not isinstance(raw, dict):
            return
        self._counts.update(compact(raw))
        new = self._dialect.read_usage(self._counts)
        old = self.usage or new
        self.usage = Usage(
            *(getattr(old if getattr(new, name) is None else new, name) for name in Usage.__dataclass_fields__)
        )

    def _fail(self, value: Mapping[str, Any]) -> None:
        error = value.get("error")
        message = error.get("message") if isinstance(error, dict) else value.get("message")
        self.failed = str(message or "the provider reported an error")
        self.failure = classify(200, {"error": error_in(value) or value})
        self.done = True


def _decoded(data: bytes, before: int) -> Any:
    try:
        text = data.decode().strip()
        value, end = _scan(text, 0)
    except (ValueError, StopIteration, RecursionError):
        end, text, value = 0, "?", None
    if end != len(text):
        raise MalformedAnswer("the provider sent an event that is not JSON", before)
    return value


@dataclass(frozen=True, slots=True)
class Extras:
    """Additional fields that the gateway requested, to be removed from the answer."""

    token_ids: bool = False
    logprobs: bool = False
    usage: bool = False

    def __bool__(self) -> bool:
        return self.token_ids or self.logprobs or self.usage

    def strip(self, value: Any) -> Any:
        """An answer, or an event of one, without the additional fields; None if nothing is left."""
        if not isinstance(value, dict):
            return value
        kept = dict(value)
        if self.token_ids:
            kept.pop("prompt_token_ids", None)
            kept.pop("prompt_logprobs", None)
        if self.usage:
            kept.pop("usage", None)
            if "choices" in kept and not kept["choices"]:
                return None
        drop = [name for name in ("token_ids", "logprobs") if getattr(self, name)]
        if isinstance(kept.get("choices"), list):
            kept["choices"] = [without(each, *drop) if isinstance(each, dict) else each for each in kept["choices"]]
        return kept

    def touch(self, block: bytes) -> bool:
        """Whether these events may hold additional fields; examining each event takes a sixth of a stream's time."""
        return bool(self) and any(word in block for word in (b"usage", b"token_ids", b"logprobs"))

    def strip_events(self, block: bytes, values: list[Any]) -> bytes:
        """The same for whole events as bytes; `values` are their decoded data, None for events without JSON."""
        kept = [self.strip(value) for value in values]
        if kept == values:
            return block
        return b"".join(
            event if new == old else b"data: " + dump(new) + b"\n\n" if new is not None else b""
            for event, old, new in zip(events_of(block), values, kept, strict=True)
        )


def ask(body: Body, *, tokens: bool, usage: bool) -> tuple[Body, Extras]:
    """A Chat Completions body that asks for token ids and usage, and the fields that this adds to the answer."""
    value = body.value
    options = need_dict(value.get("stream_options") or {}, "stream_options")
    extras = Extras(
        token_ids=tokens and not value.get("return_token_ids"),
        logprobs=tokens and not value.get("logprobs"),
        usage=usage and bool(value.get("stream")) and not options.get("include_usage"),
    )
    additions = {
        "return_token_ids": extras.token_ids,
        "logprobs": extras.logprobs,
        "stream_options": extras.usage and {**options, "include_usage": True},
    }
    changes = {name: change for name, change in additions.items() if change}
    return (body.with_fields(**changes) if changes else body), extras


def restore_arguments(body: Body, memory: Memory) -> Body:
    """A Chat Completions body whose history has the arguments of tool calls as they were sampled. Clients format them
    again with other white space, and the prompt would then hold other tokens than were sampled."""

    def restored(call: Any) -> Any:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
            return call
        arguments = memory.arguments(str(call.get("id")), function["arguments"])
        return {**call, "function": {**function, "arguments": arguments}}

    messages = need_list(body.value.get("messages") or [], "messages")
    restored_messages = [
        {**message, "tool_calls": [restored(call) for call in message["tool_calls"]]}
        if isinstance(message, dict) and isinstance(message.get("tool_calls"), list)
        else message
        for message in messages
    ]
    return body.with_fields(messages=restored_messages) if restored_messages != messages else body
