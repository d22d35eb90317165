"""The state of a rollout as reward functions and hooks see it: a dictionary whose messages are Chat Completions'.

The keys and shapes are those that users of `verifiers` know. A message can be read by key or by attribute. One step of
the trajectory is one model call, with the exact tokens where the server gave them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pier.errors import PierError
from pier.rollout.samples import Exact
from pier.trajectory.lineage import Node
from pier.wire.chat import render_assistant, render_messages
from pier.wire.turn import Turn


class AttributeDict(dict[str, Any]):
    """A dictionary whose keys are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


_OPTIONAL = frozenset({"content", "reasoning_content", "tool_calls", "tool_call_id", "name"})


class ChatMessage(AttributeDict):
    """One message: `role`, `content`, and where there are some `tool_calls` (each `id`, `name`, `arguments`),
    `tool_call_id`, `reasoning_content`."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name) if name in _OPTIONAL else super().__getattr__(name)


Messages = list[ChatMessage]


def as_messages(raw: Any) -> Messages:
    """Messages of a dataset or a hook: a text is what the user says. `TypeError` for anything else."""
    if isinstance(raw, str):
        return [ChatMessage(role="user", content=raw)]
    if not isinstance(raw, list | tuple):
        raise TypeError(f"invalid messages {raw!r}: expected a text or a list of messages")
    return [_as_message(each) for each in raw]


def _as_message(raw: Any) -> ChatMessage:
    value = raw if isinstance(raw, Mapping) else getattr(raw, "model_dump", lambda: raw)()
    if not isinstance(value, Mapping) or "role" not in value:
        raise TypeError(f"invalid message {raw!r}: expected an object with a role")
    message = ChatMessage({name: each for name, each in value.items() if each is not None or name == "content"})
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [_as_call(call) for call in calls]
    return message


def _as_call(raw: Any) -> AttributeDict:
    call = dict(raw) if isinstance(raw, Mapping) else raw.model_dump()
    said = call.get("function") or call.get("custom") or call
    return AttributeDict(id=call.get("id"), name=said["name"], arguments=said.get("arguments", said.get("input", "")))


class State(dict[str, Any]):
    """What is known of one rollout. `prompt`, `answer`, `info` and `example_id` are those of `state["input"]`."""

    INPUT_FIELDS = ("prompt", "answer", "info", "example_id")

    def _holder(self, key: str) -> dict[str, Any] | None:
        row = super().get("input") if key in self.INPUT_FIELDS else None
        return row if row is not None and key in row else None

    def __getitem__(self, key: str) -> Any:
        holder = self._holder(key)
        return super().__getitem__(key) if holder is None else holder[key]

    def __setitem__(self, key: str, value: Any) -> None:
        holder = self._holder(key)
        if holder is None:
            super().__setitem__(key, value)
        else:
            holder[key] = value

    def get(self, key: str, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default


@dataclass(slots=True)
class TimeSpan:
    """Seconds since the epoch; `end` is 0 until it is over."""

    start: float = 0.0
    end: float = 0.0

    @property
    def duration(self) -> float:
        return max(0.0, self.end - self.start) if self.end else 0.0

    def as_dict(self) -> dict[str, float]:
        return {"start": self.start, "end": self.end, "duration": self.duration}


@dataclass(slots=True)
class TimeSpans:
    spans: list[TimeSpan] = field(default_factory=list)

    @property
    def duration(self) -> float:
        return sum(span.duration for span in self.spans)

    def as_dict(self) -> dict[str, Any]:
        return {"spans": [span.as_dict() for span in self.spans], "duration": self.duration}


@dataclass(slots=True)
class RolloutTiming:
    """When the parts of a rollout took place. `model` has one span for each call; parallel calls overlap."""

    start_time: float = field(default_factory=time.time)
    setup: TimeSpan = field(default_factory=TimeSpan)
    generation: TimeSpan = field(default_factory=TimeSpan)
    scoring: TimeSpan = field(default_factory=TimeSpan)
    model: TimeSpans = field(default_factory=TimeSpans)
    env: TimeSpans = field(default_factory=TimeSpans)

    @property
    def total(self) -> float:
        return self.scoring.end - self.generation.start if self.scoring.end else 0.0

    @property
    def overhead(self) -> float:
        parts = (self.setup, self.model, self.env, self.scoring)
        return self.total - sum(part.duration for part in parts)

    def as_dict(self) -> dict[str, Any]:
        names = ("setup", "generation", "scoring", "model", "env")
        spans = {name: getattr(self, name).as_dict() for name in names}
        return {"start_time": self.start_time, **spans, "total": self.total, "overhead": self.overhead}


def response_of(node: Node, turn: Turn) -> AttributeDict:
    """A model's answer: `id`, `model`, `usage` and `message`, which has `finish_reason`, `is_truncated`, `tokens`."""
    message = _as_message(render_assistant(turn.parts, answer=True))
    message["finish_reason"] = {"tool_use": "tool_calls", "length": "length"}.get(turn.stop, "stop")
    message["is_truncated"] = turn.stop in ("length", "context")
    message["tokens"] = _tokens(turn)
    usage = None
    if turn.usage.input_tokens is not None and turn.usage.output_tokens is not None:
        usage = AttributeDict(
            prompt_tokens=turn.usage.input_tokens,
            reasoning_tokens=turn.usage.reasoning_tokens or 0,
            completion_tokens=turn.usage.output_tokens,
            total_tokens=turn.usage.total_tokens,
        )
    created = int(node.ended or node.at)
    return AttributeDict(id=turn.id or "", created=created, model=turn.model or "", usage=usage, message=message)


