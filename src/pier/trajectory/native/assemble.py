"""The base of the readers of agents' session logs: opens logs and assembles their records into steps.

A reader is a subclass of `SessionReader` with `find` and `read` (or `read_row`), which report the entries of a log in
order; the base class assembles one step per model call and keeps only the open step in memory. An entry outside of any
step (a late result, a mark of compaction) becomes a separate step, so nothing in the log is lost. A log that is one
JSON document is read element by element, up to where it is torn. The content of logs is untrusted.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pier.trajectory.model import (
    Content,
    ContentPart,
    FinalMetrics,
    MediaSource,
    Metrics,
    Observation,
    ObservationResult,
    Source,
    Step,
    StepToolCall,
    SubagentTrajectoryRef,
    time_of,
)
from pier.trajectory.model import iso as iso_seconds
from pier.trajectory.paged import JsonWindow
from pier.tree import Tree, TreeError, find_files, open_regular

T = TypeVar("T")
EXTENSIONS = {"image/png": "png", "image/jpeg": "jpg", "image/gif": "gif", "image/webp": "webp"}
_DEEPEST = 32
"""The deepest nesting of sessions in a trajectory; deeper sessions are moved up to this level."""


@dataclass(slots=True)
class SessionLog:
    """One session of an agent. Reading its steps fills in the other fields."""

    reader: type[SessionReader]
    path: Path
    id: str
    version: str = "unknown"
    model: str | None = None
    cost_usd: float | None = None
    children: list[SessionLog] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    totals: LogTotals | None = None
    """Set once the last step was read."""

    @property
    def agent(self) -> str:
        return self.reader.agent

    def child_in(self, text: Content) -> str | None:
        """The id of a sub-agent mentioned in a text."""
        return next((child.id for child in self.children if isinstance(text, str) and child.id in text), None)

    def child_among(self, values: Iterable[Any]) -> str | None:
        """The first value that is the id of a sub-agent."""
        return next((child.id for value in values for child in self.children if child.id == value), None)

    def steps(self, media: Path | None = None) -> Iterator[Step]:
        reader = self.reader(self, media)
        for _ in reader.read():
            yield from reader.drain()
        reader.close()
        yield from reader.drain()
        self.totals = reader.totals


def nested(found: Iterable[tuple[SessionLog, Hashable, Hashable]]) -> list[SessionLog]:
    """Add sessions to the children of their parents, and return the top ones. Each comes with its key and its parent's
    (None without one). None is lost: duplicates of a key, cycles and unknown parents make top sessions."""
    rows = list(found)
    known: dict[Hashable, SessionLog] = {}
    for session, key, _ in rows:
        known.setdefault(key, session)
    above: dict[int, SessionLog] = {}
    tops = []
    for session, _, parent_key in rows:
        parent = upper = None if parent_key is None else known.get(parent_key)
        while upper is not None and upper is not session:
            upper = above.get(id(upper))
        if parent is None or upper is session:
            tops.append(session)
        else:
            above[id(session)] = parent
            parent.children.append(session)
    _flatten(tops)
    return tops


def _flatten(tops: list[SessionLog]) -> None:
    """Move sessions that are nested too deeply up: readers of a trajectory recurse into them."""
    todo = [(session, 1) for session in tops]
    while todo:
        session, depth = todo.pop()
        if depth < _DEEPEST:
            todo += [(child, depth + 1) for child in session.children]
            continue
        below, session.children = session.children, []
        while below:
            child = below.pop(0)
            session.children.append(child)
            below, child.children = child.children + below, []


@dataclass(slots=True)
class LogTotals:
    prompt: int = 0
    completion: int = 0
    cached: int = 0
    cost: float | None = None
    peak: int | None = None
    steps: int = 0
    compactions: int = 0

    def add(self, metrics: Metrics) -> None:
        self.prompt += metrics.prompt_tokens or 0
        self.completion += metrics.completion_tokens or 0
        self.cached += metrics.cached_tokens or 0
        if metrics.cost_usd is not None:
            self.cost = (self.cost or 0.0) + metrics.cost_usd
        if metrics.prompt_tokens is not None:
            self.peak = max(self.peak or 0, metrics.prompt_tokens)

    def final(self, cost_usd: float | None) -> FinalMetrics:
        extra: dict[str, Any] = {"summarization_count": self.compactions}
        cost = self.cost if self.cost is not None else cost_usd
        if self.peak is not None:
            extra["peak_context_tokens"] = self.peak
        if cost is not None:
            extra["cost_source"] = "agent"
        return FinalMetrics(
            total_prompt_tokens=self.prompt,
            total_completion_tokens=self.completion,
            total_cached_tokens=self.cached,
            total_cost_usd=cost,
            total_steps=self.steps,
            extra=extra,
        )


class SessionReader:
    """Reads the logs of one agent and assembles their steps."""

    agent: ClassVar[str]

    @classmethod
    def find(cls, root: Path) -> list[SessionLog]:
        """Find the sessions below a directory or in one file; sub-agents are children of the session that started
        them."""
        raise NotImplementedError

    def read(self) -> Iterator[None]:
        """Read the log from its beginning, and yield wherever the caller may take the finished steps."""
        for row in records(self.session.path):
            self.read_row(row, row.get("timestamp"))
            yield

    def read_row(self, row: dict[str, Any], at: str | None) -> None:
        """Read one line of a log in JSON lines."""
        raise NotImplementedError

    def __init__(self, session: SessionLog, media: Path | None = None) -> None:
        self.session = session
        self.totals = LogTotals()
        self._media = media
        self._open: Step | None = None
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: set[str] = set()
        self._answered: set[str] = set()
        self._key: str | None = None
        self._ready: deque[Step] = deque()
        self._last: str | None = None
        self._latest: datetime | None = None
        """Time of the last step, as in the log and parsed."""
        self._seen: set[str] = set()

    @property
    def key(self) -> str | None:
        """The key of the model call of the open step; None if no step is open."""
        return self._key if self._open else None

    @property
    def is_over(self) -> bool:
        """Whether the next output of the model starts another answer: no step is open, or its tokens or results are
        known."""
        return self._open is None or self._open.metrics is not None or self._open.observation is not None

    def drain(self) -> Iterator[Step]:
        while self._ready:
            yield self._ready.popleft()

    def say(self, source: Source, message: Content, at: str | None, *, injected: Any = None, **extra: Any) -> None:
        """Add a step of the user or the system; `injected` if the agent wrote it in the user's name."""
        self.close()
        extra["injected"] = True if injected else None
        self._emit(Step(step_id=1, source=source, message=message, timestamp=at, extra=_known(extra)))

    def compacted(self, summary: str, at: str | None, **extra: Any) -> None:
        """Add a step for the replacement of the history by a summary."""
        self.totals.compactions += 1
        self.say("system", summary, at, kind="compaction", **extra)

    def take_back(self, summary: str) -> dict[str, Any]:
        """Drop the open step if it is the model call that wrote this summary, and return its usage."""
        step = self._open
        text = "\n\n".join(self._texts).strip()
        if step is None or step.tool_calls or not text or text not in summary:
            return {}
        self._open = None
        if step.metrics is None:
            return {}
        return {"input_tokens": step.metrics.prompt_tokens, "output_tokens": step.metrics.completion_tokens}

    def turn(self, key: str | None, at: str | None, model: str | None = None) -> None:
        """Open the step of a model call and close the one before. The session's model is that of its first call."""
        self.close()
        self.session.model = self.session.model or model
        self._key = key
        self._texts, self._reasoning, self._calls, self._answered = [], [], set(), set()
        self._open = Step(step_id=1, source="agent", message="", timestamp=at, model_name=model, llm_call_count=1)

    def text(self, text: str) -> None:
        if self._open and text:
            self._texts.append(text)

    def think(self, text: str) -> None:
        if self._open and text:
            self._reasoning.append(text)

    def block(self, block: dict[str, Any], call: str = "", arguments: str = "input") -> None:
        """Add a block of an answer: a text, a thought, a tool call if its type is `call`, else an extra fact."""
        match block.get("type"):
            case "text":
                self.text(block.get("text") or "")
            case "thinking" | "think" | "reasoning" as kind:
                self.think(block.get(kind) or block.get("text") or "")
            case kind if kind == call:
                self.call(str(block.get("id")), str(block.get("name")), block.get(arguments) or {})
            case kind:
                self.note(**{str(kind): block})

    def call(self, id_: str, name: str, arguments: Any) -> None:
        """Add a tool call to the open step. Arguments that are not a mapping are kept under `input`."""
        if self._open is None:
            self.turn(None, self._last)
        assert self._open is not None
        if id_ in self._calls:
            return
        arguments = arguments if isinstance(arguments, dict) else {"input": arguments}
        unique = id_ if id_ not in self._seen else f"{id_}#{self.totals.steps + 1}"
        self._seen.add(unique)
        self._calls.add(unique)
        calls = self._open.tool_calls = self._open.tool_calls or []
        calls.append(StepToolCall(tool_call_id=unique, function_name=name, arguments=arguments))

    def observe(
        self, call: str | None, content: Content, at: str | None, *, child: Any = None, failed: Any = None, **extra: Any
    ) -> None:
        """Add the result of a tool call; `child` is the id of the sub-agent that it started, if there is one. A result
        that arrives after its step was closed becomes a separate step with the call's id."""
        extra["is_error"] = True if failed else None
        is_child = any(child == each.id for each in self.session.children)
        refs = [SubagentTrajectoryRef(trajectory_id=child)] if is_child else None
        result = ObservationResult(content=content, subagent_trajectory_ref=refs, extra=_known(extra))
        if self._open is not None and (call is None or call in self._calls):
            if not call or call not in self._answered:
                self._answered.add(call or "")
                result.source_call_id = call
                known = self._open.observation = self._open.observation or Observation(results=[])
                known.results.append(result)
            return
        result.extra = _known({"call_id": call, **extra})
        self.close()
        observation = Observation(results=[result])
        self._emit(Step(step_id=1, source="system", message="", timestamp=at, observation=observation))

    def count(
        self,
        prompt: int | None,
        completion: int | None,
        cached: int | None,
        *,
        written: int | None = None,
        reasoning: int | None = None,
        cost: float | None = None,
    ) -> None:
        """Set the tokens of the open step. `prompt` includes those read from and `written` to a cache."""
        if self._open:
            extra = _known({"cache_write_tokens": written or None, "reasoning_tokens": reasoning or None})
            self._open.metrics = Metrics(
                prompt_tokens=prompt,
                completion_tokens=completion,
                cached_tokens=cached,
                cost_usd=cost or None,
                extra=extra,
            )

    def note(self, **extra: Any) -> None:
        """Add facts to the open step."""
        if self._open:
            self._open.extra = {**(self._open.extra or {}), **(_known(extra) or {})} or None

    def close(self) -> None:
        """Finish the open step."""
        step, self._open = self._open, None
        if step is None:
            return
        step.message, step.reasoning_content = "\n\n".join(self._texts), "\n\n".join(self._reasoning) or None
        if step.metrics:
            self.totals.add(step.metrics)
        self._emit(step)

    def content(self, content: Any, *, whole: bool = False) -> Content:
        """Convert a text, or a list of texts and images in any format of the logs. Other parts are shown by their type
        or, with `whole`, as JSON."""
        if content is None or isinstance(content, str):
            return content or ""
        parts = [part for each in content for part in self._parts(each, whole)]
        if any(part.type != "text" for part in parts):
            return parts
        return "\n".join(part.text or "" for part in parts)

    def _parts(self, part: Any, whole: bool) -> list[ContentPart]:
        if isinstance(part, str):
            return [ContentPart(type="text", text=part)]
        is_image, resource = part.get("type") == "image", part.get("resource")
        held = part.get("inlineData") or (part.get("source") or part if is_image else None)
        if isinstance(held, dict) and held.get("data"):
            return [self.picture(str(held.get("mimeType") or held.get("media_type")), str(held["data"]))]
        shown = part.get("image_url") or part.get("imageUrl")
        urls = [shown.get("url") if isinstance(shown, dict) else shown, *(part.get("image_urls") or ())]
        if pictures := [self.picture_at(url) for url in urls if isinstance(url, str)]:
            return pictures
        text = part.get("text") or (resource.get("text") if isinstance(resource, dict) else None)
        if text is None and part.get("type") != "text":
            text = json.dumps(part, ensure_ascii=False) if whole else f"[{part.get('type') or ', '.join(part)}]"
        return [ContentPart(type="text", text=str(text or ""))]

    def picture(self, media_type: str, data: str) -> ContentPart:
        """Write an image in the log to a file next to the trajectory; a note if there is no directory for it."""
        if self._media is None or media_type not in EXTENSIONS:
            return ContentPart(type="text", text=f"[{media_type}, {len(data)} characters of base64]")
        try:
            raw = base64.b64decode(data)
        except ValueError:
            return ContentPart(type="text", text=f"[{media_type}, broken base64]")
        name = f"{hashlib.sha256(raw).hexdigest()[:24]}.{EXTENSIONS[media_type]}"
        try:
            with Tree(self._media.parent) as tree:
                tree.write(f"{self._media.name}/{name}", raw, 0o600)
        except TreeError:
            return ContentPart(type="text", text=f"[{media_type}, no directory for it]")
        return ContentPart(type="image", source=MediaSource(media_type=media_type, path=f"{self._media.name}/{name}"))

    def picture_at(self, url: str) -> ContentPart:
        """An image by its URL, which may contain the data."""
        head, _, data = url.partition(";base64,")
        if head.startswith("data:") and data:
            return self.picture(head.removeprefix("data:"), data)
        return ContentPart(type="text", text=f"[image {url}]")

    def _emit(self, step: Step) -> None:
        self.totals.steps += 1
        step.step_id = self.totals.steps
        if step.timestamp:
            if (time := time_of(step.timestamp)) is None:
                raise ValueError(f"invalid time {step.timestamp!r}")
            if self._latest is None or time >= self._latest:
                self._latest, self._last = time, step.timestamp
        step.timestamp = self._last  # never earlier than the step before, whatever the clocks
        self._ready.append(step)


