"""Sorts a session's model calls into threads, classifies them, and determines how the work ended.

The calls of a recording form a tree over message prefixes. A call whose messages begin with those of an earlier call
and its answer continues that call; calls linked this way are a thread. The origin of a thread determines its kind:

- `main`: the agent's own work; there is one.
- `compaction`: the first call after the history was replaced by a summary; what follows it is main again.
- `sub_agent`: work started by a tool call of another thread.
- `side`: titles, summaries, routers, quota probes: calls without tools whose answers nothing builds on.
- `foreign`: calls by another program that has the agent's key.
- `retry`: a call whose answer was not used, since the agent repeated the request.

Only the main work determines how a session ended: a title or a summary that fails at the end does not count against it,
and an answered one does not make up for a model that stopped answering.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pier.trajectory.calls import (
    RECENT,
    Generation,
    Kind,
    Node,
    compute_keys,
    id_key_of,
    key_of,
    link,
    system_words,
    texts_of,
)
from pier.wire.turn import Message
from pier.wire.values import parse_arguments

SIDE_TASK = re.compile(r"\btitle|summar[iy]|\bquota\b|topic|short name|branch name|condense|compact", re.IGNORECASE)
_EARLIER = 512
"""Number of calls before a thread that are searched for its origin."""
_MIN_PROMPT = 12
_MIN_MATCH = 40
"""Characters that make a match significant; a fifth of them is enough in the answer to a request for a summary."""


@dataclass(eq=False, slots=True)
class Thread:
    """Calls that continue one another, oldest first."""

    nodes: list[Node]
    kind: Kind = "main"

    @property
    def root(self) -> Node:
        """Its first call that is not a retry."""
        return next((node for node in self.nodes if node.kind != "retry"), self.nodes[0])

    @property
    def offers_tools(self) -> bool:
        return any(node.request.tools for node in self.nodes)


class Lineage:
    """The tree of one session's calls. Add nodes in the order of their requests, then call `threads`."""

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
        """Find the call that shares the longest part of this call's history."""
        for length in range(len(node.keys), 0, -1):
            if length < len(node.keys) and node.request.messages[length].role == "assistant":
                # The agent may have edited the model's answer; the same messages before it are enough.
                known = self._requests.get(node.chain[length]) or self._requests.get(node.id_chain[length])
                if known is not None and known.turn is not None:
                    return known
            known = self._answers.get(node.chain[length]) or self._answers.get(node.id_chain[length])
            if known is not None:
                return known
        return None

    def threads(self) -> list[Thread]:
        """Classify all calls, and return the threads, the main one first. Each call is in exactly one."""
        for node in self.nodes:
            node.kind, node.spawned_by = "main", None
        self._mark_retries()
        threads = self._split()
        main = _main_of(threads)
        if main is None:
            return threads
        sorter = _Sorter(main, self.nodes)
        for thread in threads:
            if thread is not main:
                sorter.classify(thread)
        self._mark_side_calls(threads)
        self._join(main, threads)
        for thread in threads:
            for node in thread.nodes:
                if node.kind == "main":
                    node.kind = thread.kind
        return [main, *(thread for thread in threads if thread is not main)]

    def _mark_retries(self) -> None:
        """Mark repeated requests as retries, except those that another call continues, else the last answered one."""
        continued = {id(node.parent) for node in self.nodes if node.parent is not None}
        groups: dict[tuple[bytes, bool, str], list[Node]] = {}
        for node in self.nodes:
            groups.setdefault(node.question, []).append(node)
        for group in groups.values():
            if len(group) == 1:
                continue
            answered = [node for node in group if node.turn is not None]
            kept = [node for node in answered if id(node) in continued] or answered[-1:] or group[-1:]
            counting = set(map(id, kept))
            for node in group:
                if id(node) not in counting:
                    node.kind = "retry"

    def _split(self) -> list[Thread]:
        by_node: dict[int, Thread] = {}
        by_question: dict[tuple[bytes, bool, str], Thread] = {}
        threads: list[Thread] = []
        for node in self.nodes:
            # A retry of a thread's first call belongs to that thread.
            thread = by_node.get(id(node.parent)) or by_question.get(node.question)
            if thread is None:
                thread = Thread([])
                threads.append(thread)
            thread.nodes.append(node)
            by_node[id(node)] = thread
            by_question.setdefault(node.question, thread)
        return threads

    def _mark_side_calls(self, threads: list[Thread]) -> None:
        """Mark calls in threads with tools that nothing continues, if they offer no tools or ask for a summary."""
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
        """Merge threads that continue the main work into the main thread."""
        joined = [thread for thread in threads if thread is not main and thread.kind == "main"]
        parts = [_work(main)]
        for thread in joined:
            root = thread.root
            before = (node for part in reversed(parts) for node in reversed(part) if node.number < root.number)
            root.parent = next(before, None)
            main.nodes.extend(thread.nodes)
            parts += [work] if (work := _work(thread)) else []
        gone = set(map(id, joined))
        threads[:] = [thread for thread in threads if id(thread) not in gone]
        main.nodes.sort(key=lambda node: node.number)


