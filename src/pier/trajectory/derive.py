"""Derives the ATIF trajectory of any agent from the recording of its model calls alone.

`Derivation` follows a recording and rewrites the trajectory file whenever calls ended, so that a running trial can be
watched; `write_trajectory` writes it once. Each complete answer is an agent step; messages that are new since the last
call become user and system steps, and tool results become observations of the step with the tool calls. No text is
invented: a step without text has an empty message. Totals cover all calls, with a breakdown by kind; a cost is the
provider's own figure, else computed from a price table (named with its version), else null.
"""

from __future__ import annotations

from base64 import b64decode
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from pier.figures import add_known
from pier.record import About
from pier.record.reader import Reader, find
from pier.trajectory import model as atif
from pier.trajectory.calls import Node, read_calls
from pier.trajectory.lineage import Lineage, Thread
from pier.trajectory.model import iso, whole_characters
from pier.trajectory.rules import IMAGES
from pier.tree import Tree
from pier.wire.turn import Media, Message, Part, Reasoning, Refusal, Text, Tool, ToolCall, ToolResult, Turn
from pier.wire.values import parse_arguments

_SIDE_TEXT = 400


@dataclass
class StepBuilder:
    """Collects the steps of one thread, and their images by path."""

    steps: list[atif.Step] = field(default_factory=list)
    media: dict[str, bytes] = field(default_factory=dict)
    _by_call: dict[str, tuple[atif.Step, str]] = field(default_factory=dict)
    """The latest step with a tool call and the call's id in it, by the call's id on the wire."""

    def take(self, node: Node) -> None:
        """Add the steps of a model call: the agent's new messages, then the answer."""
        if not self.steps and node.request.system:
            texts = [Text(text) for text in node.request.system if text]
            self._add("system", self._content(texts), node.at)
        renamed = self._renamed_calls(node)
        for message in node.new_messages:
            self._take_message(message, node, renamed)
        if node.turn is not None:
            self._take_turn(node, node.turn)

    def take_results(self, node: Node) -> None:
        """Add only the tool results in a side call, since an agent may request a summary right after a tool ran."""
        renamed = self._renamed_calls(node)
        for message in node.new_messages:
            for part in message.parts:
                if isinstance(part, ToolResult) and renamed.get(part.call_id, part.call_id) in self._by_call:
                    self._observe(part, renamed.get(part.call_id, part.call_id))

    def _renamed_calls(self, node: Node) -> dict[str, str]:
        """Map the agent's ids of the last answer's tool calls to ours: Gemini's wire format has no ids."""
        if node.parent is None or node.parent.turn is None:
            return {}
        place = len(node.parent.keys)
        if place >= len(node.request.messages):
            return {}
        ids = [part.id for part in node.request.messages[place].parts if isinstance(part, ToolCall)]
        return dict(zip(ids, (call.id for call in node.parent.turn.calls), strict=False))

    def _take_message(self, message: Message, node: Node, renamed: dict[str, str]) -> None:
        if message.role == "assistant":
            self._take_copied_answer(message, node)
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

    def _take_copied_answer(self, message: Message, node: Node) -> None:
        """Add an answer in the history that is not in this recording."""
        texts = [part.text for part in message.parts if isinstance(part, Text | Refusal)]
        step = self._add("agent", whole_characters("".join(texts)), node.at)
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
        """Add a reference to a sub-agent's trajectory to the result of the tool call that started it."""
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

    def _take_turn(self, node: Node, turn: Turn) -> None:
        texts = [part.text for part in turn.parts if isinstance(part, Text | Refusal)]
        step = self._add("agent", whole_characters("".join(texts)), node.ended or node.at)
        step.model_name = turn.model or node.request.model
        step.llm_call_count = 1
        thoughts = [part.text for part in turn.parts if isinstance(part, Reasoning) and part.text]
        step.reasoning_content = whole_characters("\n\n".join(thoughts)) or None
        step.reasoning_effort = node.request.sampling.effort
        step.metrics = _metrics(node, turn)
        step.extra = {"call": node.number, "stop_reason": turn.native_stop or turn.stop}
        self._call_tools(step, turn.calls)

    def _call_tools(self, step: atif.Step, calls: Iterable[ToolCall]) -> None:
        listed: list[atif.StepToolCall] = []
        for wire in calls:
            call = _tool_call(wire)
            if wire.id in self._by_call:
                # Some servers restart their numbering in each answer, but ATIF needs distinct ids.
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
        """Return a single text as a string, several parts or images as a list."""
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


