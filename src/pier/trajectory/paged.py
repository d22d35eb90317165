"""Reads a trajectory file step by step: where each step begins and ends is found in one pass that keeps no text.

A trajectory of a long run has a hundred megabytes, of which a reader looks at one screen. `scan` reads the file in
pieces and remembers the byte range of every step, also of embedded sub-agents; `PagedTrajectory` then reads single
steps. Any layout of JSON is read, not only that of files that pier wrote.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from pydantic import ValidationError
from pydantic_core import from_json

from pier.trajectory.model import FinalMetrics, Step, TrajectoryAgent

_CHUNK = 4 << 20
_STEP_LIMIT = 1 << 30
_HEAD_LIMIT = 4 << 20
_DEEPEST = 16
_SPACE = re.compile(r"[ \t\r\n]*")
_DECODE = json.JSONDecoder(strict=False).raw_decode


@dataclass(slots=True)
class TrajectoryMap:
    """Where the parts of a trajectory are in its file: a start and an end for each step, and for each other value of
    the object by its key. `subs` are the embedded sub-agents."""

    spans: array[int] = field(default_factory=lambda: array("Q"))
    head: dict[str, tuple[int, int]] = field(default_factory=dict)
    subs: list[TrajectoryMap] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.spans) // 2

    def to_json(self) -> str:
        return json.dumps(self._plain(), separators=(",", ":"))

    def _plain(self) -> list[Any]:
        return [self.spans.tolist(), self.head, [sub._plain() for sub in self.subs]]

    @classmethod
    def from_json(cls, text: str | bytes) -> TrajectoryMap:
        return cls._read(from_json(text))

    @classmethod
    def _read(cls, plain: list[Any]) -> TrajectoryMap:
        spans, head, subs = plain
        return cls(
            array("Q", spans), {key: tuple(span) for key, span in head.items()}, [cls._read(sub) for sub in subs]
        )


class _Window:
    """A part of a file as text with one character per byte, so that places in it are places in the file."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._base = 0
        self._text = ""
        self._is_last = False

    def _extend(self, at: int, size: int) -> None:
        """Have more text, from `at` on; ValueError at the end of the file."""
        if self._is_last:
            raise ValueError("not a whole JSON object")
        data = self._stream.read(size)
        self._is_last = len(data) < size
        self._text = self._text[at - self._base :] + data.decode("latin-1")
        self._base = at
        if len(self._text) > _STEP_LIMIT:
            raise ValueError(f"a value of more than {_STEP_LIMIT} bytes")

    def next(self, at: int) -> tuple[str, int]:
        """The next character that is not white space, and its place."""
        while True:
            found = _SPACE.match(self._text, at - self._base)
            end = found.end() if found else 0
            if end < len(self._text):
                return self._text[end], self._base + end
            self._extend(max(at, self._base), _CHUNK)

    def value(self, at: int) -> tuple[Any, int]:
        """The JSON value that begins at `at`, and where it ends. Texts in it are as their bytes are."""
        while True:
            try:
                value, end = _DECODE(self._text, at - self._base)
                if end < len(self._text) or self._is_last:
                    return value, self._base + end
            except (ValueError, IndexError, StopIteration):
                if self._is_last:
                    raise ValueError("not a whole JSON object") from None
            except RecursionError:
                raise ValueError("nested too deep") from None
            self._extend(at, max(_CHUNK, len(self._text)))


def scan(stream: IO[bytes]) -> TrajectoryMap:
    """Where the parts of a trajectory are; ValueError if the file is not one whole JSON object."""
    window = _Window(stream)
    first, at = window.next(0)
    if first != "{":
        raise ValueError("a trajectory is a JSON object")
    return _object(window, at, 0)[0]


def _object(window: _Window, at: int, depth: int) -> tuple[TrajectoryMap, int]:
    """The trajectory whose bracket is at `at`, and where it ends."""
    if depth > _DEEPEST:
        raise ValueError("nested too deep")
    found = TrajectoryMap()
    char, at = window.next(at + 1)
    while char != "}":
        char, at = window.next(at + 1) if char == "," else (char, at)
        key, end = window.value(at)
        char, at = window.next(end)
        if char != ":" or not isinstance(key, str):
            raise ValueError("not a JSON object")
        char, at = window.next(at + 1)
        if char == "[" and key == "steps":
            at = _list(window, at, lambda place: _add_step(window, found, place))
        elif char == "[" and key == "subagent_trajectories":
            at = _list(window, at, lambda place: _add_sub(window, found, place, depth))
        else:
            start, (_, at) = at, window.value(at)
            found.head[key] = (start, at)
        char, at = window.next(at)
        if char not in ",}":
            raise ValueError("not a JSON object")
    return found, at + 1


def _list(window: _Window, at: int, take: Callable[[int], int]) -> int:
    """Take each item of the list whose bracket is at `at`; where the list ends."""
    char, at = window.next(at + 1)
    while char != "]":
        char, at = window.next(at + 1) if char == "," else (char, at)
        char, at = window.next(take(at))
        if char not in ",]":
            raise ValueError("not a JSON list")
    return at + 1


def _add_step(window: _Window, found: TrajectoryMap, at: int) -> int:
    _, end = window.value(at)
    found.spans.extend((at, end))
    return end


def _add_sub(window: _Window, found: TrajectoryMap, at: int, depth: int) -> int:
    if window.next(at)[0] != "{":
        return window.value(at)[1]
    sub, end = _object(window, at, depth + 1)
    found.subs.append(sub)
    return end


class PagedTrajectory:
    """An open trajectory file and the map of it, or of one of its sub-agents."""

    def __init__(self, stream: IO[bytes], found: TrajectoryMap) -> None:
        self._stream = stream
        self.map = found

    def __len__(self) -> int:
        return len(self.map)

    @property
    def subs(self) -> Sequence[PagedTrajectory]:
        return [PagedTrajectory(self._stream, sub) for sub in self.map.subs]

    def raw(self, index: int) -> bytes:
        """The JSON of a step, counted from 0."""
        return self._read(self.map.spans[2 * index], self.map.spans[2 * index + 1])

    def step(self, index: int) -> Step:
        """A step, counted from 0. One that does not follow the format becomes a system step with its JSON."""
        data = self.raw(index)
        try:
            return Step.model_validate_json(data)
        except ValidationError as error:
            problem = f"invalid step: {error.errors()[0]['msg']}"
            text = data[:100_000].decode(errors="replace")
            return Step(step_id=index + 1, source="system", message=text, extra={"problem": problem})

    def steps(self, start: int, stop: int) -> Iterator[Step]:
        for index in range(max(start, 0), min(stop, len(self))):
            yield self.step(index)

    def value(self, key: str) -> Any:
        """A value of the trajectory's object other than its steps; None if it is missing or too large."""
        span = self.map.head.get(key)
        if span is None or span[1] - span[0] > _HEAD_LIMIT:
            return None
        try:
            return json.loads(self._read(*span).strip().rstrip(b",").strip())
        except (ValueError, RecursionError):
            return None

    @property
    def agent(self) -> TrajectoryAgent | None:
        try:
            return TrajectoryAgent.model_validate(self.value("agent"))
        except ValidationError:
            return None

    @property
    def final_metrics(self) -> FinalMetrics | None:
        try:
            return FinalMetrics.model_validate(self.value("final_metrics"))
        except ValidationError:
            return None

    def _read(self, start: int, end: int) -> bytes:
        self._stream.seek(start)
        return self._stream.read(end - start)
