"""The steps of a trial, from its trajectory file or, while it runs, from the gateway's recording.

A trajectory is read in pages: `pier.trajectory.paged` maps the offsets of its steps, and the index caches the maps of
large files. If the trial is running or has no trajectory, one is derived from the recording into a file next to the
index.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from pier.errors import PierError
from pier.job.view import TrialView
from pier.record import About
from pier.record.reader import Call, RecordingTooLarge, read
from pier.trajectory.derive import Derivation, write_trajectory
from pier.trajectory.model import Content, Step, text_of
from pier.trajectory.paged import PagedTrajectory, TrajectoryMap, scan
from pier.tree import TreeError, open_regular
from pier.trial.bounded import SMALL, call_bounded
from pier.view.files import file_stamp
from pier.view.index import Index

_KEPT = 1 << 20
"""Maps of files of at least this size are cached."""
_DERIVATIONS = 8
"""Maximum number of recordings whose incremental derivation is kept in memory."""
LABEL = 90


@dataclass(frozen=True, slots=True)
class TrajectoryPart:
    """One trajectory of a trial. Tasks with steps have one per step, named after it; else `name` is empty."""

    name: str
    path: Path
    source: str = "trajectory"
    """`trajectory`, or `recording` if derived from the calls recorded so far."""


@dataclass(slots=True)
class StepReader:
    """Finds and opens the trajectories of trials."""

    index: Index
    _derivations: dict[Path, Derivation] = field(default_factory=dict)
    _large: dict[Path, str] = field(default_factory=dict)
    """Recordings too large to read in this process, with the stamp of the last derivation."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def parts(self, view: TrialView) -> list[TrajectoryPart]:
        """The trajectories of a trial, in order."""
        if (file := self.index.library.file) is not None:
            return [TrajectoryPart("", file)]
        files = view.files
        names = ((step_name(view, path), path) for path in files.trajectories)
        found = {name: TrajectoryPart(name, path) for name, path in names}
        for path in files.recordings:
            name = step_name(view, path)
            if (name not in found or (view.state == "running" and _is_newer(path, found[name].path))) and (
                derived := self._derive(view, path)
            ):
                found[name] = TrajectoryPart(name, derived, "recording")
        return [found[name] for name in sorted(found)]

    def _derive(self, view: TrialView, recording: Path) -> Path | None:
        """The trajectory of the calls recorded so far; None without a step."""
        name = hashlib.sha256(str(recording).encode()).hexdigest()[:16]
        target = self.index.path.parent / f"derived-{name}" / "trajectory.json"
        about = About(view.agent, None, view.model, view.name)
        if recording not in self._large:
            try:
                with self._lock:
                    return self._derive_small(recording, target, about)
            except RecordingTooLarge:
                self._large[recording] = ""
            except (OSError, TreeError, ValueError, KeyError, TypeError, RecursionError):
                return target if target.is_file() else None
        return self._derive_large(recording, target, about, is_running=view.state == "running")

    def _derive_small(self, recording: Path, target: Path, about: About) -> Path | None:
        derivation = self._derivations.pop(recording, None) or Derivation(recording, target, about, SMALL)
        found = derivation.update(durable=False)
        self._derivations[recording] = derivation
        while len(self._derivations) > _DERIVATIONS:
            self._derivations.pop(next(iter(self._derivations)))
        return found.path

    def _derive_large(self, recording: Path, target: Path, about: About, *, is_running: bool) -> Path | None:
        """The same in a process with limited memory, once per state of the file, and after the trial's end only."""
        if is_running:
            return None
        if self._large[recording] != (stamp := file_stamp(recording)):
            self._large[recording] = stamp
            with suppress(OSError, ValueError, MemoryError, PierError):
                call_bounded(write_trajectory, recording, target, about, durable=False)
        return target if target.is_file() else None

    @contextmanager
    def open(self, part: TrajectoryPart, sub: str = "") -> Iterator[PagedTrajectory]:
        """The trajectory of a part, or of one of its sub-agents: `sub` is its path, such as `0` or `0.2`. ValueError
        if the file is not a trajectory or the sub-agent is missing."""
        try:
            with open_regular(part.path) as stream:
                found = PagedTrajectory(stream, self._map(part.path, stream))
                for place in sub.split(".") if sub else ():
                    found = found.subs[int(place)]
                yield found
        except (OSError, TreeError, IndexError) as error:
            raise ValueError(f"cannot read {part.path}: {error}") from error

    def _map(self, path: Path, stream: Any) -> TrajectoryMap:
        stamp = file_stamp(path)
        known, _ = self.index.trial_map(path, stamp)
        if known is not None:
            return TrajectoryMap.from_json(known)
        found = scan(stream)
        if stream.tell() >= _KEPT:
            self.index.keep_map(path, stamp, found.to_json(), None)
        return found

    def outline(self, part: TrajectoryPart, sub: str = "") -> list[dict[str, Any]]:
        """One row per step; cached for large files."""
        stamp = file_stamp(part.path)
        known, rows = self.index.trial_map(part.path, stamp)
        if rows is not None and not sub:
            return json.loads(rows)
        with self.open(part, sub) as found:
            made = [_outline_row(number, found.raw(number)) for number in range(len(found))]
            if not sub and (known is not None or part.path.stat().st_size >= _KEPT):
                self.index.keep_map(part.path, stamp, found.map.to_json(), json.dumps(made))
        return made

    def search(self, part: TrajectoryPart, query: str, sub: str = "", limit: int = 500) -> list[tuple[int, str]]:
        """The steps that contain `query`, with an excerpt around its first occurrence."""
        folded, found = query.casefold(), list[tuple[int, str]]()
        with self.open(part, sub) as trajectory:
            for number in range(len(trajectory)):
                texts = ((text, text.casefold().find(folded)) for text in texts_of(trajectory.step(number)))
                if hit := next(((text, at) for text, at in texts if at >= 0), None):
                    text, at = hit
                    found.append((number + 1, " ".join(text[max(0, at - 60) : at + len(query) + 60].split())))
                    if len(found) >= limit:
                        break
        return found


