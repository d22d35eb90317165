"""Reads the model calls of a recording one by one as `Node`s: request, delivered answer, tokens and cost.

Agents rewrite the history that they send back: white space, reminders, tool arguments and cleared results change. So
the keys by which `pier.trajectory.lineage` compares calls identify tool calls and results by their ids. Other messages,
and tool calls whose ids changed, are identified by their text without the parts that clients change.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pier.record.reader import Call, RecordedAnswer, read
from pier.wire.anthropic import BILLING
from pier.wire.dialects import DIALECTS, BadRequest, BadResponse, recognise
from pier.wire.turn import (
    ErrorKind,
    Message,
    Opaque,
    Request,
    Text,
    Tokens,
    ToolCall,
    ToolResult,
    Turn,
    TurnBuilder,
    cost_of,
    joined,
)
from pier.wire.values import parse_arguments

RECENT = 8
"""Number of earlier calls searched for a shared history."""

_TOKEN_LISTS = ("prompt_ids", "completion_ids", "logprobs")
_REMINDER, _REMINDED = "<system-reminder>", "</system-reminder>"

Kind = Literal["main", "compaction", "sub_agent", "side", "foreign", "retry"]


@dataclass(eq=False, slots=True)
class Node:
    """One model call. `turn` is None unless a whole answer was delivered."""

    number: int
    request: Request
    turn: Turn | None
    at: float
    ended: float | None
    headers: dict[str, str] = field(default_factory=dict)
    kind: Kind = "main"
    parent: Node | None = None
    """The call that this one continues."""
    spawned_by: tuple[Node, str] | None = None
    """The call, and the id of its tool call, that started this thread."""
    keys: tuple[bytes, ...] = ()
    chain: tuple[bytes, ...] = ()
    """`chain[i]` is a digest of the first i messages."""
    id_chain: tuple[bytes, ...] = ()
    """The same with tool calls and results identified by their ids only."""
    cost_usd: float | None = None
    cost_source: str | None = None
    """The provider, or a price table with its version."""

    @property
    def question(self) -> tuple[bytes, bool, str]:
        """Equal for calls that repeat a request."""
        return self.chain[-1], bool(self.request.tools), self.request.model

    @property
    def new_messages(self) -> tuple[Message, ...]:
        """The messages after those of the parent and the parent's answer."""
        if self.parent is None:
            return self.request.messages
        if self.begins_like(self.parent):
            return self.request.messages[len(self.parent.keys) + 1 :]
        known = set(self.parent.keys)
        return tuple(
            message
            for message, key in zip(self.request.messages, self.keys, strict=True)
            if key not in known and message.role != "assistant"
        )

    def begins_like(self, parent: Node) -> bool:
        """Whether this call's history is the parent's history followed by an answer."""
        place = len(parent.keys)
        if len(self.keys) <= place:
            return False
        return self.chain[place] == parent.chain[-1] or self.id_chain[place] == parent.id_chain[-1]


@dataclass(frozen=True, slots=True)
class Generation:
    """A call that ended, as seen by the gateway or read from a recording. `answered` is true if the agent received
    part of an answer, or an error."""

    node: Node
    outcome: str
    status: int = 0
    error: str | None = None
    fault: str | None = None
    answered: bool = True
    kind: ErrorKind | None = None
    """The kind of error sent to the agent; only the gateway knows it."""


OnGeneration = Callable[[Generation], None]


def generations_of(recording: Path, most: int | None = None) -> list[Generation]:
    """The model calls of a recording in the order of their requests; `RecordingTooLarge` as `Reader` raises it."""
    return [
        Generation(node, call.outcome, call.status or 0, call.error, call.fault, call.answer is not None)
        for call, node in read_calls(read(recording, most).generations())
    ]


