"""One call from the agent's dialect to a model that speaks another, and its answer back.

`translate` gives the request as the upstream should get it and knows how to turn the answer, whole or streamed, into
what the agent expects: its own tool names, its free-text tools, its call ids. What the upstream cannot take is left
out and listed in `edits`. `Memory` lives as long as a session and puts back what agents lose on the way: the exact
text of sampled arguments, signatures, and reasoning.

Histories become those that another dialect accepts: every call answered right after it, no other provider's parts,
plain ids. Sampling parameters are left out where the dialect has none like them. Tools get names that it accepts,
free-text tools become functions and hosted tools are left out. What one dialect alone needs is in its `adapt`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from pier.wire.contract import PARSE_ERRORS, BadRequest, parse_arguments, unwrap_custom, wrap_custom
from pier.wire.dialects import DIALECTS, Dialect
from pier.wire.turn import (
    Delta,
    DialectName,
    Edit,
    Media,
    Message,
    Opaque,
    Part,
    PartDelta,
    PartEnd,
    PartStart,
    Reasoning,
    Request,
    Sampling,
    Text,
    Tool,
    ToolCall,
    ToolChoice,
    ToolResult,
    Turn,
)

_GOOD_ID = re.compile(r"[A-Za-z0-9_-]{1,40}")


def drop_foreign(messages: Iterable[Message], target: str, edits: list[Edit]) -> tuple[Message, ...]:
    """Without reasoning, files and special parts that only another provider could read."""
    kept: list[Message] = []
    dropped: set[str] = set()
    for message in messages:
        parts: list[Part] = []
        for part in message.parts:
            reason = _foreign(part, target)
            if reason:
                dropped.add(reason)
            elif isinstance(part, ToolResult):
                inner = tuple(piece for piece in part.parts if not _foreign(piece, target))
                parts.append(replace(part, parts=inner))
            else:
                parts.append(part)
        if parts or not message.parts:
            kept.append(Message(message.role, tuple(parts)))
    edits.extend(Edit("removed", what, f"{target} cannot read it") for what in sorted(dropped))
    return tuple(kept)


def _foreign(part: Part, target: str) -> str | None:
    match part:
        case Reasoning(origin=origin) if origin != target:
            return f"reasoning of {origin or 'unknown origin'}"
        case Opaque(dialect=dialect, value=value) if dialect != target:
            return f"{dialect} part {value.get('type', '')}".rstrip()
        case Media(file_id=str()):
            return "file kept at another provider"
        case _:
            return None


def answer_calls(messages: Iterable[Message], edits: list[Edit]) -> tuple[Message, ...]:
    """Each message with calls is followed at once by one with their results, in the order of the calls.

    Results that came later move up, missing ones are filled in empty, and results of calls that are no longer in the
    history become text.
    """
    listed = list(messages)
    results = {part.call_id: part for message in listed for part in message.parts if isinstance(part, ToolResult)}
    asked = {part.id for message in listed for part in message.parts if isinstance(part, ToolCall)}
    answered: list[Message] = []
    for position, message in enumerate(listed):
        others: list[Part] = []
        for part in message.parts:
            if not isinstance(part, ToolResult):
                others.append(part)
            elif part.call_id not in asked:
                why = "its call is not in the history; given as text"
                edits.append(Edit("changed", f"result of {part.call_id}", why))
                others.append(Text("".join(piece.text for piece in part.parts if isinstance(piece, Text))))
        if others or not message.parts:
            answered.append(Message(message.role, tuple(others)))
        calls = [part for part in message.parts if isinstance(part, ToolCall)]
        if calls and not (position == len(listed) - 1 and message.role == "assistant"):
            for call in calls:
                if call.id not in results:
                    why = "it has no result in the history; given an empty one"
                    edits.append(Edit("changed", f"call {call.id}", why))
            found = (results.get(call.id) or ToolResult(call.id, (), name=call.name) for call in calls)
            answered.append(Message("user", tuple(found)))
    return tuple(answered)


def safe_ids(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Ids that every provider takes; the same id always becomes the same one."""
    safe: list[Message] = []
    for message in messages:
        parts: list[Part] = []
        for part in message.parts:
            match part:
                case ToolCall(id=id_) if not _GOOD_ID.fullmatch(id_):
                    parts.append(replace(part, id=_short(id_)))
                case ToolResult(call_id=id_) if not _GOOD_ID.fullmatch(id_):
                    parts.append(replace(part, call_id=_short(id_)))
                case _:
                    parts.append(part)
        safe.append(Message(message.role, tuple(parts)))
    return tuple(safe)


def _short(id_: str) -> str:
    return "call_" + blake2b(id_.encode(errors="surrogatepass"), digest_size=12).hexdigest()


_BUDGETS = {"none": 0, "minimal": 1024, "low": 2048, "medium": 8192, "high": 16_384, "xhigh": 32_000, "max": 32_000}


