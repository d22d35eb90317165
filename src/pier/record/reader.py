"""Reads a recording: the calls of a session with their full bodies, as they were on the wire.

The file consists of JSON lines, appended to while the session runs; `docs/reference/recordings.md` has the format. A
torn last line is a call in progress, never an error; a line that lacks only its newline is read. A call without an end
was interrupted. `Reader.poll` reads new lines only, so a running session can be followed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pier import files
from pier.errors import PierError, UsageError
from pier.record import FILE_NAMES, RECORDING
from pier.tree import Tree, find_files, open_regular
from pier.wire.body import count_values
from pier.wire.sse import Framer, data_of, events_of, name_of
from pier.wire.turn import Usage
from pier.wire.values import json_object


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes and the time of their arrival."""

    at: float
    data: bytes


@dataclass(frozen=True, slots=True)
class Event:
    """One server-sent event; `at` is the arrival time of its last byte."""

    at: float
    name: str | None
    data: str


@dataclass(slots=True)
class RecordedAnswer:
    """An answer of an upstream, or to the agent. A body that was not streamed is one chunk."""

    at: float
    status: int
    headers: Mapping[str, str]
    streamed: bool
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return b"".join(chunk.data for chunk in self.chunks)

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Event]:
        """The events of a stream in order, without an unfinished last one."""
        framer, events = Framer(), list[Event]()
        for chunk in self.chunks:
            for event in events_of(framer.feed(chunk.data)):
                if (data := data_of(event)) is not None:
                    events.append(Event(chunk.at, name_of(event), data.decode(errors="replace")))
        return events


@dataclass
class RecordedAttempt:
    """One request to an upstream. `body` is the one that was sent there."""

    at: float
    pieces: tuple[bytes, ...]
    provider: str
    dialect: str
    url: str
    model: str | None = None
    dropped: tuple[str, ...] = ()
    """The names of the agent's headers and fields that were not sent there."""
    answer: RecordedAnswer | None = None
    error: str | None = None
    wait: float | None = None
    fault: str | None = None

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)


@dataclass
class Call:
    """One request of the agent and its outcome, which is `interrupted` if the file has no end for it."""

    number: int
    at: float
    pieces: tuple[bytes, ...]
    kind: str
    """`generate`, `count_tokens`, `models`, `model`, `probe` or `unknown`."""
    dialect: str
    path: str
    headers: Mapping[str, str]
    model: str | None = None
    """The model that the agent named."""
    stream: bool = False
    attempts: list[RecordedAttempt] = field(default_factory=list)
    edits: list[Mapping[str, Any]] = field(default_factory=list)
    notes: list[Mapping[str, Any]] = field(default_factory=list)
    delivered: RecordedAnswer | None = None
    added: list[Chunk] = field(default_factory=list)
    """Bytes that the gateway sent after an upstream's answer was cut off."""
    outcome: str = "interrupted"
    error: str | None = None
    status: int | None = None
    usage: Usage | None = None
    fault: str | None = None
    """The blame if there is no whole answer (see `pier.wire.faults`)."""
    ended: float | None = None

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    @cached_property
    def request(self) -> Mapping[str, Any]:
        """The request's body, parsed; empty when it is not a JSON object."""
        return json_object(self.body)

    @property
    def answer(self) -> RecordedAnswer | None:
        """The answer that the agent received, in the agent's dialect."""
        found = self.delivered or (self.attempts[-1].answer if self.attempts else None)
        if found and self.added:
            return replace(found, chunks=[*found.chunks, *self.added])
        return found

    @property
    def upstream(self) -> RecordedAttempt | None:
        """The attempt that was answered; None for a policy, a script or a refusal."""
        return self.attempts[-1] if self.attempts else None


@dataclass(slots=True)
class Recording:
    """A recording as far as it was read. `sessions` has one entry for each time the file was opened for writing."""

    path: Path
    sessions: list[Mapping[str, Any]] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    closed: str | None = None

    def generations(self) -> list[Call]:
        """The calls that requested a turn of a model."""
        return [call for call in self.calls if call.kind == "generate"]


