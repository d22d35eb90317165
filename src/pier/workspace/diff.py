"""The changes in a workspace since its first start: its initial files compared with the current ones.

`.pier/seed/files.json` lists every initial file with its digest; copies of small files allow a diff of their lines. No
link is followed, since the sandbox may have created it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pier.beneath import TreeError, remove
from pier.errors import WorkspaceError
from pier.files import write, write_json
from pier.tree import Entry, Tree
from pier.trial.diff import unified
from pier.workspace.client import call, fetch, is_running
from pier.workspace.workspace import PIER, TASK, Workspace, new_directory

SEED, INDEX, FILES = "seed", "files.json", "files"
_KEPT = 1 << 20
"""Larger files are compared by digest only."""
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class FileChange:
    """One path that differs. `diff` is a unified diff, for text of moderate size."""

    path: str
    kind: Literal["added", "changed", "removed"]
    diff: str = ""


def keep_seed(workspace: Workspace, source: Path | None = None) -> None:
    """Record the current files of the workspace's directory, or of `source`."""
    seed = workspace.pier / SEED
    if seed.exists():
        remove(str(seed))
    (seed / FILES).mkdir(parents=True)
    known: dict[str, str] = {}
    with Tree(source or workspace.root) as tree:
        for entry, mark in _marked(tree):
            known[entry.path] = mark
            if entry.kind == "file" and entry.size <= _KEPT:
                write(seed / FILES / _name(entry.path), tree.read(entry.path, _KEPT), durable=False)
    write_json(seed / INDEX, known, durable=False)


def changes_since_start(workspace: Workspace, source: Path | None = None) -> list[FileChange]:
    """The differences from the recorded initial files, sorted by path."""
    seed = workspace.pier / SEED
    try:
        known: dict[str, str] = json.loads((seed / INDEX).read_text())
    except (OSError, ValueError) as error:
        raise WorkspaceError(
            f"cannot compare {workspace.root}: its initial files were not recorded: {error}", code="no-seed"
        ) from error
    found: list[FileChange] = []
    present: set[str] = set()
    with Tree(source or workspace.root) as tree:
        for entry, mark in _marked(tree):
            present.add(entry.path)
            if mark == known.get(entry.path):
                continue
            kind = "changed" if entry.path in known else "added"
            after = tree.read(entry.path, _KEPT) if entry.kind == "file" and entry.size <= _KEPT else None
            before = _kept(seed, entry.path) if kind == "changed" else b""
            found.append(FileChange(entry.path, kind, _lines(entry.path, before, after)))
    gone = set(known) - present
    found += [FileChange(path, "removed", _lines(path, _kept(seed, path), b"")) for path in gone]
    return sorted(found, key=lambda change: change.path)


def content(tree: Tree) -> Iterator[Entry]:
    """All entries except directories and the workspace's `PIER` and `TASK`."""
    for top in tree.listed():
        if top.path in (PIER, TASK):
            continue
        entries = tree.entries(top.path) if top.kind == "directory" else (top,)
        yield from (entry for entry in entries if entry.kind != "directory")


def _marked(tree: Tree) -> Iterator[tuple[Entry, str]]:
    return ((entry, mark) for entry in content(tree) if (mark := _mark(tree, entry)) is not None)


def _mark(tree: Tree, entry: Entry) -> str | None:
    """A fingerprint of a file or link; None for other entries, and for files that have disappeared."""
    try:
        if entry.kind == "link":
            return f"link {entry.leads}"
        if entry.kind != "file":
            return None
        digest = hashlib.sha256()
        with tree.open(entry.path) as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
            is_executable = os.fstat(stream.fileno()).st_mode & 0o111
    except (OSError, TreeError):
        return None
    return f"{'x' if is_executable else 'f'} {digest.hexdigest()}"


def _name(path: str) -> str:
    return hashlib.sha256(path.encode(errors="surrogateescape")).hexdigest()[:32]


def _kept(seed: Path, path: str) -> bytes | None:
    try:
        return (seed / FILES / _name(path)).read_bytes()
    except OSError:
        return None


def _lines(path: str, before: bytes | None, after: bytes | None) -> str:
    if before is None or after is None or b"\0" in before or b"\0" in after:
        return ""
    return unified(path, before.decode(errors="replace"), after.decode(errors="replace"))


def workspace_changes(workspace: Workspace) -> list[FileChange]:
    """The changes of the workspace's files since the first start, in its directory or its sandbox."""
    if workspace.config.mounted or not is_running(workspace):
        return changes_since_start(workspace)
    scratch = new_directory(workspace.pier / "incoming")
    try:
        fetch(workspace, workspace.config.workdir or "/", scratch / "files")
        return changes_since_start(workspace, scratch / "files")
    finally:
        remove(str(scratch))


def outside_changes(workspace: Workspace) -> list[dict[str, str]]:
    """The changes elsewhere in the sandbox since it was started; none if it is not running."""
    if workspace.is_host or not is_running(workspace):
        return []
    return call(workspace, {"op": "outside"})["changes"]