def drop_sampling(request: Request, asked: Sampling, target: Dialect, edits: list[Edit]) -> Request:
    """A request without parameters that the target does not know."""
    fitted, blank = request.sampling, Sampling()
    for name in target.unknown_sampling:
        is_reasoning = name in ("effort", "thinking_budget")
        if getattr(asked, name) != getattr(blank, name) and not is_reasoning:
            edits.append(Edit("removed", name, f"{target.name} has no such parameter"))
        fitted = replace(fitted, **{name: getattr(blank, name)})
    return replace(request, sampling=fitted)


def fit_thinking(sampling: Sampling) -> Sampling:
    """How much to think both as an effort and as a budget: dialects know the one or the other."""
    effort, budget = sampling.effort, sampling.thinking_budget
    if effort:
        budget = _BUDGETS.get(effort) if budget is None else budget
        effort = {"xhigh": "high", "max": "high"}.get(effort, effort)
    elif budget and budget > 0:
        effort = "low" if budget <= 2048 else "medium" if budget <= 8192 else "high"
    return replace(sampling, effort=effort, thinking_budget=budget)


_GOOD_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")


class ToolNames:
    """Tool names that the upstream takes, both ways. A name that is fine already stays as it is."""

    def __init__(self, tools: Iterable[Tool], target: Dialect) -> None:
        self._keeps_custom = target.custom_tools
        self._inward: dict[str, Tool] = {}
        self._outward: dict[tuple[str | None, str], str] = {}
        self._latest: dict[str, str] = {}
        """What a name became when it was last given, so that many tools of one name take linear time."""
        self.tools = tuple(self._rename(tool) for tool in tools)

    def _rename(self, tool: Tool) -> Tool:
        if tool.kind == "hosted":
            return tool
        space = None if self._keeps_custom else tool.namespace
        plain = f"{space}__{tool.name}" if space else tool.name
        name = self._unique(plain)
        self._inward[name] = tool
        self._outward[(tool.namespace, tool.name)] = name
        renamed = replace(tool, name=name, namespace=tool.namespace if self._keeps_custom else None)
        return renamed if tool.kind == "function" or self._keeps_custom else _as_function(renamed)

    def _unique(self, name: str) -> str:
        first = name if _GOOD_NAME.fullmatch(name) else _mangled(name)
        good = self._latest.get(first, first)
        while good in self._inward and not self._keeps_custom:
            good = _mangled(good + "_")
        self._latest[first] = good
        return good

    def choice(self, name: str | None) -> str | None:
        """The upstream's name for what a tool choice names; None if it is not on offer."""
        return next((new for (_, old), new in self._outward.items() if old == name), None)

    def outward(self, call: ToolCall) -> ToolCall:
        plain = f"{call.namespace}__{call.name}" if call.namespace else call.name
        good = plain if _GOOD_NAME.fullmatch(plain) else _mangled(plain)
        name = self._outward.get((call.namespace, call.name)) or good
        if self._keeps_custom:
            return replace(call, name=name if call.namespace is None else call.name)
        if call.custom:
            return replace(call, name=name, namespace=None, custom=False, arguments=wrap_custom(call.arguments))
        return replace(call, name=name, namespace=None)

    def inward(self, call: ToolCall) -> ToolCall:
        """A call under the agent's own name; a free-text tool is marked so."""
        tool = self._inward.get(call.name)
        if tool is None:
            return call
        return replace(call, name=tool.name, namespace=tool.namespace, custom=tool.kind == "custom")


def _mangled(name: str) -> str:
    """A name that all dialects take, with a digest so that two names never become one."""
    digest = blake2b(name.encode(errors="surrogatepass"), digest_size=4).hexdigest()
    clean = re.sub(r"[^A-Za-z0-9_-]", "_", name)
    lead = "" if clean[:1].isalpha() or clean.startswith("_") else "_"
    return f"{lead}{clean}"[:55] + "_" + digest


def _as_function(tool: Tool) -> Tool:
    grammar = (tool.raw or {}).get("format") or ((tool.raw or {}).get("custom") or {}).get("format") or {}
    rule = grammar.get("definition") or (grammar.get("grammar") or {}).get("definition")
    text = "The whole input, as plain text." + (f" It must follow this grammar:\n{rule}" if rule else "")
    schema = {
        "type": "object",
        "properties": {"input": {"type": "string", "description": text}},
        "required": ["input"],
        "additionalProperties": False,
    }
    return replace(tool, kind="function", schema=schema, raw=None)


def fit_tools(request: Request, source: Dialect | None, target: Dialect, edits: list[Edit]) -> list[Tool]:
    """The tools that `target` can be offered."""
    tools: list[Tool] = []
    for tool in request.tools:
        if tool.kind != "hosted" or request.dialect == target.name:
            tools.append(tool)
        elif known := source.as_function(tool) if source else None:
            tools.append(known)
            edits.append(Edit("changed", f"tool {tool.name}", f"given to {target.name} as a function"))
        else:
            why = f"it runs at the provider, and {target.name} has none such"
            edits.append(Edit("removed", f"tool {tool.name}", why))
    return tools


