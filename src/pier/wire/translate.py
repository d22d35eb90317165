"""One call from the agent's dialect to a model that speaks another, and its answer back.

`translate` gives the request as the upstream should get it and knows how to turn the answer, whole or streamed, into
what the agent expects: its own tool names, its free-text tools, its call ids. What the upstream cannot take is left
out and listed in `edits`. `Memory` lives as long as a session and puts back what agents lose on the way: the exact
text of sampled arguments, signatures, and reasoning.

Histories that another dialect accepts: every call answered right after it, no stranger's parts, plain ids.

Sampling parameters on their way to another dialect: renamed where there is a like one, left out where not.

Tools on their way to another dialect: names it accepts, free-text tools as functions, hosted tools left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from pier.wire.anthropic import DEFAULT_MAX_TOKENS
from pier.wire.contract import parse_arguments, unwrap_custom, wrap_custom
from pier.wire.dialects import DIALECTS, Dialect
from pier.wire.turn import (
    Delta,
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


def mend(messages: Iterable[Message], edits: list[Edit]) -> tuple[Message, ...]:
    """Each message with calls is followed at once by one with their results, in the order of the calls.

    Results that came later move up, missing ones are filled in empty, and results of calls that are no longer in the
    history become text.
    """
    listed = list(messages)
    results = {part.call_id: part for message in listed for part in message.parts if isinstance(part, ToolResult)}
    asked = {part.id for message in listed for part in message.parts if isinstance(part, ToolCall)}
    mended: list[Message] = []
    for position, message in enumerate(listed):
        others = tuple(_orphan(part, asked, edits) for part in message.parts if not _answered(part, asked))
        if others or not message.parts:
            mended.append(Message(message.role, others))
        calls = [part for part in message.parts if isinstance(part, ToolCall)]
        if not calls or (position == len(listed) - 1 and message.role == "assistant"):
            continue
        found = tuple(results.get(call.id) or _unanswered(call, edits) for call in calls)
        mended.append(Message("user", found))
    return tuple(mended)


def _answered(part: Part, asked: set[str]) -> bool:
    return isinstance(part, ToolResult) and part.call_id in asked


def _orphan(part: Part, asked: set[str], edits: list[Edit]) -> Part:
    if not isinstance(part, ToolResult):
        return part
    edits.append(Edit("changed", f"result of {part.call_id}", "its call is not in the history; given as text"))
    return Text("".join(piece.text for piece in part.parts if isinstance(piece, Text)))


def _unanswered(call: ToolCall, edits: list[Edit]) -> ToolResult:
    edits.append(Edit("changed", f"call {call.id}", "it has no result in the history; given an empty one"))
    return ToolResult(call.id, (), name=call.name)


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


def move_system(messages: Iterable[Message]) -> tuple[Message, ...]:
    """System messages in mid-history in the user's name, for dialects that have them at the start only."""
    return tuple(replace(message, role="user") if message.role == "system" else message for message in messages)


_BUDGETS = {"none": 0, "minimal": 1024, "low": 2048, "medium": 8192, "high": 16_384, "xhigh": 32_000, "max": 32_000}
_GEMINI_THINKS = re.compile(r"gemini-(2\.5|[3-9])")
_UNKNOWN = {
    "chat": ("top_k", "thinking_budget"),
    "responses": ("top_k", "thinking_budget", "stop", "seed", "presence_penalty", "frequency_penalty", "logprobs"),
    "anthropic": ("effort", "seed", "presence_penalty", "frequency_penalty", "logprobs", "top_logprobs"),
    "gemini": ("effort",),
}


def fit_sampling(request: Request, edits: list[Edit]) -> Request:
    """A request whose sampling the target, its `dialect`, understands."""
    target = request.dialect or "chat"
    sampling = request.sampling
    fitted = replace(sampling, effort=_effort(sampling), thinking_budget=_budget(sampling))
    if target == "anthropic":
        fitted = _for_anthropic(request, fitted, edits)
    if target == "gemini":
        return _for_gemini(request, _without(fitted, target, edits, sampling))
    return replace(request, sampling=_without(fitted, target, edits, sampling))


def _without(fitted: Sampling, target: str, edits: list[Edit], asked: Sampling) -> Sampling:
    blank = Sampling()
    for name in _UNKNOWN[target]:
        is_reasoning = name in ("effort", "thinking_budget")
        if getattr(asked, name) != getattr(blank, name) and not is_reasoning:
            edits.append(Edit("removed", name, f"{target} has no such parameter"))
        fitted = replace(fitted, **{name: getattr(blank, name)})
    return fitted


def _effort(sampling: Sampling) -> str | None:
    if sampling.effort:
        return {"xhigh": "high", "max": "high"}.get(sampling.effort, sampling.effort)
    budget = sampling.thinking_budget
    if budget is None or budget <= 0:
        return None
    return "low" if budget <= 2048 else "medium" if budget <= 8192 else "high"


def _budget(sampling: Sampling) -> int | None:
    if sampling.thinking_budget is not None:
        return sampling.thinking_budget
    return _BUDGETS.get(sampling.effort) if sampling.effort else None


def _for_anthropic(request: Request, sampling: Sampling, edits: list[Edit]) -> Sampling:
    budget = sampling.thinking_budget
    forced = request.tool_choice is not None and request.tool_choice.mode in ("any", "tool")
    if budget is not None and (budget <= 0 or forced or not _can_think(request.messages)):
        if budget > 0:
            edits.append(Edit("removed", "thinking", "the history holds calls without Anthropic's own reasoning"))
        budget = None
    limit = sampling.max_tokens or DEFAULT_MAX_TOKENS
    if budget:
        budget = max(budget, 1024)
        limit = limit if limit > budget else limit + budget
        return replace(sampling, thinking_budget=budget, max_tokens=limit, temperature=None, top_k=None, top_p=None)
    temperature = None if sampling.temperature is None else min(sampling.temperature, 1.0)
    top_p = sampling.top_p if temperature is None else None
    return replace(sampling, thinking_budget=None, max_tokens=limit, temperature=temperature, top_p=top_p)