def step_name(view: TrialView, path: Path) -> str:
    """The task step that a file of a trial belongs to; empty if the task has no steps."""
    parts = path.relative_to(view.directory).parts
    return parts[1] if parts[0] == "steps" else ""


def _is_newer(path: Path, other: Path) -> bool:
    try:
        return path.stat().st_mtime_ns > other.stat().st_mtime_ns
    except OSError:
        return False


def _outline_row(index: int, raw: bytes) -> dict[str, Any]:
    """A row of the outline; `mark` is compaction, copied, sub-agent or empty."""
    row = {"number": index + 1, "source": "system", "label": "invalid step", "tools": [], "failed": False, "mark": ""}
    try:
        step = from_json(raw)
        calls = [str(call.get("function_name")) for call in step.get("tool_calls") or ()]
        results = (step.get("observation") or {}).get("results") or []
        marks = {
            "compaction": (step.get("extra") or {}).get("compaction"),
            "copied": step.get("is_copied_context"),
            "sub-agent": any(result.get("subagent_trajectory_ref") for result in results),
        }
        return {
            **row,
            "source": str(step.get("source")),
            "label": _label(step, calls),
            "tools": [call[:60] for call in calls[:20]],
            "failed": any((result.get("extra") or {}).get("is_error") for result in results),
            "mark": next((name for name, is_set in marks.items() if is_set), ""),
        }
    except (ValueError, AttributeError, TypeError, KeyError):
        return row


def _label(step: dict[str, Any], calls: list[str]) -> str:
    """The beginning of the message, else of the first argument, else of the reasoning."""
    message = step.get("message")
    if isinstance(message, list):
        message = " ".join(str(part.get("text") or f"[{part.get('type')}]") for part in message)
    arguments = (step["tool_calls"][0].get("arguments") or {}) if calls else {}
    texts = (message, next(iter(arguments.values()), ""), step.get("reasoning_content"))
    labels = (" ".join(str(text or "")[:400].split())[:LABEL] for text in texts)
    return next((label for label in labels if label), "")


def texts_of(step: Step) -> Iterator[str]:
    """All readable texts of a step."""
    yield step.text
    yield step.reasoning_content or ""
    for call in step.tool_calls or ():
        values = (each if isinstance(each, str) else json.dumps(each) for each in call.arguments.values())
        yield " ".join((call.function_name, *values))
    for result in step.observation.results if step.observation else ():
        yield text_of(result.content)


def text_at(step: Step, place: str) -> str:
    """One text of a step: `message`, `reasoning`, `call.N` (arguments), or `result.N`; ValueError if it is missing."""
    kind, _, number = place.partition(".")
    try:
        if kind == "message":
            return step.text
        if kind == "reasoning":
            return step.reasoning_content or ""
        if kind == "call":
            arguments = (step.tool_calls or [])[int(number)].arguments
            return json.dumps(arguments, indent=2, ensure_ascii=False)
        if kind == "result" and step.observation:
            return text_of(step.observation.results[int(number)].content)
    except (IndexError, ValueError):
        pass
    raise ValueError(f"step {step.step_id} has no text {place}")


def seconds_between(first: str | None, second: str | None) -> float | None:
    """The time between two timestamps; None if one is missing or invalid."""
    if not first or not second:
        return None
    try:
        return (datetime.fromisoformat(second) - datetime.fromisoformat(first)).total_seconds()
    except (ValueError, TypeError):
        return None


def pictures(content: Content | None) -> list[tuple[str, str]]:
    """The media type and the path or URL of each picture in a message."""
    if content is None or isinstance(content, str):
        return []
    return [(part.source.media_type, part.source.path) for part in content if part.source is not None]


def read_calls(recording: Path, number: int, most: int | None) -> dict[str, Any]:
    """The calls of a recording, and the call `number` in full."""
    found = read(recording, most)
    call = next((each for each in found.calls if each.number == number), None)
    return {
        "closed": found.closed,
        "calls": [_call_row(each) for each in found.calls],
        "call": _call_data(found.calls, call) if call else None,
    }


def _call_row(call: Call) -> dict[str, Any]:
    usage = call.usage
    keys = ("number", "at", "kind", "dialect", "model", "outcome", "status", "error", "fault")
    return {
        **{key: getattr(call, key) for key in keys},
        "seconds": call.ended - call.at if call.ended else None,
        "first_byte": call.answer.at - call.at if call.answer else None,
        "tokens": [usage.input_tokens, usage.cached_tokens, usage.output_tokens] if usage else [None, None, None],
        "attempts": len(call.attempts),
    }


def _call_data(calls: list[Call], call: Call) -> dict[str, Any]:
    answer, numbers = call.answer, [each.number for each in calls]
    place = numbers.index(call.number)
    return {
        **_call_row(call),
        "path": call.path,
        "stream": call.stream,
        "headers": dict(call.headers),
        "request": call.body.decode(errors="replace"),
        "answer": answer.body.decode(errors="replace") if answer else "",
        "edits": [dict(edit) for edit in call.edits],
        "notes": [dict(note) for note in call.notes],
        "upstreams": [
            {key: getattr(each, key) for key in ("provider", "url", "model", "error", "wait")}
            | {"status": each.answer.status if each.answer else None}
            for each in call.attempts
        ],
        "previous": numbers[place - 1] if place else None,
        "next": numbers[place + 1] if place + 1 < len(numbers) else None,
    }
