"""Translation of a call from the agent's dialect to an upstream's, and of its answer back.

`translate` returns the request for the upstream, and converts the answer, whole or streamed, to what the agent expects:
its own tool names, free-text tools and call ids. Features that the upstream does not support are removed and listed in
`edits`. `Memory` lasts as long as a session and restores what agents lose: the exact text of sampled arguments,
signatures, and reasoning.

Histories are converted to what other dialects accept: each call is followed by its result, parts of other providers are
removed, ids are plain. Sampling parameters without an equivalent are removed. Tools get valid names, free-text tools
become functions and hosted tools are removed. Adaptations for a single dialect are in its `adapt`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

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
    Role,
    Sampling,
    Text,
    Tool,
    ToolCall,
    ToolChoice,
    ToolResult,
    Turn,
)
from pier.wire.values import PARSE_ERRORS, BadRequest, parse_arguments, unwrap_custom, wrap_custom

_VALID_ID = re.compile(r"[A-Za-z0-9_-]{1,40}")


def drop_foreign(messages: Iterable[Message], target: str, edits: list[Edit]) -> tuple[Message, ...]:
    """Remove reasoning, files and special parts that only another provider can read."""
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
    """Place the results of calls directly after the message with the calls, in the same order.

    Missing results become empty ones, and results of calls that are no longer in the history become text.
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
                why = "its call is not in the history; converted to text"
                edits.append(Edit("changed", f"result of {part.call_id}", why))
                others.append(Text("".join(piece.text for piece in part.parts if isinstance(piece, Text))))
        if others or not message.parts:
            answered.append(Message(message.role, tuple(others)))
        calls = [part for part in message.parts if isinstance(part, ToolCall)]
        if calls and not (position == len(listed) - 1 and message.role == "assistant"):
            for call in calls:
                if call.id not in results:
                    why = "it has no result in the history; added an empty one"
                    edits.append(Edit("changed", f"call {call.id}", why))
            found = (results.get(call.id) or ToolResult(call.id, (), name=call.name) for call in calls)
            answered.append(Message("user", tuple(found)))
    return tuple(answered)


def _with_valid_id(part: Part) -> Part:
    """The part with an id that every provider accepts; equal ids stay equal."""
    match part:
        case ToolCall(id=id_) if not _VALID_ID.fullmatch(id_):
            return replace(part, id=_short(id_))
        case ToolResult(call_id=id_) if not _VALID_ID.fullmatch(id_):
            return replace(part, call_id=_short(id_))
        case _:
            return part


def _short(id_: str) -> str:
    return "call_" + blake2b(id_.encode(errors="surrogatepass"), digest_size=12).hexdigest()


_BUDGETS = {"none": 0, "minimal": 1024, "low": 2048, "medium": 8192, "high": 16_384, "xhigh": 32_000, "max": 32_000}


def drop_sampling(request: Request, asked: Sampling, target: Dialect, edits: list[Edit]) -> Request:
    """Remove parameters that the target does not have."""
    fitted, blank = request.sampling, Sampling()
    for name in target.unknown_sampling:
        is_reasoning = name in ("effort", "thinking_budget")
        if getattr(asked, name) != getattr(blank, name) and not is_reasoning:
            edits.append(Edit("removed", name, f"{target.name} has no such parameter"))
        fitted = replace(fitted, **{name: getattr(blank, name)})
    return replace(request, sampling=fitted)


def fit_thinking(sampling: Sampling) -> Sampling:
    """Express the amount of reasoning both as an effort and as a budget: a dialect has only one of them."""
    effort, budget = sampling.effort, sampling.thinking_budget
    if effort:
        budget = _BUDGETS.get(effort) if budget is None else budget
        effort = {"xhigh": "high", "max": "high"}.get(effort, effort)
    elif budget and budget > 0:
        effort = "low" if budget <= 2048 else "medium" if budget <= 8192 else "high"
    return replace(sampling, effort=effort, thinking_budget=budget)


_VALID_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")


