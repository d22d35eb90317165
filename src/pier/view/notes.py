"""Notes and labels that people attach to a trial or to one of its steps, in `notes.jsonl` in the trial's directory.

The file is append-only: a line adds a note, or removes one by its id.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from secrets import token_hex
from typing import Any

from pier.errors import UsageError
from pier.tree import Tree, TreeError

FILE = "notes.jsonl"
_LIMIT = 16 << 20
_LONGEST = 20_000
_MOST_LABELS, _LONGEST_LABEL = 20, 60


@dataclass(frozen=True, slots=True)
class StepNote:
    """One note. `step` is the number of a step in the part `part`, or None for a note on the whole trial."""

    id: str
    at: str
    text: str
    labels: tuple[str, ...] = ()
    step: int | None = None
    part: str = ""


def read_notes(trial: Path) -> list[StepNote]:
    """The notes of a trial, oldest first. Invalid lines are skipped."""
    try:
        with Tree(trial.resolve()) as tree:
            data = tree.read(FILE, _LIMIT)
    except (OSError, TreeError):
        return []
    found: dict[str, StepNote] = {}
    for line in data.splitlines():
        try:
            value = json.loads(line)
            if value.get("removed"):
                found.pop(value["id"], None)
            else:
                found[str(value["id"])] = _note(value)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
    return list(found.values())


def _note(value: dict[str, Any]) -> StepNote:
    labels = value.get("labels")
    return StepNote(
        id=str(value["id"]),
        at=str(value.get("at") or ""),
        text=str(value.get("text") or "")[:_LONGEST],
        labels=tuple(str(each)[:_LONGEST_LABEL] for each in labels[:_MOST_LABELS]) if isinstance(labels, list) else (),
        step=value["step"] if isinstance(value.get("step"), int) else None,
        part=str(value.get("part") or ""),
    )


def add_note(trial: Path, value: dict[str, Any]) -> StepNote:
    """Add a note with `text`, `labels`, or both; `UsageError` if it has neither or is too long."""
    text, labels = str(value.get("text") or "").strip(), value.get("labels") or []
    if not isinstance(labels, list) or len(labels) > _MOST_LABELS or len(text) > _LONGEST:
        raise UsageError(f"invalid note: expected at most {_LONGEST} characters and {_MOST_LABELS} labels")
    words = [word for each in labels if (word := str(each).strip()[:_LONGEST_LABEL])]
    if not text and not words:
        raise UsageError("invalid note: expected a text or a label")
    now = datetime.now(UTC).isoformat(timespec="seconds")
    note = _note({**value, "id": token_hex(6), "at": now, "text": text, "labels": words})
    _append(trial, {key: each for key, each in asdict(note).items() if each not in (None, "", ())})
    return note


def remove_note(trial: Path, id: str) -> None:
    """Remove a note; `UsageError` if the id is unknown."""
    if id not in {note.id for note in read_notes(trial)}:
        raise UsageError(f"unknown note {id!r}")
    _append(trial, {"id": id, "removed": True, "at": datetime.now(UTC).isoformat(timespec="seconds")})


def _append(trial: Path, line: dict[str, Any]) -> None:
    data = json.dumps(line, ensure_ascii=False).encode(errors="replace") + b"\n"
    with Tree(trial.resolve()) as tree, tree.reached(FILE) as path:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        fd = os.open(path, flags, 0o644)
        try:
            os.write(fd, data)
        finally:
            os.close(fd)
