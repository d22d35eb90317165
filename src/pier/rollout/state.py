"""The state of a rollout as reward functions and hooks see it: a dictionary with messages in Chat Completions' format.

Keys, shapes and the names of errors are those of `verifiers`; `Error` is `pier.PierError`, `ModelError` is
`pier.ProviderError`. A message can be read by key or by attribute. Each step of the trajectory is a model call, with
exact tokens if the server returned them.

`TurnLog` collects the turns. Sub-agents, titles and repeated calls are turns too, but the rollout's `completion` is the
main conversation alone. Turns share the messages of their histories, so memory grows with the new ones only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pier.errors import InfraError, PierError, ProviderError, SandboxError, UsageError
from pier.rollout.samples import Exact, from_threads
from pier.trajectory.calls import Generation, Node
from pier.trajectory.lineage import Lineage
from pier.wire.chat import render_assistant, render_messages
from pier.wire.turn import Message, Sampling, Turn

Error = PierError
ModelError = ProviderError


class TunnelError(InfraError):
    """The gateway cannot be served inside the sandbox."""

    code = "tunnel"
    retryable = True


class SandboxCreationError(SandboxError):
    """Starting a sandbox failed."""

    code = "sandbox_creation"


class SandboxNotReadyError(SandboxError):
    """A sandbox was not ready in time."""

    code = "sandbox_not_ready"


class SandboxSetupError(SandboxError):
    """`post_sandbox_setup` failed."""

    code = "sandbox_setup"


class InvalidModelResponseError(ModelError):
    """The model's answer is unusable; raised by hooks."""

    code = "invalid_response"


class EmptyModelResponseError(InvalidModelResponseError):
    """The model's answer is empty; raised by hooks."""

    code = "empty_response"


class OverlongPromptError(PierError):
    """The prompt exceeds the model's context; raised by a hook, it ends the rollout as `prompt_too_long`."""

    blame = "agent"
    code = "prompt_too_long"


class ToolError(PierError):
    """A tool of the agent failed; raised by hooks."""

    blame = "agent"
    code = "tool"


class ToolParseError(ToolError):
    """A tool call cannot be parsed; raised by hooks."""

    code = "tool_parse"


class ToolCallError(ToolError):
    """A tool call failed; raised by hooks."""

    code = "tool_call"


SamplingArgs = dict[str, Any]
Info = dict[str, Any]
TokenUsage = dict[str, float]


class AttributeDict(dict[str, Any]):
    """A dictionary whose values can be read and set as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def model_dump(self, **_: Any) -> dict[str, Any]:
        return _plain_copy(self)


def _plain_copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain_copy(each) for name, each in value.items()}
    return [_plain_copy(each) for each in value] if isinstance(value, list) else value


_OPTIONAL = frozenset({"content", "reasoning_content", "tool_calls", "tool_call_id", "name"})


class ChatMessage(AttributeDict):
    """One message: `role`, `content`, and optionally `tool_calls` (each `id`, `name`, `arguments`), `tool_call_id`,
    `reasoning_content`."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name) if name in _OPTIONAL else super().__getattr__(name)


class _OfRole(ChatMessage):
    _role = ""

    def __init__(self, *values: Any, **fields: Any) -> None:
        super().__init__(*values, **{"role": self._role, **fields})


class SystemMessage(_OfRole):
    _role = "system"


class UserMessage(_OfRole):
    _role = "user"


class AssistantMessage(_OfRole):
    _role = "assistant"


class ToolMessage(_OfRole):
    _role = "tool"


class CalledTool(AttributeDict):
    """`vf.ToolCall`: `id`, `name` and `arguments` as JSON text."""


ToolCall = CalledTool


class Response(AttributeDict):
    """A model's answer: `id`, `model`, `usage` and `message`, which has `finish_reason`, `is_truncated`, `tokens`."""


class TrajectoryStep(AttributeDict):
    """One model call: `prompt`, `completion`, `response`, `tokens`, `reward`, `advantage`, `is_truncated`, `extras`."""


Messages = list[ChatMessage]
_BY_ROLE = {"system": SystemMessage, "user": UserMessage, "assistant": AssistantMessage, "tool": ToolMessage}


def as_messages(raw: Any) -> Messages:
    """Convert the messages of a dataset or a hook; a text is a message of the user."""
    if isinstance(raw, str):
        return [ChatMessage(role="user", content=raw)]
    if not isinstance(raw, list | tuple):
        raise TypeError(f"invalid messages {raw!r}: expected a text or a list of messages")
    return [_as_message(each) for each in raw]


