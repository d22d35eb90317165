"""Asks an upstream for more than the agent did (token ids, log-probs, usage) and takes it out of the answer again.

The recording keeps what the upstream sent; the agent receives what it asked for. Chat Completions only: that is where
servers such as vLLM give token ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pier.wire.body import Body, dump
from pier.wire.contract import need_dict, need_list
from pier.wire.dialects import DIALECTS, BadResponse
from pier.wire.sse import events_of
from pier.wire.translate import Memory
from pier.wire.turn import TurnBuilder

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
