"""Turns the calls of one thread into the steps of a trajectory.

One agent step per answer that was delivered whole. What the agent sent that was new since its last call becomes user
and system steps, and results of tool calls become observations of the step that made the calls. Nothing is invented:
a step without words has an empty message.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any

from pier.gateway.canonical import Media, Message, Part, Reasoning, Refusal, Text, Tool, ToolCall, ToolResult, Turn
from pier.gateway.dialect.shared import parse_arguments
from pier.gateway.lineage import Node
from pier.trajectory import model as atif
from pier.trajectory.rules import IMAGES
from pier.trajectory.write import whole_characters


@dataclass(frozen=True, slots=True)
class Priced:
    """What one call used and cost, with where the figure comes from."""

    cost_usd: float | None
    source: str | None


@dataclass
class Steps:
    """The steps of one thread as they grow, and the pictures that they name, by path."""

    steps: list[atif.Step] = field(default_factory=list)
    media: dict[str, bytes] = field(default_factory=dict)
    _by_call: dict[str, tuple[atif.Step, str]] = field(default_factory=dict)
    """By the id on the wire: the latest step with that call, and the call's id there."""

    def take(self, node: Node, priced: Priced) -> None:
        """Add what one call brought: first what the agent sent, then what the model said."""
        if not self.steps and node.request.system:
            texts = [Text(text) for text in node.request.system if text]
            self._add("system", self._content(texts), node.at)
        renamed = self._renamed_calls(node)
        for message in node.new_messages:
            self._take_message(message, node, renamed)
        if node.turn is not None:
            self._take_turn(node, node.turn, priced)

    def overhear(self, node: Node) -> None:
        """Take only the tool results from a side call: a summary may be asked for right after a tool ran."""
        renamed = self._renamed_calls(node)
        for message in node.new_messages:
            for part in message.parts:
                if isinstance(part, ToolResult) and renamed.get(part.call_id, part.call_id) in self._by_call:
                    self._observe(part, renamed.get(part.call_id, part.call_id))

    def _renamed_calls(self, node: Node) -> dict[str, str]:
        """The ids that the agent gave to the calls of the last answer; Gemini's have none on the wire."""
        if node.parent is None or node.parent.turn is None:
            return {}
        place = len(node.parent.keys)
        if place >= len(node.request.messages):
            return {}
        theirs = [part.id for part in node.request.messages[place].parts if isinstance(part, ToolCall)]
        return dict(zip(theirs, (call.id for call in node.parent.turn.calls), strict=False))

    def _take_message(self, message: Message, node: Node, renamed: dict[str, str]) -> None:
        if message.role == "assistant":
            self._copied(message, node)
            return
        others: list[Part] = []
        for part in message.parts:
            if isinstance(part, ToolResult):
                self._observe(part, renamed.get(part.call_id, part.call_id))
            else:
                others.append(part)
        if others:
            step = self._add(message.role, self._content(others), node.at)
            if node.kind == "compaction":
                step.extra = {"compaction": True}

    def _copied(self, message: Message, node: Node) -> None:
        """An answer in a history that no call of this recording gave."""
        texts = [part for part in message.parts if isinstance(part, Text | Refusal)]
        step = self._add("agent", whole_characters("".join(part.text for part in texts)), node.at)
        step.is_copied_context, step.llm_call_count = True, 0
        self._call_tools(step, [part for part in message.parts if isinstance(part, ToolCall)])

    def _observe(self, result: ToolResult, call_id: str) -> None:
        extra: dict[str, Any] = {"is_error": True} if result.is_error else {}
        step, source = self._by_call.get(call_id, (None, None))
        if step is None:
            agents = [step for step in self.steps if step.source == "agent"]
            if not agents:
                return
            step, source, extra = agents[-1], None, {**extra, "call_id": call_id}
        step.observation = step.observation or atif.Observation(results=[])
        if source is not None and any(item.source_call_id == source for item in step.observation.results):
            return
        observed = atif.ObservationResult(
            source_call_id=source, content=self._content(result.parts), extra=extra or None
        )
        step.observation.results.append(observed)

    def refer(self, call_id: str, trajectory_id: str) -> None:
        """Note at the result of a call that it was the work of a sub-agent."""
        if call_id not in self._by_call:
            return
        step, call_id = self._by_call[call_id]
        step.observation = step.observation or atif.Observation(results=[])
        result = next((item for item in step.observation.results if item.source_call_id == call_id), None)
        if result is None:
            result = atif.ObservationResult(source_call_id=call_id)
            step.observation.results.append(result)
        ref = atif.SubagentTrajectoryRef(trajectory_id=trajectory_id)
        result.subagent_trajectory_ref = [*(result.subagent_trajectory_ref or ()), ref]

    def _take_turn(self, node: Node, turn: Turn, priced: Priced) -> None:
        said = [part for part in turn.parts if isinstance(part, Text | Refusal)]
        step = self._add("agent", whole_characters("".join(part.text for part in said)), node.ended or node.at)
        step.model_name = turn.model or node.request.model
        step.llm_call_count = 1
        thoughts = [part.text for part in turn.parts if isinstance(part, Reasoning) and part.text]
        step.reasoning_content = whole_characters("\n\n".join(thoughts)) or None
        step.reasoning_effort = node.request.sampling.effort
        step.metrics = _metrics(turn, priced)
        step.extra = {"call": node.number, "stop_reason": turn.native_stop or turn.stop}
        self._call_tools(step, turn.calls)

    def _call_tools(self, step: atif.Step, calls: Iterable[ToolCall]) -> None:
        listed: list[atif.ToolCall] = []
        for wire in calls:
            call = _tool_call(wire)
            if wire.id in self._by_call:
                # A server that numbers its calls anew in each answer; ids must be distinct all the same.
                call.extra = {**(call.extra or {}), "wire_id": wire.id}
                call.tool_call_id = f"{wire.id}.{step.step_id}.{len(listed)}"
            self._by_call[wire.id] = (step, call.tool_call_id)
            listed.append(call)
        step.tool_calls = listed or None

    def _add(self, source: Any, message: atif.Content | None, at: float) -> atif.Step:
        last = self.steps[-1].timestamp if self.steps else None
        stamp = iso(at)
        step = atif.Step(
            step_id=len(self.steps) + 1,
            timestamp=max(stamp, last) if last else stamp,
            source=source,
            message=message if message is not None else "",
        )
        self.steps.append(step)
        return step

    def _content(self, parts: Iterable[Part]) -> atif.Content:
        """Text as a string; a list where there are several parts or pictures."""
        listed = [part for part in parts if isinstance(part, Text | Refusal) or _shown(part)]
        if len(listed) == 1 and isinstance(listed[0], Text | Refusal):
            return whole_characters(listed[0].text)
        content: list[atif.ContentPart] = []
        for part in listed:
            if isinstance(part, Media):
                content.append(self._picture(part))
            elif isinstance(part, Text | Refusal):
                content.append(atif.ContentPart(type="text", text=whole_characters(part.text)))
        return content or ""

    def _picture(self, media: Media) -> atif.ContentPart:
        kind = media.media_type or "image/png"
        path = media.url or ""
        if media.data is not None:
            data = b64decode(media.data, validate=False)
            path = f"images/{blake2b(data, digest_size=12).hexdigest()}.{kind.partition('/')[2]}"
            self.media[path] = data
        return atif.ContentPart(type="image", source=atif.MediaSource(media_type=kind, path=path))


