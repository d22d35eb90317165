"""One call of a session, and the keys by which the next one knows its messages again.

A history comes back from the agent in its own words: white space, reminders, the arguments of tool calls and cleared
results differ from what was sent before. A message has a key of what it says without what clients change, and, if it
holds tool calls or their results, a key of their ids alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Literal

from pier.gateway.canonical import Message, Opaque, Request, Text, ToolCall, ToolResult, Turn
from pier.gateway.dialect.shared import parse_arguments

Kind = Literal["main", "compaction", "sub_agent", "side", "foreign", "retry"]

_REMINDER = re.compile(r"<system-reminder>.*?</system-reminder>", re.DOTALL)


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

    @property
    def new_messages(self) -> tuple[Message, ...]:
        """What the call adds to what its parent and the parent's answer said."""
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


def settle(node: Node, recent: Sequence[Node]) -> None:
    """Work out the keys of a call, and share what it says again with a call shortly before it.

    Histories grow by a little with each call, so a session takes memory and time for what is new, not for its square.
    """
    messages = node.request.messages
    like = next((other for other in reversed(recent) if other.request.messages[:1] == messages[:1]), None)
    if like is None:
        node.keys = tuple(key_of(message) for message in messages)
    else:
        old, old_keys = like.request.messages, like.keys
        known = [index < len(old) and old[index] == message for index, message in enumerate(messages)]
        node.keys = tuple(old_keys[i] if same else key_of(messages[i]) for i, same in enumerate(known))
        node.request = replace(
            node.request,
            messages=tuple(old[i] if same else messages[i] for i, same in enumerate(known)),
            system=like.request.system if like.request.system == node.request.system else node.request.system,
            tools=like.request.tools if like.request.tools == node.request.tools else node.request.tools,
        )
    start = blake2b(system_words(node).encode(errors="replace"), digest_size=16).digest()
    node.chain = _chain(start, node.keys)
    node.id_chain = _chain(start, [id_key_of(m) or key for m, key in zip(messages, node.keys, strict=True)])


def system_words(node: Node) -> str:
    """The start of the system prompt, without what changes from call to call."""
    texts = [text for text in node.request.system if not text.startswith("x-anthropic-billing-header:")]
    return re.sub(r"\d+", "0", "\n".join(texts))[:400]


def texts_of(message: Message) -> list[str]:
    return [part.text for part in message.parts if isinstance(part, Text)]


def _chain(start: bytes, keys: Iterable[bytes]) -> tuple[bytes, ...]:
    links = [start]
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


def key_of(message: Message) -> bytes:
    """What a message says, without what clients change on the way: ids, reminders, white space, reasoning."""
    calls = [(part.name, parse_arguments(part.arguments)) for part in message.parts if isinstance(part, ToolCall)]
    text = "" if calls else " ".join(_REMINDER.sub("", " ".join(texts_of(message))).split())
    results = [
        " ".join("".join(piece.text for piece in part.parts if isinstance(piece, Text)).split())
        for part in message.parts
        if isinstance(part, ToolResult)
    ]
    special = [dict(part.value) for part in message.parts if isinstance(part, Opaque)]
    said = json.dumps([message.role, text, calls, results, special], sort_keys=True, default=str)
    return blake2b(said.encode(errors="replace"), digest_size=16).digest()
