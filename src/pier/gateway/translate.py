"""One call from the agent's dialect to a model that speaks another, and its answer back.

`translate` gives the request as the upstream should get it and knows how to turn the answer, whole or streamed, into
what the agent expects: its own tool names, its free-text tools, its call ids. What the upstream cannot take is left
out and listed in `edits`. `Memory` lives as long as a session and puts back what agents lose on the way: the exact
text of sampled arguments, signatures, and reasoning.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from pier.gateway.canonical import (
    Delta,
    Edit,
    Message,
    Part,
    PartDelta,
    PartEnd,
    PartStart,
    Reasoning,
    Request,
    ToolCall,
    ToolResult,
    Turn,
)
from pier.gateway.dialect import DIALECTS, Dialect
from pier.gateway.dialect.shared import parse_arguments, unwrap_custom
from pier.gateway.translate_history import drop_foreign, mend, move_system, safe_ids
from pier.gateway.translate_sampling import fit_sampling
from pier.gateway.translate_tools import Names, fit_choice, fit_tools

BILLING = "x-anthropic-billing-header:"
"""Claude Code's first system block changes with every call; it means nothing to others and spoils their caches."""

_REASONS = re.compile(r"(^|/)(o\d|codex|gpt-([5-9]|\d\d)(?!.*chat))")
"""Models of OpenAI that reason without being asked to. Others refuse to encrypt what they do not have."""

_FILLER = "skip_thought_signature_validator"
"""What Google takes in place of a signature for calls that its model did not make."""


@dataclass
class Memory:
    """What a session's upstream sampled, by call id, in the upstream's own terms."""

    _calls: dict[str, ToolCall] = field(default_factory=dict)
    _reasoning: dict[str, tuple[Reasoning, ...]] = field(default_factory=dict)

    def remember(self, turn: Turn) -> None:
        calls = turn.calls
        for call in calls:
            self._calls[call.id] = call
        thoughts = tuple(part for part in turn.parts if isinstance(part, Reasoning))
        if calls and thoughts:
            self._reasoning[calls[0].id] = thoughts

    def restore(self, message: Message, dialect: str) -> Message:
        """An assistant message with the arguments as sampled and the reasoning that led to them."""
        parts = tuple(self._sampled(part) if isinstance(part, ToolCall) else part for part in message.parts)
        first = next((part for part in parts if isinstance(part, ToolCall)), None)
        known = self._reasoning.get(first.id, ()) if first else ()
        if any(isinstance(part, Reasoning) and part.origin == dialect for part in parts):
            known = ()
        return Message(message.role, (*(part for part in known if part.origin == dialect), *parts))

    def arguments(self, id_: str, written: str) -> str:
        """The arguments of a call as sampled, if what is written says the same."""
        known = self._calls.get(id_)
        same = known is not None and parse_arguments(known.arguments) == parse_arguments(written)
        return known.arguments if known is not None and same else written

    def _sampled(self, call: ToolCall) -> ToolCall:
        known = self._calls.get(call.id)
        if known is None or parse_arguments(known.arguments) != parse_arguments(call.arguments):
            return call
        return replace(call, arguments=known.arguments, signature=known.signature or call.signature)


class Translation:
    """A call on its way through: `request` for the upstream, `turn` and `delta` for the way back."""

    def __init__(self, dialect: Dialect, request: Request, names: Names, edits: list[Edit], memory: Memory) -> None:
        self.dialect = dialect
        self.request = request
        self.edits = edits
        self._names = names
        self._memory = memory
        self._held: dict[int, list[str]] = {}

    @property
    def body(self) -> dict[str, Any]:
        return self.dialect.render_request(self.request)

    @property
    def path(self) -> str:
        return self.dialect.request_path(self.request)

    def turn(self, turn: Turn) -> Turn:
        """The upstream's answer as the agent should see it; remembered for the next call."""
        self._memory.remember(turn)
        return replace(turn, parts=tuple(self._inward(part) for part in turn.parts))

    def _inward(self, part: Part) -> Part:
        if not isinstance(part, ToolCall):
            return part
        call = self._names.inward(part)
        return replace(call, arguments=unwrap_custom(call.arguments)) if call.custom and not part.custom else call

    def delta(self, delta: Delta) -> Iterator[Delta]:
        """The same for a stream. The whole turn must be given to `remember` when it has ended."""
        match delta:
            case PartStart(index=index, part=ToolCall() as call):
                named = self._names.inward(call)
                if named.custom and not call.custom:
                    self._held[index] = [call.arguments]
                    named = replace(named, arguments="")
                yield PartStart(index, named)
            case PartDelta(index=index, text=text) if index in self._held:
                self._held[index].append(text)
            case PartEnd(index=index) if index in self._held:
                yield PartDelta(index, unwrap_custom("".join(self._held.pop(index))))
                yield delta
            case _:
                yield delta

    def remember(self, turn: Turn) -> None:
        """A turn that was streamed, as the upstream gave it."""
        self._memory.remember(turn)


