"""Sorts a session's model calls: which call continues which, what each was for, and how the work ended.

The calls of a recording form a tree over message prefixes. A call whose messages begin with those of an earlier call
and its answer continues that call; calls linked so are a thread. A history comes back from the agent in its own words:
white space, reminders, the arguments of tool calls and cleared results differ from what was sent before. So tool calls
and their results are matched by their ids, and other messages, and calls that were given other ids, by what they say
without what clients change. What a thread is for follows from what began it:

- `main`: the agent's own work; there is one.
- `compaction`: the first call after the history was replaced by a summary; what follows it is main again.
- `sub_agent`: work begun by a tool call of another thread.
- `side`: titles, summaries, routers, quota probes: no tools, nothing follows from the answer.
- `foreign`: calls by some other program that was given the agent's key.
- `retry`: a call that came to nothing, since the agent asked the same again.

How the work ended is read from its own calls. A title or a summary that fails at the very end says nothing about the
work, and one that is answered does not make up for a model that was gone.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
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

_TOKEN_LISTS = ("prompt_ids", "completion_ids", "logprobs")

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


def generations_of(recording: Path) -> list[Generation]:
    """The generations of a recording, in the order of their requests."""
    return [
        Generation(node, call.outcome, call.status or 0, call.error, call.fault, call.answer is not None)
        for call in read(recording).generations()
        if (node := read_call(call))
    ]


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
    said = json.dumps([message.role, text, calls, results, special], sort_keys=True, default=str)
    return blake2b(said.encode(errors="replace"), digest_size=16).digest()


SIDE_TASK = re.compile(r"\btitle|summar[iy]|\bquota\b|topic|short name|branch name|condense|compact", re.IGNORECASE)
RECENT = 8
"""The number of earlier calls in which a shared history is looked for."""
_MIN_MATCH = 40
"""A match of this many characters is significant; fewer will do if they come from a call for a summary."""


@dataclass(eq=False, slots=True)
class Thread:
    """Calls that continue one another, oldest first."""

    nodes: list[Node]
    kind: Kind = "main"

    @property
    def root(self) -> Node:
        """The call that began it; not one that was asked again."""
        return next((node for node in self.nodes if node.kind != "retry"), self.nodes[0])

    @property
    def offers_tools(self) -> bool:
        return any(node.request.tools for node in self.nodes)


class Lineage:
    """The tree of one session's calls. Add nodes in the order of their requests, then `threads` sorts them out."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._answers: dict[bytes, Node] = {}
        self._requests: dict[bytes, Node] = {}

    def add(self, node: Node) -> None:
        if not node.chain:
            compute_keys(node, self.nodes[-RECENT:])
        self.nodes.append(node)
        node.parent = self._find_parent(node)
        self._requests[node.chain[-1]] = self._requests[node.id_chain[-1]] = node
        if node.turn is not None:
            answer = Message("assistant", node.turn.parts)
            self._answers[link(node.chain[-1], key_of(answer))] = node
            self._answers[link(node.id_chain[-1], id_key_of(answer) or key_of(answer))] = node

    def _find_parent(self, node: Node) -> Node | None:
        """The call that the longest part of a history comes from."""
        for length in range(len(node.keys), 0, -1):
            if length < len(node.keys) and node.request.messages[length].role == "assistant":
                # The agent may have changed what the model said; the place after the same question is then enough.
                known = self._requests.get(node.chain[length]) or self._requests.get(node.id_chain[length])
                if known is not None and known.turn is not None:
                    return known
            known = self._answers.get(node.chain[length]) or self._answers.get(node.id_chain[length])
            if known is not None:
                return known
        return None

    def threads(self) -> list[Thread]:
        """All threads, each call in exactly one, with their kinds; the main one first if there is one."""
        for node in self.nodes:
            node.kind, node.spawned_by = "main", None
        self._mark_retries()
        threads = self._split()
        main = _main_of(threads)
        if main is None:
            return threads
        for thread in threads:
            if thread is not main:
                _classify(thread, main, threads)
        self._mark_side_calls(threads)
        self._join(main, threads)
        for thread in threads:
            for node in thread.nodes:
                if node.kind == "main":
                    node.kind = thread.kind
        return [main, *(thread for thread in threads if thread is not main)]

    def _mark_retries(self) -> None:
        """Of calls that ask the same, the one that is continued counts, else the last one with an answer."""
        continued = {id(node.parent) for node in self.nodes if node.parent is not None}
        groups: dict[tuple[bytes, bool, str], list[Node]] = {}
        for node in self.nodes:
            groups.setdefault(node.question, []).append(node)
        for group in groups.values():
            if len(group) == 1:
                continue
            answered = [node for node in group if node.turn is not None]
            kept = [node for node in answered if id(node) in continued] or answered[-1:] or group[-1:]
            for node in group:
                if node not in kept:
                    node.kind = "retry"

    def _split(self) -> list[Thread]:
        by_node: dict[int, Thread] = {}
        by_question: dict[tuple[bytes, bool, str], Thread] = {}
        threads: list[Thread] = []
        for node in self.nodes:
            # A retried first call begins no second thread.
            thread = by_node.get(id(node.parent)) or by_question.get(node.question)
            if thread is None:
                thread = Thread([])
                threads.append(thread)
            thread.nodes.append(node)
            by_node[id(node)] = thread
            by_question.setdefault(node.question, thread)
        return threads

    def _mark_side_calls(self, threads: list[Thread]) -> None:
        """Calls amid work with tools whose answers nothing builds on, and that offer no tools or want a summary."""
        continued = {id(node.parent) for node in self.nodes}
        last = self.nodes[-1]
        for thread in threads:
            for node in thread.nodes if thread.offers_tools else ():
                if node.kind != "main" or id(node) in continued:
                    continue
                if not node.request.tools or (node is not last and _wants_summary(node)):
                    node.kind = "side"

    @staticmethod
    def _join(main: Thread, threads: list[Thread]) -> None:
        """Threads that carry the main work on become part of it."""
        for thread in [thread for thread in threads if thread is not main and thread.kind == "main"]:
            work = [node for node in main.nodes if node.kind not in ("retry", "side")]
            before = [node for node in work if node.number < thread.root.number]
            thread.root.parent = before[-1] if before else None
            main.nodes.extend(thread.nodes)
            threads.remove(thread)
        main.nodes.sort(key=lambda node: node.number)


