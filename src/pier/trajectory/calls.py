"""The generations of a recording, read one by one: what was asked, what the agent received, and what it cost.

A history comes back from the agent in its own words: white space, reminders, the arguments of tool calls and cleared
results differ from what was sent before. So the keys by which `pier.trajectory.lineage` compares calls match tool calls
and their results by their ids, and other messages, and calls that were given other ids, by what they say without what
clients change.
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
from pier.wire.contract import parse_arguments
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

RECENT = 8
"""The number of earlier calls in which a shared history is looked for."""

_TOKEN_LISTS = ("prompt_ids", "completion_ids", "logprobs")
_REMINDER = re.compile(r"<system-reminder>.*?</system-reminder>", re.DOTALL)

Kind = Literal["main", "compaction", "sub_agent", "side", "foreign", "retry"]


@dataclass(eq=False, slots=True)
class Node:
    """One generation. `turn` is None when no whole answer was delivered."""

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
    """The call, and the id of its tool call, that began this thread's work."""
    keys: tuple[bytes, ...] = ()
    chain: tuple[bytes, ...] = ()
    """`chain[i]` stands for the first i messages."""
    id_chain: tuple[bytes, ...] = ()
    """The same, with tool calls and results by their ids only."""
    cost_usd: float | None = None
    cost_source: str | None = None
    """Where the cost comes from: the provider, or a table of prices."""

    @property
    def question(self) -> tuple[bytes, bool, str]:
        """The same for calls that ask the same."""
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
        """Whether this call's history is another one's, and an answer to it."""
        place = len(parent.keys)
        if len(self.keys) <= place:
            return False
        return self.chain[place] == parent.chain[-1] or self.id_chain[place] == parent.id_chain[-1]


@dataclass(frozen=True, slots=True)
class Generation:
    """A call that is over, as the gateway saw it or as a recording has it: what was asked and answered, and how it
    ended. `answered` says that the agent got some of an answer or an error."""

    node: Node
    outcome: str
    status: int = 0
    error: str | None = None
    fault: str | None = None
    answered: bool = True
    kind: ErrorKind | None = None
    """The kind of error that the agent received; only the gateway knows it."""


OnGeneration = Callable[[Generation], None]


def generations_of(recording: Path, most: int | None = None) -> list[Generation]:
    """The generations of a recording, in the order of their requests; `RecordingTooLarge` as `Reader` has it."""
    return [
        Generation(node, call.outcome, call.status or 0, call.error, call.fault, call.answer is not None)
        for call, node in read_calls(read(recording, most).generations())
    ]


def read_calls(calls: Iterable[Call], recent: Iterable[Node] = ()) -> Iterator[tuple[Call, Node]]:
    """Each generation with its node, but for those whose request cannot be read or is nested too deeply. A node shares
    what it says again with the few nodes before it, of which `recent` are known already."""
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
    """A turn whose tokens say which weights sampled them, if they do not already."""
    if version is None or turn.tokens is None or turn.tokens.weights is not None:
        return turn
    return replace(turn, tokens=replace(turn.tokens, weights=version))


def read_call(call: Call) -> Node | None:
    """A generation as a node of the lineage; None if its request cannot be read."""
    parts = urlsplit(call.path)
    route = recognise("POST", parts.path, parts.query)
    try:
        parsed = DIALECTS[call.dialect].parse_request(call.request, route)
    except BadRequest:
        return None
    turn = turn_of(call, parsed)
    # The parsed body is as big as the whole history; what is needed of it is in the node.
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
            node.cost_usd = call.usage.cost_usd  # not every dialect has a place for it in its answers
        node.cost_source = "provider" if node.cost_usd is not None else None
        if node.cost_usd is None and call.upstream is not None:
            node.cost_usd = cost_of(turn.usage, call.upstream.model, call.upstream.provider)
            node.cost_source = f"genai-prices {version('genai-prices')}" if node.cost_usd is not None else None
    return node


def turn_of(call: Call, request: Request) -> Turn | None:
    """The answer that the agent received whole, with the usage and tokens that the upstream gave; None without one."""
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
        tokens = None  # a secret was removed, and its tokens with it
    native = source.native_stop if source else turn.native_stop
    named = (source.model if source else turn.model if call.upstream else None) or served or request.model
    answer = replace(turn, usage=usage, tokens=tokens, model=named, native_stop=native)
    return with_version(answer, _noted(call, "policy_version"))


def _noted(call: Call, name: str) -> Any:
    """The gateway's note on a call under this name; None without one."""
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
    """The tokens that a policy reported, which may have come in pieces."""
    pieces: list[Tokens] = []
    for note in call.notes:
        if isinstance(noted := note.get("tokens"), dict):
            lists = [tuple(noted[name]) if noted.get(name) is not None else None for name in _TOKEN_LISTS]
            pieces.append(Tokens(*lists, weights=noted.get("weights")))
    return joined(pieces)


def compute_keys(node: Node, recent: Sequence[Node]) -> None:
    """Work out the keys of a call, and share what it says again with a call shortly before it.

    Histories grow by a little with each call, so a session takes memory and time for what is new, not for its square.
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
    """The start of the system prompt, without what changes from call to call."""
    texts = [text for text in node.request.system if not text.startswith(BILLING)]
    return re.sub(r"\d+", "0", "\n".join(texts))[:400]


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
    """The tool calls of a message, or the results in it, by their ids; nothing if it has neither."""
    ids = [part.id for part in message.parts if isinstance(part, ToolCall)]
    ids += [part.call_id for part in message.parts if isinstance(part, ToolResult)]
    return blake2b(json.dumps([message.role, ids]).encode(), digest_size=16).digest() if any(ids) else b""


_SORTED = json.JSONEncoder(sort_keys=True, default=str)


def key_of(message: Message) -> bytes:
    """A digest of a message without the parts that clients change: ids, reminders, white space, reasoning."""
    calls = [(part.name, parse_arguments(part.arguments)) for part in message.parts if isinstance(part, ToolCall)]
    text = "" if calls else " ".join(_REMINDER.sub("", " ".join(texts_of(message))).split())
    results = [
        " ".join("".join(piece.text for piece in part.parts if isinstance(piece, Text)).split())
        for part in message.parts
        if isinstance(part, ToolResult)
    ]
    special = [dict(part.value) for part in message.parts if isinstance(part, Opaque)]
    said = _SORTED.encode([message.role, text, calls, results, special])
    return blake2b(said.encode(errors="replace"), digest_size=16).digest()