def _as_message(raw: Any) -> ChatMessage:
    value = raw if isinstance(raw, Mapping) else getattr(raw, "model_dump", lambda: raw)()
    if not isinstance(value, Mapping) or "role" not in value:
        raise TypeError(f"invalid message {raw!r}: expected an object with a role")
    fields = {name: each for name, each in value.items() if each is not None or name == "content"}
    message = _BY_ROLE.get(str(fields["role"]), ChatMessage)(fields)
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [_as_call(call) for call in calls]
    return message


def _as_call(raw: Any) -> CalledTool:
    call = dict(raw) if isinstance(raw, Mapping) else raw.model_dump()
    tool = call.get("function") or call.get("custom") or call
    return CalledTool(id=call.get("id"), name=tool["name"], arguments=tool.get("arguments", tool.get("input", "")))


class State(dict[str, Any]):
    """The state of one rollout. `prompt`, `answer`, `info` and `example_id` are those of `state["input"]`."""

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
    """Start and end in seconds since the epoch; `end` is 0 until then."""

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
    """The time spans of a rollout's parts. `model` has one for each call; those of parallel calls overlap."""

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


def response_of(node: Node, turn: Turn) -> Response:
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
    return Response(id=turn.id or "", created=created, model=turn.model or "", usage=usage, message=message)


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


def error_data(error: BaseException) -> dict[str, Any]:
    """An error as written to the results."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = getattr(cause, "__cause__", None)  # a hook may set the state's error to a text
    return {
        "error": type(error).__name__,
        "message": str(error) or type(error).__name__,
        "error_chain_repr": " -> ".join(repr(each) for each in chain),
        "error_chain_str": " -> ".join(type(each).__name__ for each in chain),
        "code": getattr(error, "code", None),
        "blame": getattr(error, "blame", None),
        "hint": getattr(error, "hint", None),
    }


def is_fault(error: BaseException | None) -> bool:
    """Whether an error is not the agent's, so that its rollout has no reward."""
    return error is not None and not (isinstance(error, PierError) and error.blame == "agent")


_SAMPLING = {
    **{name: name for name in ("temperature", "top_p", "top_k", "max_tokens", "seed")},
    **{name: name for name in ("presence_penalty", "frequency_penalty")},
    **dict.fromkeys(("max_completion_tokens", "max_output_tokens"), "max_tokens"),
    "reasoning_effort": "effort",
}
"""Names of sampling arguments: the user's, and the gateway's."""
_WITHOUT_EFFECT: dict[str, Any] = {"n": 1, "top_k": -1, "min_p": 0, "min_tokens": 0, "repetition_penalty": 1}
_TOKENS = frozenset({"logprobs", "top_logprobs", "return_token_ids", "return_tokens_as_token_ids"})
"""Arguments that request tokens; ignored, since the client's type decides that here."""


def sampling_of(arguments: Mapping[str, Any]) -> Sampling | None:
    """Convert sampling arguments for the gateway; None if there are none. `UsageError` for unknown ones."""
    found: dict[str, Any] = {}
    named = {name: value for name, value in arguments.items() if name != "extra_body"}
    for name, value in {**(arguments.get("extra_body") or {}), **named}.items():
        if value is None or name in _TOKENS or (name in _WITHOUT_EFFECT and value == _WITHOUT_EFFECT[name]):
            continue
        if name == "n":
            raise UsageError(f"invalid value {value!r} for n: expected 1", hint="rollouts_per_example=N")
        if name == "stop":
            found["stop"] = (value,) if isinstance(value, str) else tuple(value)
        elif name in _SAMPLING:
            found[_SAMPLING[name]] = value
        else:
            known = ", ".join(_SAMPLING)
            raise UsageError(f"unsupported sampling argument {name!r}: expected one of {known}, stop")
    return Sampling(**found) if found else None