def _main_of(threads: list[Thread]) -> Thread | None:
    """The first thread that offers tools; in a session without tools the longest one."""
    with_tools = [thread for thread in threads if thread.offers_tools and not _is_sub_agent_by_header(thread.root)]
    if with_tools:
        return with_tools[0]
    work = [thread for thread in threads if not _looks_like_side_call(thread)] or threads
    return max(work, key=lambda thread: len(thread.nodes), default=None)


def _classify(thread: Thread, main: Thread, threads: list[Thread]) -> None:
    root = thread.root
    if not thread.offers_tools and main.offers_tools:
        thread.kind = "foreign" if _is_other_program(root, main.root) else "side"
        return
    if not main.offers_tools and _looks_like_side_call(thread):
        thread.kind = "side"
        return
    earlier = [node for other in threads if other is not thread for node in other.nodes if node.number < root.number]
    root.spawned_by = _spawner(root, earlier)
    if root.spawned_by or _is_sub_agent_by_header(root):
        thread.kind = "sub_agent"
    elif _is_other_program(root, main.root):
        thread.kind = "foreign"
    elif before := _predecessor(root, [node for node in main.nodes if node.number < root.number], earlier):
        root.kind, thread.kind = "compaction", "main"
        if main.offers_tools and before.turn is not None and not before.turn.calls:
            before.kind = "side"
    elif _same_system(root, main.root) or set(root.keys[:1]) & set(main.root.keys[:1]):
        thread.kind = "main"
    else:
        thread.kind = "sub_agent"


def _wants_summary(node: Node) -> bool:
    asked = node.request.messages[-1].text if node.request.messages else ""
    return node.turn is not None and not node.turn.calls and SIDE_TASK.search(asked) is not None


def _looks_like_side_call(thread: Thread) -> bool:
    request = thread.root.request
    if len([node for node in thread.nodes if node.kind != "retry"]) > 1:
        return False
    few = request.sampling.max_tokens is not None and request.sampling.max_tokens <= 32
    words = "\n".join([*request.system, *(message.text[:500] for message in request.messages[-1:])])
    return few or request.response_format is not None or SIDE_TASK.search(words) is not None


def _is_other_program(root: Node, main: Node) -> bool:
    ours, theirs = main.headers.get("user-agent"), root.headers.get("user-agent")
    return main.request.dialect != root.request.dialect or (
        ours is not None and theirs is not None and _program(ours) != _program(theirs)
    )


def _program(agent: str) -> str:
    return re.split(r"[/ (]", agent, maxsplit=1)[0].lower()


def _is_sub_agent_by_header(node: Node) -> bool:
    names = ("x-claude-code-agent-id", "x-openai-subagent", "x-codex-parent-thread-id", "x-parent-session-id")
    return any(node.headers.get(name) for name in names)


def _spawner(root: Node, earlier: Iterable[Node]) -> tuple[Node, str] | None:
    """The tool call whose arguments hold the text that this thread was begun with."""
    users = [message for message in root.request.messages if message.role == "user"]
    prompts = [text.strip() for message in users for text in texts_of(message)]
    prompts = [text for text in prompts if len(text) >= 12]
    for node in sorted(earlier, key=lambda node: -node.number):
        for call in node.turn.calls if node.turn else ():
            given = [value.strip() for value in parse_arguments(call.arguments).values() if isinstance(value, str)]
            if any(len(value) >= 12 and any(value in prompt for prompt in prompts) for value in given):
                return node, call.id
    return None