def _shown(part: Part) -> bool:
    if not isinstance(part, Media) or (part.data is None and part.url is None):
        return False
    return (part.media_type or "image/png") in IMAGES


def _tool_call(call: ToolCall) -> atif.ToolCall:
    arguments = parse_arguments(call.arguments)
    extra: dict[str, Any] = {}
    if call.custom or (set(arguments) == {"input"} and not call.arguments.lstrip().startswith("{")):
        extra["raw_arguments"] = call.arguments
    if call.custom:
        arguments = {"input": call.arguments}
    if call.namespace:
        extra["namespace"] = call.namespace
    return atif.ToolCall(tool_call_id=call.id, function_name=call.name, arguments=arguments, extra=extra or None)


def _metrics(turn: Turn, priced: Priced) -> atif.Metrics | None:
    usage, tokens = turn.usage, turn.tokens
    extra = {
        "cache_write_tokens": usage.cache_write_tokens,
        "reasoning_tokens": usage.reasoning_tokens,
        "cost_source": priced.source,
    }
    known = {name: value for name, value in extra.items() if value is not None}
    metrics = atif.Metrics(
        prompt_tokens=usage.input_tokens,
        completion_tokens=usage.output_tokens,
        cached_tokens=usage.cached_tokens,
        cost_usd=priced.cost_usd,
        prompt_token_ids=list(tokens.prompt_ids) if tokens and tokens.prompt_ids is not None else None,
        completion_token_ids=list(tokens.completion_ids) if tokens and tokens.completion_ids is not None else None,
        logprobs=list(tokens.logprobs) if tokens and tokens.logprobs is not None else None,
        extra=known or None,
    )
    return metrics if metrics.model_dump(exclude_none=True) else None


def tool_definitions(tools: Iterable[Tool]) -> list[dict[str, Any]] | None:
    """Tools in the words of OpenAI's functions, which is how ATIF lists them."""
    listed: list[dict[str, Any]] = []
    for tool in tools:
        function = {"name": tool.name, "description": tool.description, "parameters": tool.schema}
        listed.append({"type": "function", "function": {key: value for key, value in function.items() if value}})
    return listed or None


def iso(at: float) -> str:
    """A moment in UTC, to the millisecond."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