def translate(request: Request, target: str, model: str, memory: Memory | None = None) -> Translation:
    """`request` for `model` at an upstream that speaks the dialect `target`."""
    memory = memory if memory is not None else Memory()
    edits: list[Edit] = []
    system = request.system
    if target != "anthropic" and any(text.startswith(BILLING) for text in system):
        system = tuple(text for text in system if not text.startswith(BILLING))
        edits.append(Edit("removed", "system block", "the billing line of Claude Code is for Anthropic only"))
    tools = fit_tools(request, target, edits)
    names = Names(tools, target)
    messages = tuple(_outward(message, names, target) for message in request.messages)
    messages = tuple(
        memory.restore(message, target) if message.role == "assistant" else message for message in messages
    )
    if target == "responses" and request.dialect != target:
        messages = tuple(_sealed(message) for message in messages)
    messages = safe_ids(mend(drop_foreign(messages, target, edits), edits))
    if target in ("anthropic", "gemini"):
        messages = move_system(messages)
    if target == "gemini" and _wants_signatures(model):
        messages = tuple(_signed(message) for message in messages)
    if request.dialect != target and request.extra:
        fields = ", ".join(sorted(request.extra))
        edits.append(Edit("removed", f"fields {fields}", f"{target} does not know them"))
    own = _stateless(model, request) if target == "responses" else {}
    fitted = replace(
        request,
        model=model,
        system=system,
        messages=messages,
        tools=names.tools,
        tool_choice=fit_choice(request, names, edits),
        parallel_tools=request.parallel_tools if names.tools and target != "gemini" else None,
        stream_usage=True,
        dialect=target,
        extra=request.extra if request.dialect == target else own,
    )
    if request.dialect != target:
        fitted = fit_sampling(fitted, edits)
    return Translation(DIALECTS[target], fitted, names, edits, memory)


def _outward(message: Message, names: Names, target: str) -> Message:
    parts: list[Part] = []
    for part in message.parts:
        match part:
            case ToolCall():
                parts.append(names.outward(part))
            case ToolResult(custom=True) if target != "responses":
                parts.append(replace(part, custom=False))
            case _:
                parts.append(part)
    return Message(message.role, tuple(parts))


def _stateless(model: str, request: Request) -> dict[str, Any]:
    """Store nothing at the provider. A model that reasons gives its reasoning encrypted instead, to be sent back."""
    asks = request.sampling.effort not in (None, "none") or (request.sampling.thinking_budget or 0) > 0
    if not asks and not _REASONS.search(model):
        return {"store": False}
    return {"store": False, "include": ["reasoning.encrypted_content"]}


def _sealed(message: Message) -> Message:
    """Without reasoning that only its id stands for: nothing is stored under it."""
    kept = tuple(part for part in message.parts if not isinstance(part, Reasoning) or part.signature)
    return message if len(kept) == len(message.parts) else Message(message.role, kept)


def _wants_signatures(model: str) -> bool:
    version = model.rpartition("gemini-")[2][:1]
    return "gemini-" in model and version.isdigit() and int(version) >= 3


def _signed(message: Message) -> Message:
    """The first call of each step must be signed."""
    for index, part in enumerate(message.parts):
        if isinstance(part, ToolCall):
            if part.signature:
                return message
            signed = replace(part, signature=_FILLER)
            return Message(message.role, (*message.parts[:index], signed, *message.parts[index + 1 :]))
    return message