def _work(thread: Thread) -> list[Node]:
    return [node for node in thread.nodes if node.kind not in ("retry", "side")]


def _main_of(threads: list[Thread]) -> Thread | None:
    """The first thread that offers tools, or the longest one in a session without tools."""
    with_tools = [thread for thread in threads if thread.offers_tools and not _is_sub_agent_by_header(thread.root)]
    if with_tools:
        return with_tools[0]
    work = [thread for thread in threads if not _looks_like_side_call(thread)] or threads
    return max(work, key=lambda thread: len(thread.nodes), default=None)


class _Sorter:
    """Classifies the threads other than the main one. An agent may start very many, so each is compared with a bounded
    number of earlier calls, and the texts of a call are extracted once."""

    def __init__(self, main: Thread, nodes: list[Node]) -> None:
        self._root = main.root
        self._offers_tools = main.offers_tools
        self._system = system_words(main.root)
        self._main = main.nodes
        self._numbers = [node.number for node in main.nodes]
        self._nodes = nodes
        self._places = {id(node): place for place, node in enumerate(nodes)}
        self._texts: dict[int, list[tuple[str, str]]] = {}
        self._cores: dict[int, str] = {}

    def classify(self, thread: Thread) -> None:
        root = thread.root
        if not thread.offers_tools and self._offers_tools:
            thread.kind = "foreign" if _is_other_program(root, self._root) else "side"
            return
        if not self._offers_tools and _looks_like_side_call(thread, self._root):
            thread.kind = "side"
            return
        place, own = self._places[id(root)], set(map(id, thread.nodes))
        earlier = [node for node in self._nodes[max(0, place - _EARLIER) : place] if id(node) not in own]
        same_system = system_words(root) == self._system
        root.spawned_by = self._spawner(root, earlier)
        if root.spawned_by or _is_sub_agent_by_header(root):
            thread.kind = "sub_agent"
        elif _is_other_program(root, self._root):
            thread.kind = "foreign"
        elif before := self._predecessor(root, earlier):
            root.kind, thread.kind = "compaction", "main"
            if self._offers_tools and before.turn is not None and not before.turn.calls:
                before.kind = "side"
        elif same_system or set(root.keys[:1]) & set(self._root.keys[:1]):
            thread.kind = "main"
        else:
            thread.kind = "sub_agent"

    def _spawner(self, root: Node, earlier: list[Node]) -> tuple[Node, str] | None:
        """The tool call whose arguments contain the prompt of this thread."""
        users = [message for message in root.request.messages if message.role == "user"]
        prompts = [text.strip() for message in users for text in texts_of(message)]
        prompts = [text for text in prompts if len(text) >= _MIN_PROMPT]
        for node in reversed(earlier) if prompts else ():
            if (texts := self._texts.get(id(node))) is None:
                texts = self._texts[id(node)] = _argument_texts(node)
            for value, call in texts:
                if any(value in prompt for prompt in prompts):
                    return node, call
        return None

    def _predecessor(self, root: Node, earlier: list[Node]) -> Node | None:
        """The call that a thread resumes from: the one that wrote its summary, or the last one whose messages it
        repeats."""
        place = bisect_left(self._numbers, root.number)
        last = self._main[place - 1] if place else None
        if last is None or system_words(root) != system_words(last):
            return None
        start = "\n".join(text for message in root.request.messages[:4] for text in texts_of(message))
        for node in reversed(earlier):
            if (core := self._cores.get(id(node))) is None:
                core = self._cores[id(node)] = _core_of(node)
            if core and (core[:200] in start or core[-200:] in start):
                return node
        tail = set(last.keys[-4:])
        repeats = len(tail & set(root.keys)) >= 2 and root.keys[:1] != last.keys[:1]
        return last if repeats else None