def _tool_call(call: ToolCall) -> atif.StepToolCall:
    arguments = parse_arguments(call.arguments)
    extra: dict[str, Any] = {}
    if call.custom or (set(arguments) == {"input"} and not call.arguments.lstrip().startswith("{")):
        extra["raw_arguments"] = call.arguments
    if call.custom:
        arguments = {"input": call.arguments}
    if call.namespace:
        extra["namespace"] = call.namespace
    return atif.StepToolCall(tool_call_id=call.id, function_name=call.name, arguments=arguments, extra=extra or None)


def _metrics(node: Node, turn: Turn) -> atif.Metrics | None:
    usage, tokens = turn.usage, turn.tokens
    extra = {
        "cache_write_tokens": usage.cache_write_tokens,
        "reasoning_tokens": usage.reasoning_tokens,
        "cost_source": node.cost_source,
    }
    known = {name: value for name, value in extra.items() if value is not None}
    metrics = atif.Metrics(
        prompt_tokens=usage.input_tokens,
        completion_tokens=usage.output_tokens,
        cached_tokens=usage.cached_tokens,
        cost_usd=node.cost_usd,
        prompt_token_ids=list(tokens.prompt_ids) if tokens and tokens.prompt_ids is not None else None,
        completion_token_ids=list(tokens.completion_ids) if tokens and tokens.completion_ids is not None else None,
        logprobs=list(tokens.logprobs) if tokens and tokens.logprobs is not None else None,
        extra=known or None,
    )
    return metrics if metrics.model_dump(exclude_none=True) else None


def tool_definitions(tools: Iterable[Tool]) -> list[dict[str, Any]] | None:
    """Tools in the format of OpenAI's functions, as ATIF lists them."""
    listed: list[dict[str, Any]] = []
    for tool in tools:
        function = {"name": tool.name, "description": tool.description, "parameters": tool.schema}
        listed.append({"type": "function", "function": {key: value for key, value in function.items() if value}})
    return listed or None


@dataclass(slots=True)
class StepTotals:
    """Summed usage of calls. `cost_usd` is None once a call without a known cost is added."""

    calls: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    cost_usd: float | None = None
    unpriced: int = 0

    def add(self, node: Node) -> None:
        """Add a call; an unanswered one counts nothing."""
        if node.turn is not None:
            usage, unpriced = node.turn.usage, int(node.cost_usd is None)
            counts = (usage.input_tokens, usage.output_tokens, usage.cached_tokens)
            self.merge(StepTotals(1, *counts, node.cost_usd, unpriced))

    def merge(self, other: StepTotals) -> None:
        self.calls += other.calls
        self.prompt_tokens = add_known(self.prompt_tokens, other.prompt_tokens)
        self.completion_tokens = add_known(self.completion_tokens, other.completion_tokens)
        self.cached_tokens = add_known(self.cached_tokens, other.cached_tokens)
        self.unpriced += other.unpriced
        self.cost_usd = None if self.unpriced else add_known(self.cost_usd, other.cost_usd)


@dataclass(frozen=True, slots=True)
class TrajectorySummary:
    """The result of a derivation. `path` is None if no file was written."""

    path: Path | None
    steps: int = 0
    agent_steps: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    cost_usd: float | None = None
    cost_source: str | None = None
    peak_context_tokens: int | None = None
    summarization_count: int = 0
    calls: dict[str, int] = field(default_factory=dict)
    """Number of model calls of each kind (`pier.trajectory.calls.Kind`)."""


