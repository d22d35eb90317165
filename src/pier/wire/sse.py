"""Reads events as nearly all providers write them: many at once, and those of a long text by what they have in common.

Whatever is written otherwise is left to those who read event by event; nothing that is not JSON gets through here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from json.decoder import JSONDecoder
from typing import Any

DONE = object()
"""Stands for the word with which OpenAI's streams end."""
_scan = JSONDecoder().scan_once  # pyright: ignore[reportAttributeAccessIssue]
_TEXT = re.compile(
    r'"(?:content|text|partial_json|thinking|reasoning_content|reasoning|arguments)": ?"((?:[^"\\]|\\.)*+)"'
)
"""The pieces of a text in all dialects; nothing that says how an answer stands has such a name."""


def plain(text: str) -> list[Any] | None:
    """The data of whole events; None if any is written otherwise."""
    if "\r" in text:
        return None
    values = []
    pieces = text.split("\n\n")
    pieces.pop()
    for piece in pieces:
        if piece.startswith("data: "):
            at = 6
        elif piece.startswith("event: ") and piece.startswith("\ndata: ", at := piece.find("\n")):
            at += 7
        else:
            return None
        try:
            value, end = _scan(piece, at)
        except (ValueError, StopIteration, RecursionError):
            value, end = DONE, at + len("[DONE]")
            if not piece.endswith("[DONE]"):
                return None
        if end != len(piece) or piece.find("\n", at) >= 0:
            return None
        values.append(value)
    return values


@dataclass(frozen=True, slots=True)
class Alike:
    """How events are written that differ in one text only: all before the text, all after it."""

    head: str
    tail: str

    @staticmethod
    def of(event: str) -> Alike | None:
        """After an event without its empty line; None if it has no such text."""
        found = _TEXT.search(event)
        return Alike(event[: found.start(1)], event[found.end(1) :] + "\n\n") if found else None

    def without(self, text: str) -> str | None:
        """Whole events without the first to the last that is written so; None if they do not follow each other, or if
        any has a text that is not a string."""
        start, end = text.find(self.head), text.rfind(self.tail) + len(self.tail)
        if start < 0 or (start and text[start - 2 : start] != "\n\n") or end < start + len(self.head) + len(self.tail):
            return None
        inner = text[start + len(self.head) : end - len(self.tail)]
        texts = inner.split(self.tail + self.head)
        return text[:start] + text[end:] if _are_strings(texts) else None


def _are_strings(texts: list[str]) -> bool:
    """Whether each would be a JSON string between quotes. All are read as one array, in which none can hide: no quote
    in them ends a string, no backslash at their end goes on in the next."""
    bare = "\n".join(texts)
    if bare.count("\n") >= len(texts):
        return False
    if "\\" in bare:
        bare = bare.replace("\\\\", "").replace('\\"', "")
    if '"' in bare or "\\\n" in bare or bare.endswith("\\"):
        return False
    try:
        values, _ = _scan('["' + '","'.join(texts) + '"]', 0)
    except ValueError:
        return False
    return len(values) == len(texts)
