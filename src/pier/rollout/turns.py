"""The turns of one rollout as they happen, and the conversation that they add up to.

Sub-agents, titles and calls that were asked twice are turns too, but the rollout's `completion` is the agent's own
conversation alone. Histories are shared between turns, so a rollout takes memory for what is new in each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pier.errors import UsageError
from pier.rollout.samples import from_threads
from pier.rollout.state import (
    AttributeDict,
    Messages,
    State,
    TimeSpan,
    as_messages,
    response_of,
    step_of,
)
from pier.trajectory.lineage import Generation, Lineage, Node
from pier.wire.chat import render_messages
from pier.wire.turn import Message, Sampling

_SAMPLING = ("temperature", "top_p", "top_k", "max_tokens", "seed", "presence_penalty", "frequency_penalty")
_IGNORED = frozenset({"n", "extra_body", "logprobs", "top_logprobs"})


def sampling_of(given: Mapping[str, Any]) -> Sampling | None:
    """Sampling arguments as the gateway prescribes them; None if there are none. `UsageError` for unknown ones."""
    known = dict(given)
    for old in ("max_completion_tokens", "max_output_tokens"):
        if old in known:
            known.setdefault("max_tokens", known.pop(old))
    if known.get("n", 1) != 1:
        raise UsageError(f"invalid value {known['n']!r} for n: expected 1", hint="rollouts_per_example=N")
    extra = known.get("extra_body") or {}
    found = {name: value for name, value in {**extra, **known}.items() if name in _SAMPLING and value is not None}
    unknown = sorted(set(known) - set(_SAMPLING) - _IGNORED - {"stop", "max_completion_tokens", "max_output_tokens"})
    if unknown:
        raise UsageError(f"unsupported sampling argument {unknown[0]!r}: expected one of {', '.join(_SAMPLING)}, stop")
    if stop := known.get("stop"):
        found["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    return Sampling(**found) if found else None


@dataclass(frozen=True, slots=True)
class RolloutTurn:
    """One call that is over. Without a `response` the model gave none; `too_long` says that the prompt was."""

    node: Node
    prompt: Messages
    response: AttributeDict | None
    too_long: bool = False

    @property
    def span(self) -> TimeSpan:
        return TimeSpan(self.node.at, self.node.ended or self.node.at)

    def step(self, prompt: Messages, response: AttributeDict, trajectory_id: str) -> AttributeDict:
        return step_of(self.node, prompt, response, trajectory_id)


@dataclass(slots=True)
class TurnLog:
    """Takes the generations of a session. `add` may be called at any moment; `take` gives what came since."""

    generations: list[Generation] = field(default_factory=list)
    _taken: int = 0
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _rendered: dict[int, Messages] = field(default_factory=dict)
    """What each message of a history is as a step has it, by the message's identity."""

    def add(self, generation: Generation) -> None:
        self.generations.append(generation)
        self._news.set()

    async def changed(self, ends: set[asyncio.Future[Any]], seconds: float) -> None:
        """Wait for a generation, one of `ends`, or some seconds."""
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
        """The turns since the last time."""
        new, self._taken = self.generations[self._taken :], len(self.generations)
        return [self._turn(generation) for generation in new]

    def _turn(self, generation: Generation) -> RolloutTurn:
        node = generation.node
        if node.turn is None:
            return RolloutTurn(node, [], None, _is_too_long(generation))
        return RolloutTurn(node, self._messages(node), response_of(node, node.turn))

    def _messages(self, node: Node) -> Messages:
        system = as_messages(render_messages(replace(node.request, messages=())))
        return [*system, *(said for message in node.request.messages for said in self._render(node, message))]

    def _render(self, node: Node, message: Message) -> Messages:
        if id(message) not in self._rendered:
            alone = replace(node.request, messages=(message,), system=())
            self._rendered[id(message)] = as_messages(render_messages(alone))
        return self._rendered[id(message)]

    def finish(self, state: State) -> None:
        """Set `completion` and `prompt` from the agent's own conversation, and what each step was for."""
        lineage = Lineage()
        for generation in sorted(self.generations, key=lambda each: each.node.number):
            lineage.add(generation.node)
        threads = lineage.threads()
        state["samples"], _ = from_threads(threads, ("main", "sub_agent"))
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
                completion += [said for message in node.new_messages for said in self._render(node, message)]
            completion += steps[node.number]["completion"]
        state["completion"] = completion
        if main:
            state["prompt"] = steps[main[0].number]["prompt"]


def _is_too_long(generation: Generation) -> bool:
    """Whether a call failed since its prompt does not fit into the model's context."""
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