def _argument_texts(node: Node) -> list[tuple[str, str]]:
    """The texts in the arguments of an answer's tool calls that may be prompts of sub-agents, with the calls' ids."""
    calls = node.turn.calls if node.turn else ()
    values = ((value, call.id) for call in calls for value in parse_arguments(call.arguments).values())
    texts = ((value.strip(), call) for value, call in values if isinstance(value, str))
    return [(text, call) for text, call in texts if len(text) >= _MIN_PROMPT]


def _core_of(node: Node) -> str:
    """The text of an answer without tags, or nothing if it is too short to be recognised."""
    core = re.sub(r"</?\w+>", "", node.turn.text.strip()).strip() if node.turn else ""
    is_work = node.request.tools and not SIDE_TASK.search(_prompt_of(node))
    return core if len(core) >= (_MIN_MATCH if is_work else _MIN_MATCH // 5) else ""


def _prompt_of(node: Node) -> str:
    """The text of the last message of a request."""
    return node.request.messages[-1].text if node.request.messages else ""


def _wants_summary(node: Node) -> bool:
    return node.turn is not None and not node.turn.calls and SIDE_TASK.search(_prompt_of(node)) is not None


def _looks_like_side_call(thread: Thread, main: Node | None = None) -> bool:
    request = thread.root.request
    if len([node for node in thread.nodes if node.kind != "retry"]) > 1:
        return False
    limit = request.sampling.max_tokens
    is_short = limit is not None and limit <= 32 and not (main and main.request.sampling.max_tokens == limit)
    text = "\n".join([*request.system, _prompt_of(thread.root)[:500]])
    return is_short or request.response_format is not None or SIDE_TASK.search(text) is not None


def _is_other_program(root: Node, main: Node) -> bool:
    if main.request.dialect != root.request.dialect:
        return True
    agents = [node.headers["user-agent"] for node in (main, root) if "user-agent" in node.headers]
    programs = [re.split(r"[/ (]", agent, maxsplit=1)[0].lower() for agent in agents]
    return len(set(programs)) > 1


def _is_sub_agent_by_header(node: Node) -> bool:
    names = ("x-claude-code-agent-id", "x-openai-subagent", "x-codex-parent-thread-id", "x-parent-session-id")
    return any(node.headers.get(name) for name in names)


_CLIENT_TIMEOUT = 20.0
"""Seconds of silence after which a client may give up a call."""
_LONG_WAIT = 60.0
_NEAR_END = 5.0
"""Seconds between the ends of a call and of its agent within which the agent's end may have cut the call off."""
_SUGGESTS = re.compile(r"\bsuggest", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of the work. `fault` is that of its last call, None if that call was answered or cancelled."""

    fault: str | None
    status: int
    error: str | None


def how_work_ended(generations: Iterable[Generation]) -> Ending | None:
    """Determine how the last call of the work ended; None without calls."""
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
    """The last call that was answered, failed or hit a budget. Calls that the agent cancelled are skipped."""
    for node in reversed(nodes):
        if node.turn is not None or calls[node.number].fault or calls[node.number].outcome == "refused":
            return node
    return None


def waited_without_answer(calls: Sequence[Generation], until: float, *, killed: bool = True) -> bool:
    """Whether an agent that ended at `until` was waiting for a model that no longer answered: since its last answer it
    waited for half of its time, or for a minute and ten times as long as for any answer.

    Overlapping calls count as one wait. Calls that the agent cancelled before a model could answer do not count, unless
    the agent was `killed` while it waited; nor do calls that started before the last answered one."""
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
    """Whether an unanswered call asks for a summary or a suggestion after the work was done."""
    before = node.parent.turn if node.parent is not None else None
    if node.turn is not None or before is None or before.calls or not main.offers_tools:
        return False
    prompt = _prompt_of(node)
    return bool(SIDE_TASK.search(prompt) or _SUGGESTS.search(prompt))
