"""Reads one big JSON object piece by piece, so that a log which is a single document needs the memory of its largest
element only. A document that was torn gives all that is whole before the tear."""

from __future__ import annotations

import json
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO

from pier.tree import open_regular

_CHUNK = 64 * 1024
_SPACE = " \t\r\n"


def members(path: Path, listed: str) -> Iterator[tuple[str, Any]]:
    """The members of the object in a file; the one named `listed`, an array, comes as one member for each element."""
    with open_regular(path) as file, TextIOWrapper(file, encoding="utf-8", errors="replace") as stream:
        window = _Window(stream)
        try:
            window.expect("{")
            while window.peek() != "}":
                key = window.value()
                window.expect(":")
                if key == listed and window.peek() == "[":
                    yield from ((key, element) for element in _elements(window))
                else:
                    yield key, window.value()
                if window.peek() == ",":
                    window.expect(",")
        except ValueError:
            return


def _elements(window: _Window) -> Iterator[Any]:
    window.expect("[")
    while window.peek() != "]":
        yield window.value()
        if window.peek() == ",":
            window.expect(",")
    window.expect("]")


class _Window:
    """The part of a file that is looked at. `ValueError` where the text is not what it should be, or ends."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._text = ""
        self._at = 0
        self._decoder = json.JSONDecoder()

    def peek(self) -> str:
        """The next character that is not white space."""
        while True:
            while self._at < len(self._text):
                if self._text[self._at] not in _SPACE:
                    return self._text[self._at]
                self._at += 1
            self._more()

    def expect(self, character: str) -> None:
        if self.peek() != character:
            raise ValueError(character)
        self._at += 1

    def value(self) -> Any:
        """The next value. More is read until it is whole, twice as much each time."""
        self.peek()
        while True:
            try:
                found, end = self._decoder.raw_decode(self._text, self._at)
            except ValueError:
                self._more()
                continue
            if end == len(self._text) and not isinstance(found, dict | list | str):
                # A number may go on behind what was read.
                self._more()
                continue
            self._at = end
            return found

    def _more(self) -> None:
        rest = self._text[self._at :]
        added = self._stream.read(max(_CHUNK, len(rest)))
        if not added:
            raise ValueError("the document ends")
        self._text, self._at = rest + added, 0
