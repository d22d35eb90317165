"""What of an artifact may come to a separate verifier, and what in it could steer that verifier.

An artifact is laid where the agent had it, next to the verifier's own files. A link in it that leads elsewhere would
make the verifier's own files (its tests, an answer in its image) part of the artifact, so it is left out. An artifact
that covers `/tests` or `/logs/verifier` is mixed with the verifier's own files, so of its links only those to its own
regular files stay. Files that
the verifier's interpreter or test runner would load come along, because solutions have honest reasons for them; each is
noted, so that such a reward is never silent.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from pier.tree import Entry, Tree, TreeError
from pier.verifier.folders import TESTS, VERIFIER_LOGS
from pier.verifier.notes import Note
from pier.verifier.shadows import configures, import_root, is_read_by_itself, may_configure, shadowed_module

_OWN = (TESTS, VERIFIER_LOGS)
_CONFIG_LIMIT = 1024 * 1024
"""A configuration file that is larger is noted without a look into it."""


@dataclass(frozen=True, slots=True)
class JudgedArtifact:
    """Paths below the artifact that stay behind, and what is worth knowing. `dropped`: all of it stays behind."""

    left_out: frozenset[str] = frozenset()
    notes: tuple[Note, ...] = ()
    dropped: bool = False


def judge_artifact(kept: Tree, place: str, source: str) -> JudgedArtifact:
    """Judge what was collected to `place` below `kept` and comes from `source`, an absolute path in the sandbox."""
    found = kept.find(place)
    if found is None or found.kind == "other":
        return JudgedArtifact(dropped=True)
    if found.kind == "link":
        return JudgedArtifact(notes=(_left_out(source, found.leads),), dropped=True)
    entries = [found]
    if found.kind == "directory":
        entries.extend(kept.entries(below=place))
    paths = [str(PurePosixPath(source, entry.path[len(place) :].lstrip("/"))) for entry in entries]
    mixed = any(PurePosixPath(own).is_relative_to(source) for own in _OWN)
    files = {path for path, entry in zip(paths, entries, strict=True) if entry.kind == "file" and not _is_own(path)}
    left_out: set[str] = set()
    notes: list[Note] = []
    judged: dict[str, Entry] = {}
    for path, entry in zip(paths, entries, strict=True):
        if entry.kind == "link" and _leads_out(path, entry.leads, source):
            notes.append(_left_out(path, entry.leads))
        elif entry.kind == "link" and mixed and _target(path, entry.leads) not in files:
            notes.append(_left_out(path, entry.leads, "it may lead to the verifier's own files"))
        elif _is_own(path):
            notes.append(Note("tests", "left out of an artifact: this place is the verifier's own", path, stopped=True))
        else:
            judged[path] = entry
            continue
        left_out.add(entry.path[len(place) :].lstrip("/"))
    return JudgedArtifact(frozenset(left_out), (*notes, *_steering(kept, judged)))


def _left_out(path: str, leads: str, why: str = "it leads out of it") -> Note:
    return Note("link", f"left out of an artifact: {why}, to {leads}", path, stopped=True)


def _is_own(path: str) -> bool:
    """Whether a place is the verifier's own."""
    return any(PurePosixPath(path).is_relative_to(own) for own in _OWN)


def _target(path: str, leads: str) -> str:
    """Where a link leads, if nothing on the way is a link."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), leads))


def _leads_out(path: str, leads: str, source: str) -> bool:
    """Whether a link may lead out of the artifact. A way that goes down and up again counts as one that may: what it
    passes may be a link too."""
    parts = [part for part in PurePosixPath(leads).parts if part != "."]
    if leads.startswith("/"):
        return ".." in parts or not PurePosixPath(leads).is_relative_to(source)
    ups = next((number for number, part in enumerate(parts) if part != ".."), len(parts))
    depth = len(PurePosixPath(path).relative_to(source).parts) - 1
    return ups > depth or ".." in parts[ups:]


def _steering(kept: Tree, judged: dict[str, Entry]) -> Iterator[Note]:
    packages = {str(PurePosixPath(path).parent) for path in judged if PurePosixPath(path).name == "__init__.py"}
    for path, entry in judged.items():
        if entry.kind == "directory":
            continue
        if (known := is_read_by_itself(path)) is not None:
            yield Note(known[0], known[1], path)
        elif may_configure(path) and entry.kind == "file" and _configures(kept, entry):
            yield Note("runner", "it configures a test runner", path)
        elif (module := shadowed_module(path)) is not None and import_root(path) not in packages:
            yield Note("module", f"Python may import this in place of the module {module}", path)


def _configures(kept: Tree, entry: Entry) -> bool:
    try:
        return configures(entry.path, kept.read(entry.path, _CONFIG_LIMIT))
    except TreeError:
        return True
