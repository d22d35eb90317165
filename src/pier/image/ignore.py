"""`.dockerignore`: which files of a build context a Dockerfile cannot see. The last pattern that matches decides."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable
from pathlib import Path


class Ignore:
    """Patterns in order; `!pattern` takes files back in."""

    def __init__(self, lines: Iterable[str] = ()) -> None:
        self.lines = [line for raw in lines if (line := _clean(raw))]
        self._rules = [(_regex(line.removeprefix("!")), line.startswith("!")) for line in self.lines]
        self.has_exceptions = any(taken_back for _, taken_back in self._rules)

    def excludes(self, path: str) -> bool:
        """Whether the file at `path` (relative, with slashes) is left out; a match of a parent counts."""
        parts = path.split("/")
        prefixes = ["/".join(parts[: count + 1]) for count in range(len(parts))]
        excluded = False
        for pattern, taken_back in self._rules:
            if excluded == taken_back and any(pattern.fullmatch(prefix) for prefix in prefixes):
                excluded = not taken_back
        return excluded


def read_ignore(context: Path, dockerfile: Path) -> Ignore:
    """The ignore file beside the Dockerfile if it has one of its own, else the context's."""
    for path in (dockerfile.with_name(f"{dockerfile.name}.dockerignore"), context / ".dockerignore"):
        if path.is_file():
            return Ignore(path.read_text(encoding="utf-8-sig", errors="replace").splitlines())
    return Ignore()


def _clean(line: str) -> str:
    if line.startswith("#"):
        return ""
    line = line.strip()
    mark = "!" if line.startswith("!") else ""
    line = line.removeprefix("!").strip()
    if not line:
        return ""
    path = posixpath.normpath(line).lstrip("/")
    return "" if path in (".", "") else mark + path


def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile(glob_regex(pattern, stars=True), re.DOTALL)


def glob_regex(pattern: str, *, stars: bool = False) -> str:
    """A path pattern as a regular expression: `*` and `?` stop at slashes, `**` (with `stars`) does not."""
    out, at = "", 0
    while at < len(pattern):
        char = pattern[at]
        if stars and pattern.startswith("**", at):
            at += 2
            if pattern.startswith("/", at):
                at += 1
                out += "(?:.*/)?"
            else:
                out += ".*"
            continue
        at += 1
        if char == "*":
            out += "[^/]*"
        elif char == "?":
            out += "[^/]"
        elif char == "[" and (end := pattern.find("]", at + 1)) > 0:
            inner = pattern[at:end].replace("\\", "\\\\")
            out += f"[{'^' + inner[1:] if inner.startswith(('^', '!')) else inner}]"
            at = end + 1
        elif char == "\\" and at < len(pattern):
            out += re.escape(pattern[at])
            at += 1
        else:
            out += re.escape(char)
    return out