def _can_think(messages: tuple[Message, ...]) -> bool:
    """Anthropic wants the reasoning of a tool loop back; a loop that began without it must go on without it."""
    for message in reversed(messages):
        if message.role == "assistant" and any(isinstance(part, ToolCall) for part in message.parts):
            return any(isinstance(part, Reasoning) for part in message.parts)
    return True


def _for_gemini(request: Request, sampling: Sampling) -> Request:
    if not _GEMINI_THINKS.search(request.model):
        return replace(request, sampling=replace(sampling, thinking_budget=None))
    if sampling.thinking_budget is None or sampling.thinking_budget == 0:
        return replace(request, sampling=sampling)
    extra = {"generationConfig": {"thinkingConfig": {"includeThoughts": True}}}
    return replace(request, sampling=sampling, extra=extra)


_GOOD_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")

_STRING = {"type": "string"}
_CLIENT_SIDE: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "bash": (
        "Run a command in a persistent bash session.",
        {"command": _STRING, "restart": {"type": "boolean"}},
        [],
    ),
    "text_editor": (
        "View, create and edit files. Commands: view, create, str_replace, insert.",
        {
            "command": {"type": "string", "enum": ["view", "create", "str_replace", "insert"]},
            "path": _STRING,
            "file_text": _STRING,
            "old_str": _STRING,
            "new_str": _STRING,
            "insert_line": {"type": "integer"},
            "insert_text": _STRING,
            "view_range": {"type": "array", "items": {"type": "integer"}},
        },
        ["command", "path"],
    ),
}
"""Typed tools of Anthropic that the agent itself runs: other models get them as plain functions."""


class ToolNames:
    """Tool names that the upstream takes, both ways. A name that is fine already stays as it is."""

    def __init__(self, tools: Iterable[Tool], target: str) -> None:
        self._keeps_spaces = target == "responses"
        self._keeps_custom = target == "responses"
        self._inward: dict[str, Tool] = {}
        self._outward: dict[tuple[str | None, str], str] = {}
        self.tools = tuple(self._rename(tool) for tool in tools)

    def _rename(self, tool: Tool) -> Tool:
        if tool.kind == "hosted":
            return tool
        space = None if self._keeps_spaces else tool.namespace
        plain = f"{space}__{tool.name}" if space else tool.name
        name = self._unique(plain)
        self._inward[name] = tool
        self._outward[(tool.namespace, tool.name)] = name
        renamed = replace(tool, name=name, namespace=tool.namespace if self._keeps_spaces else None)
        return renamed if tool.kind == "function" or self._keeps_custom else _as_function(renamed)

    def _unique(self, name: str) -> str:
        good = name if _GOOD_NAME.fullmatch(name) else _mangled(name)
        while good in self._inward and not self._keeps_spaces:
            good = _mangled(good + "_")
        return good

    def choice(self, name: str | None) -> str | None:
        """The upstream's name for what a tool choice names; None if it is not on offer."""
        return next((new for (_, old), new in self._outward.items() if old == name), None)

    def outward(self, call: ToolCall) -> ToolCall:
        plain = f"{call.namespace}__{call.name}" if call.namespace else call.name
        name = self._outward.get((call.namespace, call.name)) or (
            plain if _GOOD_NAME.fullmatch(plain) else _mangled(plain)
        )
        if self._keeps_spaces:
            return replace(call, name=name if call.namespace is None else call.name)
        if call.custom and not self._keeps_custom:
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


def fit_tools(request: Request, target: str, edits: list[Edit]) -> list[Tool]:
    """The tools that `target` can be offered."""
    if request.dialect == target:
        return list(request.tools)
    tools: list[Tool] = []
    for tool in request.tools:
        if tool.kind != "hosted":
            # Responses takes tools as strict unless told otherwise, and then refuses most schemas.
            loose = target == "responses" and tool.strict is None and tool.kind == "function"
            tools.append(replace(tool, strict=False) if loose else tool)
        elif known := _client_side(tool):
            tools.append(known)
            edits.append(Edit("changed", f"tool {tool.name}", f"given to {target} as a function"))
        else:
            edits.append(Edit("removed", f"tool {tool.name}", f"it runs at the provider, and {target} has none such"))
    return tools


def _client_side(tool: Tool) -> Tool | None:
    kind = re.sub(r"_\d{8}$", "", str((tool.raw or {}).get("type")))
    if kind not in _CLIENT_SIDE:
        return None
    description, properties, required = _CLIENT_SIDE[kind]
    return Tool(tool.name, description, {"type": "object", "properties": properties, "required": required})


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


def translate(request: Request, target: str, model: str, memory: Memory | None = None) -> Translation:
    """`request` for `model` at an upstream that speaks the dialect `target`."""
    memory = memory if memory is not None else Memory()
    edits: list[Edit] = []
    system = request.system
    if target != "anthropic" and any(text.startswith(BILLING) for text in system):
        system = tuple(text for text in system if not text.startswith(BILLING))
        edits.append(Edit("removed", "system block", "the billing line of Claude Code is for Anthropic only"))
    tools = fit_tools(request, target, edits)
    names = ToolNames(tools, target)
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


def _outward(message: Message, names: ToolNames, target: str) -> Message:
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