def _known(facts: dict[str, Any]) -> dict[str, Any] | None:
    return {name: value for name, value in facts.items() if value is not None} or None


def iso(milliseconds: float | None) -> str | None:
    """A time in milliseconds since the epoch as ISO 8601."""
    return None if milliseconds is None else iso_seconds(milliseconds / 1000)


def arguments_in(text: Any) -> Any:
    """Parse arguments given as JSON text; return them unchanged if they are something else."""
    try:
        return json.loads(text) if isinstance(text, str) else text or {}
    except ValueError:
        return text


def split(blocks: Iterable[T], is_result: Callable[[T], Any]) -> tuple[list[T], list[T]]:
    """Split the blocks of a message into tool results and others."""
    listed = list(blocks)
    return [block for block in listed if is_result(block)], [block for block in listed if not is_result(block)]


def records(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a log, line by line; broken lines are skipped."""
    with open_regular(path) as file:
        for line in file:
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                yield value


def first_records(root: Path, pattern: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The logs at `root`, each with its first record."""
    return ((path, next(records(path), {})) for path in find_files(root, pattern))


def begins_with(path: Path, is_own: Callable[[dict[str, Any]], bool]) -> bool:
    """Whether one of the first records of a log has an agent's format."""
    return any(map(is_own, islice(records(path), 200)))


def document(path: Path) -> dict[str, Any]:
    """The JSON object in a small file; empty if it is missing or broken."""
    try:
        with open_regular(path) as file:
            value = json.load(file)
    except (OSError, ValueError, TreeError):
        return {}
    return value if isinstance(value, dict) else {}


def members(path: Path, listed: str) -> Iterator[tuple[str, Any]]:
    """The members of the object in a file. Each element of the array `listed` is yielded as a member."""
    with open_regular(path) as file, suppress(ValueError):
        window = JsonWindow(file, chunk=1 << 18)
        for key in window.members():
            if key == listed and window.peek() == "[":
                for _ in window.elements():
                    yield key, window.value()
            else:
                yield key, window.value()
