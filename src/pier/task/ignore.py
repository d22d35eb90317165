"""The patterns of a `.gitignore` file, as far as a single file at the root of a task needs them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

DEFAULT_PATTERNS = ("__pycache__/", "*.pyc", ".DS_Store", "*.swp", "*.swo", "*~")


@dataclass(frozen=True, slots=True)
class _Rule:
    pattern: re.Pattern[str]
    ignore: bool


class IgnoreRules:
    """Says which files below a directory are ignored. The last rule that matches decides."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._rules = [rule for line in lines if (rule := _parse(line)) is not None]

    def ignores(self, path: str) -> bool:
        """Whether the file `path` (relative, with `/`) is ignored."""
        ignored = False
        for rule in self._rules:
            if rule.pattern.fullmatch(path):
                ignored = rule.ignore
        return ignored


def _parse(line: str) -> _Rule | None:
    text = line.rstrip("\n")
    if text.startswith("#"):
        return None
    text = re.sub(r"(?<!\\)\s+$", "", text)
    if not text or text == "/":
        return None
    negated = text.startswith("!")
    text = text[1:] if negated else text
    if text.startswith(("\\!", "\\#")):
        text = text[1:]
    only_directory = text.endswith("/")
    text = text.rstrip("/") if only_directory else text
    anchored = "/" in text
    body = _translate(text.lstrip("/"))
    prefix = "" if anchored else "(?:.*/)?"
    below = "/.*" if only_directory else "(?:/.*)?"
    try:
        return _Rule(re.compile(f"{prefix}{body}{below}", re.DOTALL), not negated)
    except re.error:
        return None


def _translate(pattern: str) -> str:
    segments = pattern.split("/")
    out = ""
    for index, segment in enumerate(segments):
        last = index == len(segments) - 1
        if segment == "**":
            out += ".+" if last else "(?:.*/)?"
            continue
        out += _segment(segment) + ("" if last else "/")
    return out


def _segment(text: str) -> str:
    out, index = "", 0
    while index < len(text):
        char = text[index]
        if char == "*":
            out += "[^/]*"
        elif char == "?":
            out += "[^/]"
        elif char == "\\" and index + 1 < len(text):
            index += 1
            out += re.escape(text[index])
        elif char == "[" and (end := text.find("]", index + 2)) > 0:
            inner = text[index + 1 : end]
            inner = "^" + inner[1:] if inner[0] in "!^" else inner
            out += "[" + inner.replace("\\", "\\\\") + "]"
            index = end
        else:
            out += re.escape(char)
        index += 1
    return out
