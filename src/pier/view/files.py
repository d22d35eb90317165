"""Reads the files of a trial for its page: the tail of a text, JSON lines, test reports, and the lines around one.

Files are opened through `Tree`, which follows no link. A missing file is None.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import IO, Any

from pier.job.view import step_places
from pier.tree import Entry, Tree, TreeError

PICTURES = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".gif": "image/gif",
    ".webp": "image/webp",
}
LOG_BYTES = 200_000
LISTED = 2_000
JSON_LIMIT, REPORT_LIMIT, _LINES_LIMIT = 64 << 20, 8 << 20, 2_000_000
"""`REPORT_LIMIT` bounds JSON written by tests or an agent: parsed, it may take thirty times its size in memory."""
_LINES_BEFORE, _LINES_SHOWN, _LONGEST_LINE = 200, 1_000, 20_000


def file_stamp(path: Path) -> str:
    """A stamp that changes when a file does; empty if the file is missing."""
    try:
        status = path.lstat()
    except OSError:
        return ""
    return f"{status.st_ino}.{status.st_size}.{status.st_mtime_ns}"


def file_row(entry: Entry) -> dict[str, Any]:
    return {"path": entry.path, "size": entry.size}


def files_below(tree: Tree, name: str) -> Iterator[Entry]:
    """The files below the directory `name` of a trial and of each of its steps, at most `LISTED` for each."""
    for place in step_places(tree):
        if (found := tree.find(f"{place}{name}")) is not None and found.kind == "directory":
            entries = tree.entries(found.path, limit=1_000_000)
            yield from islice((entry for entry in entries if entry.kind == "file"), LISTED)


def read_text(tree: Tree, path: str, *, tail: bool = True, limit: int = LOG_BYTES) -> dict[str, Any] | None:
    """A text file, or the last part (with `tail=False` the first) of a large one; None if it is missing or not a
    regular file."""
    try:
        with tree.open(path) as stream:
            size = stream.seek(0, 2)
            stream.seek(max(0, size - limit) if tail else 0)
            data = stream.read(limit)
    except (OSError, TreeError):
        return None
    about = {"path": path, "size": size, "cut": max(0, size - limit), "tail": tail}
    return about | {"text": data.decode(errors="replace")}


def json_lines(tree: Tree, path: str) -> list[dict[str, Any]]:
    """The objects in the first lines of a JSON Lines file; broken lines are skipped."""
    text = (read_text(tree, path, tail=False, limit=_LINES_LIMIT) or {}).get("text", "")
    rows: list[Any] = []
    for line in text.splitlines()[:LISTED]:
        with suppress(ValueError, RecursionError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict)]


def read_tests(tree: Tree, folder: str) -> list[dict[str, Any]]:
    """The tests of a CTRF report (Common Test Report Format)."""
    results = (tree.read_object(f"{folder}/ctrf.json", REPORT_LIMIT) or {}).get("results")
    tests = results.get("tests") if isinstance(results, dict) else None
    keys = ("name", "status", "duration", "message", "trace")
    rows = [each for each in tests if isinstance(each, dict)] if isinstance(tests, list) else []
    return [{key: each.get(key) for key in keys} for each in rows[:LISTED]]


def read_lines(tree: Tree, path: str, line: int) -> dict[str, Any]:
    """Lines of a file around `line`; OSError or `TreeError` if the file is missing."""
    first = max(1, line - _LINES_BEFORE)
    with tree.open(path) as stream:
        size = stream.seek(0, 2)
        stream.seek(0)
        shown = islice(_lines_of(stream), first - 1, first - 1 + _LINES_SHOWN)
        lines = [each.decode(errors="replace").rstrip("\r\n") for each in shown]
    return {"path": path, "size": size, "line": line, "first": first, "lines": lines}


def _lines_of(stream: IO[bytes]) -> Iterator[bytes]:
    """The lines of a file, each truncated to `_LONGEST_LINE`."""
    while line := stream.readline(_LONGEST_LINE):
        rest = line
        while rest and not rest.endswith(b"\n"):
            rest = stream.readline(_LONGEST_LINE)
        yield line