@dataclass(frozen=True, slots=True)
class RolloutTurn:
    """One finished call. `response` is None if the model gave no answer; `too_long` if the prompt was too long."""

    node: Node
    prompt: Messages
    response: Response | None
    too_long: bool = False

    @property
    def span(self) -> TimeSpan:
        return TimeSpan(self.node.at, self.node.ended or self.node.at)

    def step(
        self, prompt: Messages, response: Response, trajectory_id: str, max_seq_len: int | None = None
    ) -> TrajectoryStep:
        """The step of a trajectory. `extras` has the call's number in the recording and its dialect."""
        node, message = self.node, response["message"]
        tokens = _within(message["tokens"], max_seq_len) if message.get("tokens") else None
        answer = AssistantMessage({name: value for name, value in message.items() if name not in _OF_RESPONSES})
        weights = node.turn.tokens.weights if node.turn and node.turn.tokens else None
        return TrajectoryStep(
            prompt=prompt,
            completion=[answer],
            response=response,
            tokens=tokens,
            reward=None,
            advantage=None,
            is_truncated=bool(message.get("is_truncated") or (tokens and tokens["is_truncated"])),
            trajectory_id=trajectory_id,
            extras={"call": node.number, "dialect": node.request.dialect, "weights": weights},
        )


def _within(tokens: Mapping[str, Any], max_length: int | None) -> dict[str, Any]:
    """The tokens of a step, cut to `max_seq_len`. Training samples are not cut."""
    length = len(tokens["prompt_ids"])
    room = None if max_length is None else max(0, max_length - length)
    cut = {name: ids[: max_length if name.startswith("prompt") else room] for name, ids in tokens.items()}
    overlong = max_length is not None and length > max_length
    truncated = overlong or (room is not None and len(tokens["completion_ids"]) > room)
    return {**cut, "overlong_prompt": overlong, "is_truncated": truncated}


@dataclass(slots=True)
class TurnLog:
    """Collects the model calls of a session. `take` returns those that were added since the last time."""

    generations: list[Generation] = field(default_factory=list)
    _taken: int = 0
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _rendered: dict[int, Messages] = field(default_factory=dict)
    """The rendered messages of histories, by the identity of the original message."""

    def add(self, generation: Generation) -> None:
        self.generations.append(generation)
        self._news.set()

    async def changed(self, ends: set[asyncio.Future[Any]], seconds: float) -> None:
        """Wait for a call to end, for one of `ends`, or for some seconds."""
        if self._news.is_set():
            self._news.clear()
            return
        news = asyncio.ensure_future(self._news.wait())
        try:
            await asyncio.wait({news, *ends}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            news.cancel()
        self._news.clear()

    def take(self) -> list[RolloutTurn]:
        new, self._taken = self.generations[self._taken :], len(self.generations)
        return [self._turn(generation) for generation in new]

    def _turn(self, generation: Generation) -> RolloutTurn:
        node = generation.node
        if node.turn is None:
            return RolloutTurn(node, [], None, _is_too_long(generation))
        return RolloutTurn(node, self._messages(node), response_of(node, node.turn))

    def _messages(self, node: Node) -> Messages:
        system = as_messages(render_messages(replace(node.request, messages=())))
        return [*system, *(each for message in node.request.messages for each in self._render(node, message))]

    def _render(self, node: Node, message: Message) -> Messages:
        if id(message) not in self._rendered:
            alone = replace(node.request, messages=(message,), system=())
            self._rendered[id(message)] = as_messages(render_messages(alone))
        return self._rendered[id(message)]

    def finish(self, state: State) -> None:
        """Set `completion` and `prompt` from the main conversation, the samples, and the kind of each step."""
        lineage = Lineage()
        for generation in sorted(self.generations, key=lambda each: each.node.number):
            lineage.add(generation.node)
        threads = lineage.threads()
        state["samples"], state["sample_counts"] = from_threads(threads, ("main", "sub_agent"))
        kinds = {node.number: node.kind for thread in threads for node in thread.nodes}
        steps = {step["extras"]["call"]: step for step in state["trajectory"]}
        for number, step in steps.items():
            step["extras"]["kind"] = kinds.get(number, "main")
        main = [
            node for thread in threads[:1] for node in thread.nodes if node.number in steps and node.kind != "retry"
        ]
        completion: Messages = []
        for index, node in enumerate(main):
            if index:
                completion += [each for message in node.new_messages for each in self._render(node, message)]
            completion += steps[node.number]["completion"]
        state["completion"] = completion
        if main:
            state["prompt"] = steps[main[0].number]["prompt"]


def _is_too_long(generation: Generation) -> bool:
    """Whether a call failed because its prompt exceeds the model's context."""
    text = (generation.error or "").lower()
    return generation.fault == "agent" and any(words in text for words in _TOO_LONG)


_TOO_LONG = (
    "context length",
    "context_length",
    "context window",
    "prompt is too long",
    "maximum context",
    "too many tokens",
)