class Derivation:
    """Follows one recording. Each call is read once; each update sorts all calls into threads again."""

    def __init__(self, recording: Path, target: Path, about: About, most: int | None = None) -> None:
        self._reader = Reader(find(recording), most)
        self._target = target
        self._about = about
        self._read: dict[int, Node] = {}
        self.trajectory: atif.Trajectory | None = None

    def update(self, *, durable: bool = True) -> TrajectorySummary:
        """Read newly recorded calls and write the file if there are steps; with `durable`, wait until it is on disk."""
        calls = (call for call in self._reader.poll() if call.kind == "generate")
        for call, node in read_calls(calls, self._read.values()):
            self._read[call.number] = node
        lineage = Lineage()
        for number in sorted(self._read):
            lineage.add(self._read[number])
        threads = lineage.threads()
        if not threads:
            return TrajectorySummary(None)
        self.trajectory, media = _TrajectoryBuilder(threads, self._about).build()
        if not self.trajectory.steps:
            return TrajectorySummary(None, calls=_kinds(lineage))
        self._target.parent.mkdir(parents=True, exist_ok=True)
        with Tree(self._target.parent) as tree:
            for path, data in media.items():
                if tree.find(path) is None:
                    tree.write(path, data, 0o600)
        atif.write(self._target, self.trajectory, durable=durable)
        return _summary(self._target, self.trajectory, _kinds(lineage))


def write_trajectory(
    recording: Path, target: Path, about: About, *, durable: bool = True, most: int | None = None
) -> TrajectorySummary:
    """Write the trajectory of the recording at `recording`, a file or a trial's directory, to `target`.
    `RecordingTooLarge` if it takes more than `most` bytes of memory, as `Reader` counts."""
    return Derivation(recording, target, about, most).update(durable=durable)