def read_calls(calls: Iterable[Call], recent: Iterable[Node] = ()) -> Iterator[tuple[Call, Node]]:
    """Yield each model call with its node; skip requests that are invalid or nested too deeply. Nodes share repeated
    messages with the few nodes before them; `recent` are those of an earlier read."""
    before = deque(recent, RECENT)
    for call in calls:
        try:
            if (node := read_call(call)) is None:
                continue
            compute_keys(node, before)
        except RecursionError:
            continue
        before.append(node)
        yield call, node


def with_version(turn: Turn, version: str | None) -> Turn:
    """Add the version of the weights to a turn's tokens, unless they have one."""
    if version is None or turn.tokens is None or turn.tokens.weights is not None:
        return turn
    return replace(turn, tokens=replace(turn.tokens, weights=version))


def read_call(call: Call) -> Node | None:
    """Return the node of a model call; None if its request is invalid."""
    parts = urlsplit(call.path)
    route = recognise("POST", parts.path, parts.query)
    try:
        parsed = DIALECTS[call.dialect].parse_request(call.request, route)
    except BadRequest:
        return None
    turn = turn_of(call, parsed)
    # The parsed body is as large as the whole history, and the node has all that is needed of it.
    call.__dict__.pop("request", None)
    headers = {name.lower(): value for name, value in call.headers.items()}
    if used := _noted(call, "sampling"):
        used = {name: tuple(value) if isinstance(value, list) else value for name, value in used.items()}
        parsed = replace(parsed, sampling=replace(parsed.sampling, **used))
    last = call.answer.chunks[-1].at if call.answer and call.answer.chunks else None
    node = Node(call.number, parsed, turn, call.at, last if call.ended is None else call.ended, headers)
    if turn is not None:
        node.cost_usd = turn.usage.cost_usd
        if node.cost_usd is None and call.usage is not None:
            node.cost_usd = call.usage.cost_usd  # the answers of some dialects have no field for it
        node.cost_source = "provider" if node.cost_usd is not None else None
        if node.cost_usd is None and call.upstream is not None:
            node.cost_usd = cost_of(turn.usage, call.upstream.model, call.upstream.provider)
            node.cost_source = f"genai-prices {version('genai-prices')}" if node.cost_usd is not None else None
    return node


def turn_of(call: Call, request: Request) -> Turn | None:
    """The answer delivered to the agent, with the upstream's usage and tokens; None unless all of it was delivered."""
    turn = _parse_answer(call.answer, call.dialect)
    if turn is None:
        return None
    served = call.upstream.model if call.upstream else None
    source = None
    if call.upstream and call.delivered:
        source = _parse_answer(call.upstream.answer, call.upstream.dialect)
    usage = call.usage or (source or turn).usage
    tokens = (source.tokens if source else None) or turn.tokens or _noted_tokens(call)
    if any(note.get("redacted") for note in call.notes):
        tokens = None  # the ids of a redacted secret would reveal it
    native = source.native_stop if source else turn.native_stop
    named = (source.model if source else turn.model if call.upstream else None) or served or request.model
    answer = replace(turn, usage=usage, tokens=tokens, model=named, native_stop=native)
    return with_version(answer, _noted(call, "policy_version"))


def _noted(call: Call, name: str) -> Any:
    """The gateway's note `name` on a call, or None."""
    return next((note[name] for note in call.notes if name in note), None)


def _parse_answer(answer: RecordedAnswer | None, dialect: str) -> Turn | None:
    if answer is None or answer.status >= 400:
        return None
    if not answer.streamed:
        try:
            return DIALECTS[dialect].parse_response(answer.json())
        except (ValueError, BadResponse):
            return None
    parser = DIALECTS[dialect].stream_parser()
    builder = TurnBuilder().extend(parser.feed(answer.body)).extend(parser.close())
    return builder.turn() if builder.ended else None


def _noted_tokens(call: Call) -> Tokens | None:
    """The tokens reported by a policy, possibly in several notes."""
    pieces: list[Tokens] = []
    for note in call.notes:
        if isinstance(noted := note.get("tokens"), dict):
            lists = [tuple(noted[name]) if noted.get(name) is not None else None for name in _TOKEN_LISTS]
            pieces.append(Tokens(*lists, weights=noted.get("weights")))
    return joined(pieces)