LIMIT = 512 << 20
"""Default limit in bytes for a recording and its requests."""
_PER_PIECE, _PER_VALUE = 64, 256
_MANY = 10_000
"""Lines with fewer JSON values are not counted towards the limit."""


class RecordingTooLarge(PierError):
    """Reading the recording would exceed the caller's memory limit. The agent determines its size."""

    blame = "agent"
    code = "recording_too_large"


class Reader:
    """Follows one recording. `most` limits the bytes of the file, of its requests, which may repeat a stored message
    many times, and of values in long lines; `RecordingTooLarge` is raised beyond it."""

    def __init__(self, path: Path, most: int | None = LIMIT) -> None:
        self.recording = Recording(path)
        self._most = most
        self._requested = 0
        """Bytes of all requests, plus an allowance for each of their pieces and each value of a long line."""
        self._offset = 0
        self._blobs: dict[int, bytes] = {}
        self._lists: dict[int, list[int]] = {}
        self._open: dict[int, Call] = {}

    def poll(self) -> list[Call]:
        """Read new lines; return the calls that ended in them, in the order of their ends."""
        ended: list[Call] = []
        with open_regular(self.recording.path) as stream:
            self._check_size(os.fstat(stream.fileno()).st_size)
            stream.seek(self._offset)
            for line in stream:
                if not files.is_whole(line):
                    break
                self._offset += len(line)
                if call := self._read(line):
                    ended.append(call)
        return ended

    def _check_size(self, size: int) -> None:
        if self._most is not None and size > self._most:
            path, most = self.recording.path, self._most >> 20
            raise RecordingTooLarge(f"cannot read the recording {path}: more than {most} MB of memory are needed")

    def _read(self, line: bytes) -> Call | None:
        if line.startswith(b'{"t":"blob"') and (start := line.find(b'"json":', 0, 64)) > 0:
            try:
                self._blobs[json.loads(line[:start].rstrip(b",") + b"}")["n"]] = line.rstrip(b"\n")[start + 7 : -1]
            except ValueError:
                pass
            return None
        if self._most is not None and (values := count_values(line, _MANY)) > _MANY:
            self._requested += _PER_VALUE * values
            self._check_size(self._offset + self._requested)
        try:
            value = json.loads(line)
        except ValueError:
            return None
        return self._take(value) if isinstance(value, dict) else None

    def _take(self, value: dict[str, Any]) -> Call | None:
        kind = value.pop("t", None)
        if kind == "session":
            self._blobs, self._lists, self._open = {}, {0: []}, {}
            self.recording.sessions.append(value)
            self.recording.closed = None
        elif kind == "blob":
            self._blobs[value["n"]] = value["text"].encode()
        elif kind == "list":
            base, length = value["from"]
            self._lists[value["n"]] = self._lists[base][:length] + value["add"]
        elif kind == "close":
            self.recording.closed = value["reason"]
        elif kind == "call":
            known = {name: value[name] for name in ("kind", "dialect", "path", "headers", "model") if name in value}
            number, pieces = len(self.recording.calls) + 1, self._pieces(value["body"])
            call = Call(number, value["at"], pieces, **known, stream=bool(value.get("stream")))
            self._open[value["c"]] = call
            self.recording.calls.append(call)
        elif call := self._open.get(value.pop("c", 0)):
            return self._grow(call, kind, value)
        return None

    def _grow(self, call: Call, kind: str | None, value: dict[str, Any]) -> Call | None:
        at = value.pop("at")
        match kind:
            case "attempt":
                pieces = call.pieces if value["body"] is None else self._pieces(value["body"])
                facts = (value.get(name, "") for name in ("provider", "dialect", "url"))
                dropped = tuple(value.get("dropped", ()))
                call.attempts.append(RecordedAttempt(at, pieces, *facts, model=value.get("model"), dropped=dropped))
            case "failed" if call.attempts:
                last = call.attempts[-1]
                last.error, last.wait, last.fault = value["error"], value["wait"], value.get("fault")
            case "status":
                side = value.pop("side")
                answer = RecordedAnswer(at, **value)
                if side == "upstream" and call.attempts:
                    call.attempts[-1].answer = answer
                else:
                    call.delivered = answer
            case "chunk" if value["side"] == "added":
                call.added.append(Chunk(at, value["text"].encode(errors="surrogateescape")))
            case "chunk":
                upstream = value["side"] == "upstream" and call.attempts
                answer = call.attempts[-1].answer if upstream else call.delivered
                if answer and value.get("same"):
                    source = call.attempts[-1].answer if call.attempts else None
                    answer.chunks.append(Chunk(at, source.chunks[-1].data if source and source.chunks else b""))
                elif answer:
                    answer.chunks.append(Chunk(at, value["text"].encode(errors="surrogateescape")))
            case "edits":
                call.edits.extend(value["edits"])
            case "note":
                call.notes.append(value)
            case "end":
                call.outcome, call.status, call.error = value["outcome"], value["status"], value["error"]
                call.usage = Usage(**value["usage"]) if value["usage"] else None
                call.fault = value.get("fault")
                call.ended = at
                return call
        return None

    def _pieces(self, pieces: list[Any]) -> tuple[bytes, ...]:
        found: list[bytes] = []
        for piece in pieces:
            if isinstance(piece, str):
                found.append(piece.encode(errors="surrogateescape"))
            elif "blob" in piece:
                found.append(self._blobs[piece["blob"]])
            else:
                number, length = piece["list"]
                separator = piece["sep"].encode()
                for index, blob in enumerate(self._lists[number][:length]):
                    found += [separator, self._blobs[blob]] if index else [self._blobs[blob]]
        self._requested += sum(map(len, found)) + _PER_PIECE * len(found)
        self._check_size(self._offset + self._requested)
        return tuple(found)