def _tokens(turn: Turn) -> AttributeDict | None:
    exact = Exact.of(turn)
    if exact is None:
        return None
    return AttributeDict(
        prompt_ids=list(exact.prompt),
        prompt_mask=[0] * len(exact.prompt),
        completion_ids=list(exact.completion),
        completion_mask=[1] * len(exact.completion),
        completion_logprobs=list(exact.logprobs or ()),
    )


_OF_RESPONSES = ("finish_reason", "is_truncated", "tokens")


def step_of(node: Node, prompt: Messages, response: AttributeDict, trajectory_id: str) -> AttributeDict:
    """One step of a trajectory. `extras` says which call of the recording it is and in which dialect it came."""
    message, tokens = response["message"], response["message"].get("tokens")
    truncated = bool(message.get("is_truncated"))
    said = ChatMessage({name: value for name, value in message.items() if name not in _OF_RESPONSES})
    return AttributeDict(
        prompt=prompt,
        completion=[said],
        response=response,
        tokens={**tokens, "overlong_prompt": False, "is_truncated": truncated} if tokens else None,
        reward=None,
        advantage=None,
        is_truncated=truncated,
        trajectory_id=trajectory_id,
        extras={"call": node.number, "dialect": node.request.dialect, "weights": _weights(node)},
    )


def _weights(node: Node) -> str | None:
    return node.turn.tokens.weights if node.turn and node.turn.tokens else None


def prompt_of(node: Node) -> list[dict[str, Any]]:
    """What a call asked, whatever its dialect, as Chat Completions writes it."""
    return render_messages(node.request)


def error_data(error: BaseException) -> dict[str, Any]:
    """An error as a row of the results has it; `blame` says where the fault lies."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__
    return {
        "error": type(error).__name__,
        "message": str(error) or type(error).__name__,
        "error_chain_repr": " -> ".join(repr(each) for each in chain),
        "error_chain_str": " -> ".join(type(each).__name__ for each in chain),
        "code": getattr(error, "code", None),
        "blame": getattr(error, "blame", None),
    }


def is_fault(error: BaseException | None) -> bool:
    """Whether a rollout with this error says nothing about the agent, so that it has no reward."""
    return error is not None and not (isinstance(error, PierError) and error.blame == "agent")