def fit_choice(request: Request, names: ToolNames, edits: list[Edit]) -> ToolChoice | None:
    """The choice that still makes sense: none without tools, and none for a tool that is gone."""
    choice = request.tool_choice
    if choice is None:
        return None
    if not names.tools:
        edits.append(Edit("removed", "tool_choice", "there are no tools to choose from"))
        return None
    if choice.mode != "tool":
        return choice
    name = names.choice(choice.name)
    if name is None:
        edits.append(Edit("removed", "tool_choice", f"the tool {choice.name!r} is not on offer"))
        return None
    return ToolChoice("tool", name)


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
        parts = self.as_sampled(message).parts
        first = next((part for part in parts if isinstance(part, ToolCall)), None)
        known = self._reasoning.get(first.id, ()) if first else ()
        if any(isinstance(part, Reasoning) and part.origin == dialect for part in parts):
            known = ()
        return Message(message.role, (*(part for part in known if part.origin == dialect), *parts))

    def as_sampled(self, message: Message) -> Message:
        """An assistant message with the arguments of its calls as sampled."""
        parts = tuple(self._sampled(part) if isinstance(part, ToolCall) else part for part in message.parts)
        return Message(message.role, parts)

    def arguments(self, id_: str, written: str) -> str:
        """The arguments of a call as sampled, if what is written says the same."""
        return self._sampled(ToolCall(id_, "", written)).arguments

    def _sampled(self, call: ToolCall) -> ToolCall:
        known = self._calls.get(call.id)
        if known is None or parse_arguments(known.arguments) != parse_arguments(call.arguments):
            return call
        return replace(call, arguments=known.arguments, signature=known.signature or call.signature)


class Translation:
    """A call on its way through: `request` for the upstream, `turn` and `delta` for the way back."""

    def __init__(self, dialect: Dialect, request: Request, names: ToolNames, edits: list[Edit], memory: Memory) -> None:
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


def translate(request: Request, target: DialectName, model: str, memory: Memory | None = None) -> Translation:
    """`request` for `model` at an upstream that speaks the dialect `target`. `BadRequest` if a part of it that no
    dialect checks, such as the grammar of a tool, is not what it should be."""
    try:
        return _translate(request, target, model, memory if memory is not None else Memory())
    except PARSE_ERRORS as error:
        raise BadRequest(f"cannot express the request in the {target} dialect: {error}") from error


def _translate(request: Request, target: DialectName, model: str, memory: Memory) -> Translation:
    edits: list[Edit] = []
    source, upstream = DIALECTS.get(request.dialect or ""), DIALECTS[target]
    foreign, system = request.dialect != target, request.system
    if foreign and source:
        private = [source.private_system(text) for text in system]
        system = tuple(text for text, why in zip(system, private, strict=True) if not why)
        edits.extend(Edit("removed", "system block", why) for why in private if why)
    names = ToolNames(fit_tools(request, source, upstream, edits), upstream)
    fitted = replace(
        request,
        model=model,
        system=system,
        messages=_fit_messages(request.messages, names, upstream, memory, edits),
        tools=names.tools,
        tool_choice=fit_choice(request, names, edits),
        parallel_tools=request.parallel_tools if names.tools and upstream.parallel_tools else None,
        stream_usage=True,
        dialect=target,
        extra={} if foreign else request.extra,
    )
    if not foreign:
        return Translation(upstream, upstream.adapt(fitted, foreign=False, edits=edits), names, edits, memory)
    if request.extra:
        edits.append(Edit("removed", f"fields {', '.join(sorted(request.extra))}", f"{target} does not know them"))
    fitted = replace(fitted, sampling=fit_thinking(fitted.sampling))
    fitted = upstream.adapt(fitted, foreign=True, edits=edits)
    return Translation(upstream, drop_sampling(fitted, request.sampling, upstream, edits), names, edits, memory)


def _fit_messages(
    messages: Iterable[Message], names: ToolNames, target: Dialect, memory: Memory, edits: list[Edit]
) -> tuple[Message, ...]:
    """A history that `target` accepts, with calls and reasoning as its models sampled them."""
    renamed = (_outward(message, names, target) for message in messages)
    restored = [memory.restore(message, target.name) if message.role == "assistant" else message for message in renamed]
    fitted = safe_ids(answer_calls(drop_foreign(restored, target.name, edits), edits))
    if target.system_anywhere:
        return fitted
    return tuple(replace(message, role="user") if message.role == "system" else message for message in fitted)


def _outward(message: Message, names: ToolNames, target: Dialect) -> Message:
    parts: list[Part] = []
    for part in message.parts:
        match part:
            case ToolCall():
                parts.append(names.outward(part))
            case ToolResult(custom=True) if not target.custom_tools:
                parts.append(replace(part, custom=False))
            case _:
                parts.append(part)
    return Message(message.role, tuple(parts))