def _predecessor(root: Node, main: list[Node], earlier: list[Node]) -> Node | None:
    """The call where a thread takes up again: the one that wrote its summary, or the one whose last words it has."""
    if not main or not _same_system(root, main[-1]):
        return None
    said = "\n".join(text for message in root.request.messages[:4] for text in texts_of(message))
    for node in reversed(earlier):
        text = node.turn.text.strip() if node.turn else ""
        core = re.sub(r"</?\w+>", "", text).strip()
        asked = node.request.messages[-1].text if node.request.messages else ""
        enough = _MIN_MATCH if node.request.tools and not SIDE_TASK.search(asked) else _MIN_MATCH // 5
        if len(core) >= enough and (core[:200] in said or core[-200:] in said):
            return node
    tail = set(main[-1].keys[-4:])
    goes_on = len(tail & set(root.keys)) >= 2 and root.keys[:1] != main[-1].keys[:1]
    return main[-1] if goes_on else None


def _same_system(one: Node, other: Node) -> bool:
    return system_words(one) == system_words(other)


_CLIENT_TIMEOUT = 20.0
"""Seconds after which a client may give up a model that says nothing."""
_LONG_WAIT = 60.0
_NEAR_END = 5.0
"""A call that ended this many seconds before the agent, or fewer, may have ended with it."""
_SUGGESTS = re.compile(r"\bsuggest", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Ending:
    """How the work ended. `fault` is that of its last call, None if that call was answered or given up."""

    fault: str | None
    status: int
    error: str | None


def how_work_ended(generations: Iterable[Generation]) -> Ending | None:
    """How the last call of the work ended; None if no call belongs to it."""
    calls = {each.node.number: each for each in generations if each.node.ended is not None}
    lineage = Lineage()
    for number in sorted(calls):
        lineage.add(calls[number].node)
    threads = lineage.threads()
    if not threads:
        return None
    last = _last(_main_work(threads[0]), calls)
    if last and last.turn and last.turn.calls:
        subs = [node for thread in threads if thread.kind == "sub_agent" for node in thread.nodes]
        last = _last([node for node in subs if node.number > last.number], calls) or last
    if last is None:
        return Ending(None, 0, None)
    call = calls[last.number]
    return Ending(call.fault, call.status, call.error)


def _last(nodes: list[Node], calls: Mapping[int, Generation]) -> Node | None:
    """The last call that was answered, failed or met the end of a budget. One that the agent gave up says nothing; the
    one before it does."""
    for node in reversed(nodes):
        if node.turn is not None or calls[node.number].fault or calls[node.number].outcome == "refused":
            return node
    return None


def waited_without_answer(calls: Sequence[Generation], until: float, *, killed: bool = True) -> bool:
    """Whether an agent that ended at `until` had waited for a model that no longer answered: since its last answer it
    waited for half of its time, or for a minute and ten times as long as for any answer.

    Calls at the same time are one wait, and those that it cut off itself before a model could answer are none; that of
    an agent that was `killed` may be one. Calls that began before the last one that was answered are not its work."""
    known = [call for call in calls if call.answered]
    began = max((call.node.at for call in known), default=0.0)
    seen = since = max((call.node.ended or until for call in known), default=0.0)
    waits = [
        (call.node.at, min(call.node.ended or until, until))
        for call in calls
        if not call.answered and call.outcome in ("cancelled", "interrupted") and call.node.at >= began
    ]
    waited = 0.0
    for begin, end in sorted(waits):
        if end - max(begin, since) >= _CLIENT_TIMEOUT or (killed and until - end < _NEAR_END):
            waited += max(0.0, end - max(begin, seen))
            seen = max(seen, end)
    slowest = max(((call.node.ended or until) - call.node.at for call in known), default=math.inf)
    least = min((until - min((call.node.at for call in calls), default=until)) / 2, max(_LONG_WAIT, 10 * slowest))
    return waited > 0 and waited >= least


def _main_work(main: Thread) -> list[Node]:
    work = [node for node in main.nodes if node.kind in ("main", "compaction", "retry")]
    while work and _is_late_side_call(work[-1], main):
        work.pop()
    return work


def _is_late_side_call(node: Node, main: Thread) -> bool:
    """Whether a call without an answer asks for a summary or a suggestion after the work was done."""
    before = node.parent.turn if node.parent is not None else None
    if node.turn is not None or before is None or before.calls or not main.offers_tools:
        return False
    asked = node.request.messages[-1].text if node.request.messages else ""
    return bool(SIDE_TASK.search(asked) or _SUGGESTS.search(asked))