class _TrajectoryBuilder:
    """Builds one trajectory from sorted threads: the main one, with its sub-agents embedded."""

    def __init__(self, threads: list[Thread], about: About) -> None:
        self._threads = threads
        self._about = about
        self._media: dict[str, bytes] = {}
        self._subs = [thread for thread in threads if thread.kind == "sub_agent"]

    def build(self) -> tuple[atif.Trajectory, dict[str, bytes]]:
        main = self._threads[0]
        session = self._about.session_id
        trajectory = self._trajectory(main, session, session, self._subs_of(main, top=True))
        breakdown: dict[str, StepTotals] = {}
        for thread in self._threads:
            for node in thread.nodes:
                if node.turn is not None:
                    kind = "main" if node.kind == "compaction" else node.kind
                    breakdown.setdefault(kind, StepTotals()).add(node)
        trajectory.final_metrics = self._final(trajectory, main, breakdown)
        if side_calls := self._side_calls():
            trajectory.extra = {"side_calls": side_calls}
        return trajectory, self._media

    def _side_calls(self) -> list[dict[str, Any]]:
        """The calls without a step (side calls, foreign ones, retries), with the start of the answer and the usage."""
        nodes = [node for thread in self._threads for node in thread.nodes if node.kind in ("side", "foreign", "retry")]
        found: list[dict[str, Any]] = []
        for node in sorted(nodes, key=lambda node: node.number):
            row: dict[str, Any] = {"call": node.number, "kind": node.kind, "model_name": node.request.model}
            if node.turn is not None:
                used = StepTotals()
                used.add(node)
                row |= {"message": whole_characters(node.turn.text[:_SIDE_TEXT]), "metrics": _plain(used)}
            found.append({**row, "timestamp": iso(node.at)})
        return found

    def _subs_of(self, thread: Thread, *, top: bool) -> list[Thread]:
        inside = {id(node) for node in thread.nodes}
        found = [sub for sub in self._subs if sub.root.spawned_by and id(sub.root.spawned_by[0]) in inside]
        return found + [sub for sub in self._subs if top and sub.root.spawned_by is None]

    def _trajectory(self, thread: Thread, session: str | None, name: str | None, subs: list[Thread]) -> atif.Trajectory:
        steps = StepBuilder()
        for node in thread.nodes:
            if node.kind == "side":
                steps.take_results(node)
            elif node.kind != "retry":
                steps.take(node)
        self._media.update(steps.media)
        embedded = [self._embedded(sub, session, name, number, steps) for number, sub in enumerate(subs, 1)]
        first = thread.root.request
        return atif.Trajectory(
            session_id=session,
            trajectory_id=name,
            agent=atif.TrajectoryAgent(
                name=self._about.agent_name,
                version=self._about.agent_version or "unknown",
                model_name=self._about.model_name or first.model,
                tool_definitions=tool_definitions(first.tools),
            ),
            steps=steps.steps,
            subagent_trajectories=embedded or None,
        )

    def _embedded(
        self, sub: Thread, session: str | None, name: str | None, number: int, steps: StepBuilder
    ) -> atif.Trajectory:
        label = f"{name or 'trajectory'}-sub-{number}"
        inner = self._trajectory(sub, session, label, self._subs_of(sub, top=False))
        totals = StepTotals()
        for node in sub.nodes:
            if node.kind != "retry":
                totals.add(node)
        inner.final_metrics = self._final(inner, sub, {"main": totals})
        if sub.root.spawned_by is not None:
            steps.refer(sub.root.spawned_by[1], label)
        return inner

    def _final(
        self, trajectory: atif.Trajectory, thread: Thread, breakdown: dict[str, StepTotals]
    ) -> atif.FinalMetrics:
        total = StepTotals()
        for part in breakdown.values():
            total.merge(part)
        nodes = [node for node in thread.nodes if node.kind != "retry"]
        compactions = sum(node.kind == "compaction" for node in nodes)
        prompts = [step.metrics.prompt_tokens for step in trajectory.agent_steps if step.metrics]
        peak = max((count for count in prompts if count is not None), default=None)
        extra: dict[str, Any] = {"summarization_count": compactions}
        if compactions:
            extra["compacted"] = True
        if peak is not None:
            extra["peak_context_tokens"] = peak
        if total.cost_usd is not None:
            extra["cost_source"] = self._cost_source()
        extra["breakdown"] = {kind: _plain(part) for kind, part in breakdown.items()}
        return atif.FinalMetrics(
            total_prompt_tokens=total.prompt_tokens,
            total_completion_tokens=total.completion_tokens,
            total_cached_tokens=total.cached_tokens,
            total_cost_usd=total.cost_usd,
            total_steps=len(trajectory.steps),
            extra=extra,
        )

    def _cost_source(self) -> str:
        nodes = (node for thread in self._threads for node in thread.nodes)
        sources = {node.cost_source for node in nodes if node.cost_source}
        return ", ".join(sorted(sources))


def _plain(totals: StepTotals) -> dict[str, Any]:
    return {key: value for key, value in asdict(totals).items() if value is not None and key != "unpriced"}


def _kinds(lineage: Lineage) -> dict[str, int]:
    return dict(Counter(node.kind for node in lineage.nodes))


def _summary(path: Path, trajectory: atif.Trajectory, kinds: dict[str, int]) -> TrajectorySummary:
    final = trajectory.final_metrics or atif.FinalMetrics()
    extra = final.extra or {}
    return TrajectorySummary(
        path=path,
        steps=len(trajectory.steps),
        agent_steps=sum(not step.is_copied_context for step in trajectory.agent_steps),
        prompt_tokens=final.total_prompt_tokens,
        completion_tokens=final.total_completion_tokens,
        cached_tokens=final.total_cached_tokens,
        cost_usd=final.total_cost_usd,
        cost_source=extra.get("cost_source"),
        peak_context_tokens=extra.get("peak_context_tokens"),
        summarization_count=extra.get("summarization_count", 0),
        calls=kinds,
    )
