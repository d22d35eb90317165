"""Reads single steps of a trajectory file that may have hundreds of megabytes.

`scan` passes over the file once and records the byte range of each step, those of embedded sub-agents included;
`PagedTrajectory` then reads single steps. Any JSON layout is accepted, not only pier's own.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from pier.trajectory.model import FinalMetrics, Step, TrajectoryAgent

M = TypeVar("M", bound=BaseModel)
_CHUNK = 1 << 20
_STEP_LIMIT = 1 << 30
_HEAD_LIMIT = 4 << 20
_DEEPEST = 16
_SPACE = re.compile(r"[ \t\r\n]*")
_DECODE = json.JSONDecoder(strict=False).raw_decode


@dataclass(slots=True)
class TrajectoryMap:
    """Byte ranges of the parts of a trajectory in its file: `spans` has a start and an end for each step, `head` those
    of the object's other values by key, `subs` the embedded sub-agents."""

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


class JsonWindow:
    """A position in a JSON file, and a buffer of the text after it with one character per byte, so that offsets in the
    text are offsets in the file. Methods raise `ValueError` if the file is invalid or ends."""

    def __init__(self, stream: IO[bytes], chunk: int = _CHUNK) -> None:
        self._stream = stream
        self._chunk = chunk
        self._base = self._at = 0
        self._text = ""
        self._is_last = False

    def _extend(self) -> None:
        """Read more text after the position; the buffer doubles for a long value."""
        if self._is_last:
            raise ValueError("not a whole JSON object")
        size = max(self._chunk, len(self._text) - (self._at - self._base))
        data = self._stream.read(size)
        self._is_last = len(data) < size
        self._text = self._text[self._at - self._base :] + data.decode("latin-1")
        self._base = self._at
        if len(self._text) > _STEP_LIMIT:
            raise ValueError(f"a value of more than {_STEP_LIMIT} bytes")

    def peek(self) -> str:
        """Move to the next character that is not white space, and return it."""
        while True:
            found = _SPACE.match(self._text, self._at - self._base)
            self._at = self._base + (found.end() if found else 0)
            if self._at - self._base < len(self._text):
                return self._text[self._at - self._base]
            self._extend()

    def expect(self, character: str) -> None:
        if self.peek() != character:
            raise ValueError(f"not JSON: expected {character} at {self._at}")
        self._at += 1

    def skip(self) -> tuple[int, int]:
        """Skip a value, and return its start and end."""
        self.peek()
        while True:
            try:
                _, end = _DECODE(self._text, self._at - self._base)
                # A number at the end of a torn file may lack digits.
                if end < len(self._text) or (self._is_last and not self._text[-1].isdigit()):
                    start, self._at = self._at, self._base + end
                    return start, self._at
            except (ValueError, IndexError, StopIteration):
                pass
            except RecursionError:
                raise ValueError("nested too deep") from None
            self._extend()

    def value(self) -> Any:
        start, end = self.skip()
        text = self._text[start - self._base : end - self._base]
        return json.loads(text.encode("latin-1").decode(errors="replace"), strict=False)

    def elements(self, brackets: str = "[]") -> Iterator[None]:
        """Stop before each element of a list. The caller must read or skip it before the next."""
        self.expect(brackets[0])
        if self.peek() != brackets[1]:
            yield
            while self.peek() == ",":
                self.expect(",")
                yield
        self.expect(brackets[1])

    def members(self) -> Iterator[str]:
        """Yield the keys of an object. The caller must read or skip each value before the next."""
        for _ in self.elements("{}"):
            key = self.value()
            self.expect(":")
            if not isinstance(key, str):
                raise ValueError("not a JSON object")
            yield key


def scan(stream: IO[bytes]) -> TrajectoryMap:
    """Locate the parts of a trajectory; `ValueError` if the file is not one complete JSON object."""
    return _scan_object(JsonWindow(stream), 0)


def _scan_object(window: JsonWindow, depth: int) -> TrajectoryMap:
    if depth > _DEEPEST:
        raise ValueError("nested too deep")
    found = TrajectoryMap()
    for key in window.members():
        if key == "steps" and window.peek() == "[":
            for _ in window.elements():
                found.spans.extend(window.skip())
        elif key == "subagent_trajectories" and window.peek() == "[":
            for _ in window.elements():
                if window.peek() == "{":
                    found.subs.append(_scan_object(window, depth + 1))
                else:
                    window.skip()
        else:
            found.head[key] = window.skip()
    return found


class PagedTrajectory:
    """An open trajectory file and its map, or that of one of its sub-agents."""

    def __init__(self, stream: IO[bytes], found: TrajectoryMap) -> None:
        self._stream = stream
        self.map = found

    def __len__(self) -> int:
        return len(self.map)

    @property
    def subs(self) -> Sequence[PagedTrajectory]:
        return [PagedTrajectory(self._stream, sub) for sub in self.map.subs]

    def raw(self, index: int) -> bytes:
        """The JSON of the step at a 0-based index."""
        return self._read(self.map.spans[2 * index], self.map.spans[2 * index + 1])

    def step(self, index: int) -> Step:
        """The step at a 0-based index. An invalid one becomes a system step with its JSON."""
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
        """A value of the trajectory other than its steps; None if it is missing, invalid or too large."""
        span = self.map.head.get(key)
        if span is None or span[1] - span[0] > _HEAD_LIMIT:
            return None
        try:
            return json.loads(self._read(*span))
        except (ValueError, RecursionError):
            return None

    @property
    def agent(self) -> TrajectoryAgent | None:
        return self._model(TrajectoryAgent, "agent")

    @property
    def final_metrics(self) -> FinalMetrics | None:
        return self._model(FinalMetrics, "final_metrics")

    def _model(self, kind: type[M], key: str) -> M | None:
        try:
            return kind.model_validate(self.value(key))
        except ValidationError:
            return None

    def _read(self, start: int, end: int) -> bytes:
        self._stream.seek(start)
        return self._stream.read(end - start)