class ToolNames:
    """Maps tool names to ones that the upstream accepts, and back. Valid names are kept."""

    def __init__(self, tools: Iterable[Tool], target: Dialect) -> None:
        self._keeps_custom = target.custom_tools
        self._inward: dict[str, Tool] = {}
        self._outward: dict[tuple[str | None, str], str] = {}
        self._latest: dict[str, str] = {}
        """The last name given to tools of a name, so that many tools of the same name take linear time."""
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
        first = name if _VALID_NAME.fullmatch(name) else _mangled(name)
        valid = self._latest.get(first, first)
        while valid in self._inward and not self._keeps_custom:
            valid = _mangled(valid + "_")
        self._latest[first] = valid
        return valid

    def choice(self, name: str | None) -> str | None:
        """The upstream's name for the tool of a tool choice; None if there is no such tool."""
        return next((new for (_, old), new in self._outward.items() if old == name), None)

    def outward(self, call: ToolCall) -> ToolCall:
        plain = f"{call.namespace}__{call.name}" if call.namespace else call.name
        name = self._outward.get((call.namespace, call.name))
        name = name or (plain if _VALID_NAME.fullmatch(plain) else _mangled(plain))
        if self._keeps_custom:
            return replace(call, name=name if call.namespace is None else call.name)
        if call.custom:
            return replace(call, name=name, namespace=None, custom=False, arguments=wrap_custom(call.arguments))
        return replace(call, name=name, namespace=None)

    def inward(self, call: ToolCall) -> ToolCall:
        """A call with the agent's name for the tool; `custom` is set if that takes free text."""
        tool = self._inward.get(call.name)
        if tool is None:
            return call
        return replace(call, name=tool.name, namespace=tool.namespace, custom=tool.kind == "custom")


def _mangled(name: str) -> str:
    """A name that all dialects accept, with a digest so that different names stay different."""
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
    """The tools that `target` supports."""
    tools: list[Tool] = []
    for tool in request.tools:
        if tool.kind != "hosted" or request.dialect == target.name:
            tools.append(tool)
        elif known := source.as_function(tool) if source else None:
            tools.append(known)
            edits.append(Edit("changed", f"tool {tool.name}", f"converted to a function for {target.name}"))
        else:
            why = f"it runs at the provider, and {target.name} has no such tool"
            edits.append(Edit("removed", f"tool {tool.name}", why))
    return tools


def fit_choice(request: Request, names: ToolNames, edits: list[Edit]) -> ToolChoice | None:
    """The tool choice unless it refers to removed tools."""
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
        edits.append(Edit("removed", "tool_choice", f"there is no tool {choice.name!r}"))
        return None
    return ToolChoice("tool", name)


@dataclass
class Memory:
    """Sampled calls and reasoning of a session, by call id, with the upstream's names."""

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
        """The arguments of a call as sampled, if they equal those written by the client."""
        return self._sampled(ToolCall(id_, "", written)).arguments

    def _sampled(self, call: ToolCall) -> ToolCall:
        known = self._calls.get(call.id)
        if known is None or parse_arguments(known.arguments) != parse_arguments(call.arguments):
            return call
        return replace(call, arguments=known.arguments, signature=known.signature or call.signature)


class Translation:
    """A translated call: `request` for the upstream, `turn` and `delta` to convert its answer."""

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
        """Convert the upstream's answer for the agent, and remember it for the next call."""
        self._memory.remember(turn)
        return replace(turn, parts=tuple(self._inward(part) for part in turn.parts))

    def _inward(self, part: Part) -> Part:
        if not isinstance(part, ToolCall):
            return part
        call = self._names.inward(part)
        return replace(call, arguments=unwrap_custom(call.arguments)) if call.custom and not part.custom else call

    def delta(self, delta: Delta) -> Iterator[Delta]:
        """Convert a delta of a stream. Pass the whole turn to `remember` once it has ended."""
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
        """Remember a streamed turn of the upstream for the next call."""
        self._memory.remember(turn)


def translate(request: Request, target: DialectName, model: str, memory: Memory | None = None) -> Translation:
    """Translate `request` for `model` at an upstream of the dialect `target`. `BadRequest` if a part that no dialect
    checks, such as the grammar of a tool, is invalid."""
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
        edits.append(Edit("removed", f"fields {', '.join(sorted(request.extra))}", f"unknown in {target}"))
    fitted = replace(fitted, sampling=fit_thinking(fitted.sampling))
    fitted = upstream.adapt(fitted, foreign=True, edits=edits)
    return Translation(upstream, drop_sampling(fitted, request.sampling, upstream, edits), names, edits, memory)


def _fit_messages(
    messages: Iterable[Message], names: ToolNames, target: Dialect, memory: Memory, edits: list[Edit]
) -> tuple[Message, ...]:
    """A history that `target` accepts, with calls and reasoning as its models sampled them."""

    def outward(part: Part) -> Part:
        if isinstance(part, ToolResult) and part.custom and not target.custom_tools:
            return replace(part, custom=False)
        return names.outward(part) if isinstance(part, ToolCall) else part

    renamed = (Message(each.role, tuple(map(outward, each.parts))) for each in messages)
    restored = [memory.restore(each, target.name) if each.role == "assistant" else each for each in renamed]
    answered = answer_calls(drop_foreign(restored, target.name, edits), edits)
    roles: dict[Role, Role] = {} if target.system_anywhere else {"system": "user"}
    return tuple(Message(roles.get(each.role, each.role), tuple(map(_with_valid_id, each.parts))) for each in answered)
