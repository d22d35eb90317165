"""Notes of a grading in addition to its verdict."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Note:
    """Something that could have steered the verdict. `stopped`: it was undone before the verifier ran."""

    kind: str
    detail: str
    path: str | None = None
    stopped: bool = False


NOTE_LIMIT = 100
"""How many notes of one kind a result carries; an agent may change a million files."""


def limited(notes: list[Note]) -> list[Note]:
    """At most `NOTE_LIMIT` notes of each kind, with a count in place of the rest."""
    kept: list[Note] = []
    seen: dict[str, int] = {}
    for note in notes:
        seen[note.kind] = seen.get(note.kind, 0) + 1
        if seen[note.kind] <= NOTE_LIMIT:
            kept.append(note)
    kept += [Note(kind, f"{n - NOTE_LIMIT} more of this kind") for kind, n in seen.items() if n > NOTE_LIMIT]
    return kept