def find(path: Path) -> Path:
    """The recording at `path`: the file itself, or the one in a trial's directory."""
    if path.is_file():
        return path
    with Tree(path.resolve()) as tree:
        for name in (*FILE_NAMES, f"agent/{RECORDING}"):
            if (found := tree.find(name)) is not None and found.kind == "file":
                return path / name
    deeper = sorted(found for name in FILE_NAMES for found in find_files(path, name))
    if len(deeper) == 1:
        return deeper[0]
    if deeper:
        raise UsageError(f"there are {len(deeper)} recordings below {path}", hint=f"choose one, e.g. {deeper[0]}")
    raise UsageError(f"no recording found at {path}", hint="give a recording, or a trial directory that has one")


def read(path: Path, most: int | None = LIMIT) -> Recording:
    """Read the recording at `path`, a file or a trial's directory. `RecordingTooLarge` if that takes more than `most`
    bytes of memory; None disables the limit."""
    reader = Reader(find(path), most)
    reader.poll()
    return reader.recording


def call_times(path: Path, limit: int = 64 << 20) -> dict[int, tuple[float, float]]:
    """Start and end times of a recording's calls by number, read without their bodies. Calls beyond `limit` bytes are
    omitted."""
    found: dict[int, tuple[float, float]] = {}
    numbers: dict[int, int] = {}
    with open_regular(path) as stream:
        for line in stream:
            kind = line[:12]
            if kind.startswith((b'{"t":"call"', b'{"t":"end"', b'{"t":"sess')) and line.endswith(b"\n"):
                try:
                    value = json.loads(line)
                    if value["t"] == "session":
                        numbers = {}
                    elif value["t"] == "call":
                        numbers[value["c"]] = len(found) + 1
                        found[len(found) + 1] = (value["at"], 0.0)
                    elif (number := numbers.get(value["c"])) is not None:
                        found[number] = (found[number][0], value["at"])
                except (ValueError, KeyError, TypeError):
                    continue
            if stream.tell() > limit:
                break
    return found