def compute_keys(node: Node, recent: Sequence[Node]) -> None:
    """Compute the keys of a call, and share messages with a recent call that has the same ones.

    Each call repeats the history, so without sharing, memory and time would grow with the square of a session.
    """
    messages, shared = node.request.messages, 0
    start = blake2b(system_words(node).encode(errors="replace"), digest_size=16).digest()
    like = next((other for other in reversed(recent) if other.request.messages[:1] == messages[:1]), None)
    if like is None:
        node.keys = tuple(key_of(message) for message in messages)
    else:
        old, old_keys = like.request.messages, like.keys
        known = [index < len(old) and old[index] == message for index, message in enumerate(messages)]
        shared = [*known, False].index(False) if like.chain[0] == start else 0
        node.keys = tuple(old_keys[i] if same else key_of(messages[i]) for i, same in enumerate(known))
        node.request = replace(
            node.request,
            messages=tuple(old[i] if same else messages[i] for i, same in enumerate(known)),
            system=like.request.system if like.request.system == node.request.system else node.request.system,
            tools=like.request.tools if like.request.tools == node.request.tools else node.request.tools,
        )
    begun, id_begun = (like.chain, like.id_chain) if like and shared else ((start,), (start,))
    new = list(zip(messages, node.keys, strict=True))[shared:]
    node.chain = _chain(begun[: shared + 1], (key for _, key in new))
    node.id_chain = _chain(id_begun[: shared + 1], (id_key_of(message) or key for message, key in new))


def system_words(node: Node) -> str:
    """The start of the system prompt without the parts that change between calls."""
    texts = (text[:4000] for text in node.request.system[:100] if not text.startswith(BILLING))
    return re.sub(r"\d+", "0", "\n".join(texts)[:4000])[:400]


def texts_of(message: Message) -> list[str]:
    return [part.text for part in message.parts if isinstance(part, Text)]


def _chain(begun: tuple[bytes, ...], keys: Iterable[bytes]) -> tuple[bytes, ...]:
    links = list(begun)
    for key in keys:
        links.append(link(links[-1], key))
    return tuple(links)


def link(chain: bytes, key: bytes) -> bytes:
    return blake2b(chain + key, digest_size=16).digest()


def id_key_of(message: Message) -> bytes:
    """A digest of the ids of a message's tool calls and results; empty if it has none."""
    ids = [part.id for part in message.parts if isinstance(part, ToolCall)]
    ids += [part.call_id for part in message.parts if isinstance(part, ToolResult)]
    return blake2b(json.dumps([message.role, ids]).encode(), digest_size=16).digest() if any(ids) else b""


_SORTED = json.JSONEncoder(sort_keys=True, default=str)


def key_of(message: Message) -> bytes:
    """A digest of a message without the parts that clients change (ids, reminders, white space, reasoning)."""
    calls = [(part.name, parse_arguments(part.arguments)) for part in message.parts if isinstance(part, ToolCall)]
    text = "" if calls else " ".join(_without_reminders(" ".join(texts_of(message))).split())
    results = [
        " ".join("".join(piece.text for piece in part.parts if isinstance(piece, Text)).split())
        for part in message.parts
        if isinstance(part, ToolResult)
    ]
    special = [dict(part.value) for part in message.parts if isinstance(part, Opaque)]
    said = _SORTED.encode([message.role, text, calls, results, special])
    return blake2b(said.encode(errors="replace"), digest_size=16).digest()


def _without_reminders(text: str) -> str:
    if _REMINDER not in text:  # no regex: it would take quadratic time for many openings without an end
        return text
    *parts, rest = text.split(_REMINDED)
    kept = (part.partition(_REMINDER)[0] if _REMINDER in part else part + _REMINDED for part in parts)
    return "".join(kept) + rest
