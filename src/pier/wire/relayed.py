"""A call that is relayed in its own dialect: its answer is watched without being touched, and asked for more.

`AnswerWatch` knows the usage of an answer, its proper end and its failure. `ask` adds to a request what the agent did
not ask for (token ids, log-probs, usage), and `Extras` takes it out of the answer again: the recording keeps what the
upstream sent, the agent receives what it asked for. Only Chat Completions is asked for more: that is where servers such
as vLLM give token ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from json.decoder import JSONDecoder
from typing import Any

from pier.wire.body import Body, dump
from pier.wire.contract import AnswerProgress, compact, need_dict, need_list
from pier.wire.dialects import DIALECTS, BadResponse
from pier.wire.faults import Failure, classify, error_in
from pier.wire.sse import MalformedAnswer, data_of, events_of
from pier.wire.translate import Memory
from pier.wire.turn import DialectName, TurnBuilder, Usage

_scan = JSONDecoder().scan_once  # pyright: ignore[reportAttributeAccessIssue]


class AnswerWatch:
    """What is known of an answer so far."""

    def __init__(self, dialect: DialectName) -> None:
        self._dialect = DIALECTS[dialect]
        self._counts: dict[str, Any] = {}
        self._content = False
        self.done = False
        """The dialect's proper last event was seen."""
        self.finished = False
        """The model's turn is over, whether or not the stream says so properly."""
        self.failed: str | None = None
        self.failure: Failure | None = None
        """What the error means that `failed` is the message of."""
        self.empty = False
        """Whether OpenAI's `[DONE]`, which any server may send, came without an answer before it."""
        self.usage: Usage | None = None

    def see(self, block: bytes) -> list[Any]:
        """Whole events; the decoded data of each, None where there is none. `MalformedAnswer` if it is not JSON."""
        values: list[Any] = []
        before = 0
        for event in events_of(block):
            data, value = data_of(event), None
            if data is not None and data.strip() == b"[DONE]":
                self.empty = not (self.finished or self._content)
                self.done = self.finished = True
            elif data is not None:
                value = _decoded(data, before)
                if isinstance(value, dict) and (progress := self._dialect.look(value)):
                    self._take(progress)
            values.append(value)
            before += len(event)
        return values

    def see_whole(self, value: Mapping[str, Any]) -> None:
        """A whole answer that was not streamed."""
        self._count(value.get(self._dialect.usage_field))
        self.done = self.finished = True

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


_EXTRAS = (b"usage", b"token_ids", b"logprobs")


@dataclass(frozen=True, slots=True)
class Extras:
    """What was asked for on top, so must be taken out."""

    token_ids: bool = False
    logprobs: bool = False
    usage: bool = False

    def __bool__(self) -> bool:
        return self.token_ids or self.logprobs or self.usage

    def strip(self, value: Any) -> Any:
        """An answer, or an event of one, as the agent should see it; None if nothing of it is left."""
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
        if isinstance(kept.get("choices"), list):
            kept["choices"] = [self._strip_choice(choice) for choice in kept["choices"]]
        return kept

    def _strip_choice(self, choice: Any) -> Any:
        drop = {*(("token_ids",) if self.token_ids else ()), *(("logprobs",) if self.logprobs else ())}
        return {name: part for name, part in choice.items() if name not in drop} if isinstance(choice, dict) else choice

    def touch(self, block: bytes) -> bool:
        """Whether there may be something to take out of these events."""
        return bool(self) and any(word in block for word in _EXTRAS)

    def strip_events(self, block: bytes, values: list[Any]) -> bytes:
        """The same for whole events as bytes, whose decoded data are `values` (None: no JSON in it)."""
        kept = [self.strip(value) for value in values]
        if kept == values:
            return block
        return b"".join(
            event if new == old else b"data: " + dump(new) + b"\n\n" if new is not None else b""
            for event, old, new in zip(events_of(block), values, kept, strict=True)
        )


def ask(body: Body, *, tokens: bool, usage: bool) -> tuple[Body, Extras]:
    """A Chat Completions body that asks for what is wanted, and what that adds to the answer."""
    value, changes = body.value, {}
    options = need_dict(value.get("stream_options") or {}, "stream_options")
    extras = Extras(
        token_ids=tokens and not value.get("return_token_ids"),
        logprobs=tokens and not value.get("logprobs"),
        usage=usage and bool(value.get("stream")) and not options.get("include_usage"),
    )
    if extras.token_ids:
        changes["return_token_ids"] = True
    if extras.logprobs:
        changes["logprobs"] = True
    if extras.usage:
        changes["stream_options"] = {**options, "include_usage": True}
    return (body.with_fields(**changes) if changes else body), extras


class Sampler:
    """Keeps what a relayed model samples as arguments of tool calls, so that the next prompt can have them again.

    Clients write arguments anew, with other white space; the prompt would then hold other tokens than were sampled.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._parser = DIALECTS["chat"].stream_parser()
        self._turn = TurnBuilder()

    def restored(self, body: Body) -> Body:
        """A request whose history has the arguments as they were sampled; the same one if it has them already."""
        messages, changed = [], False
        for message in need_list(body.value.get("messages") or [], "messages"):
            calls = message.get("tool_calls") if isinstance(message, dict) else None
            known = [self._as_sampled(call) for call in calls] if isinstance(calls, list) else calls
            changed = changed or known != calls
            messages.append({**message, "tool_calls": known} if known != calls else message)
        return body.with_fields(messages=messages) if changed else body

    def _as_sampled(self, call: Any) -> Any:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
            return call
        arguments = self._memory.arguments(str(call.get("id")), function["arguments"])
        return {**call, "function": {**function, "arguments": arguments}}

    def see(self, data: bytes) -> None:
        """A piece of a stream."""
        self._turn.extend(self._parser.feed(data))

    def see_whole(self, value: Any) -> None:
        try:
            self._memory.remember(DIALECTS["chat"].parse_response(value))
        except BadResponse:
            return

    def close(self) -> None:
        """The stream is over."""
        self._memory.remember(self._turn.extend(self._parser.close()).turn())
