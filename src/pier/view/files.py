"""Reads the files of a trial for its page: texts by their end, JSON, test reports, and lines around one.

Files are opened through `Tree`, so a link that an agent left leads nowhere. A file that is missing is None.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import IO, Any

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
"""`REPORT_LIMIT` is for JSON that tests or an agent wrote, which may take thirty times as much memory."""
_LINES_BEFORE, _LINES_SHOWN, _LONGEST_LINE = 200, 1_000, 20_000


def file_row(entry: Entry) -> dict[str, Any]:
    """A file in a list."""
    return {"path": entry.path, "size": entry.size}


def files_below(tree: Tree, places: list[tuple[str, str]], name: str) -> Iterator[Entry]:
    """The files below the directory of a name in each place, at most `LISTED` per place."""
    for _, prefix in places:
        if (found := tree.find(f"{prefix}{name}")) is None or found.kind != "directory":
            continue
        count = 0
        for entry in tree.entries(f"{prefix}{name}", limit=1_000_000):
            if entry.kind == "file":
                yield entry
                count += 1
            if count >= LISTED:
                break


def read_text(tree: Tree, path: str, *, tail: bool = True, limit: int = LOG_BYTES) -> dict[str, Any] | None:
    """A text file, or the last (else the first) part of a large one; None if it is missing or not a regular file."""
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
    """The objects in the first lines of a file of JSON lines; lines that are broken are skipped."""
    text = (read_text(tree, path, tail=False, limit=_LINES_LIMIT) or {}).get("text", "")
    rows = (_parsed(line) for line in text.splitlines()[:LISTED])
    return [row for row in rows if isinstance(row, dict)]


def _parsed(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def read_tests(tree: Tree, folder: str) -> list[dict[str, Any]]:
    """The tests of a CTRF report (common test report format)."""
    results = (tree.read_object(f"{folder}/ctrf.json", REPORT_LIMIT) or {}).get("results")
    tests = results.get("tests") if isinstance(results, dict) else None
    keys = ("name", "status", "duration", "message", "trace")
    rows = [each for each in tests if isinstance(each, dict)] if isinstance(tests, list) else []
    return [{key: each.get(key) for key in keys} for each in rows[:LISTED]]


def read_lines(tree: Tree, path: str, line: int) -> dict[str, Any]:
    """Lines of a file around one of them; OSError or `TreeError` if there is no such file."""
    first = max(1, line - _LINES_BEFORE)
    with tree.open(path) as stream:
        size = stream.seek(0, 2)
        stream.seek(0)
        shown = islice(_lines_of(stream), first - 1, first - 1 + _LINES_SHOWN)
        lines = [each.decode(errors="replace").rstrip("\r\n") for each in shown]
    return {"path": path, "size": size, "line": line, "first": first, "lines": lines}


def _lines_of(stream: IO[bytes]) -> Iterator[bytes]:
    """The lines of a file, each without what is longer than a screen."""
    while line := stream.readline(_LONGEST_LINE):
        rest = line
        while rest and not rest.endswith(b"\n"):
            rest = stream.readline(_LONGEST_LINE)
        yield line
