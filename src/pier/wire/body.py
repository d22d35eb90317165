"""A request body as text with the positions of its fields: parsed once, and edited and stored by span.

A relayed body reaches the provider as the agent wrote it. Edits replace the text of one top-level field; the recording
stores each element of the big arrays (messages, tools) once. Elements that an earlier body of the conversation begins
with are compared instead of parsed, so a turn costs time only for its new elements.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from json.decoder import WHITESPACE, JSONDecoder  # pyright: ignore[reportAttributeAccessIssue]
from typing import Any

from pier.wire.values import BadRequest, dump

ARRAYS = frozenset({"messages", "input", "contents", "tools", "system"})
"""Top-level arrays whose elements are repeated in the next call."""

MOST_VALUES = 1_000_000
"""Maximum number of JSON values in a body."""

Span = tuple[int, int]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; `ValueError` for a duplicate key, of which the gateway and a provider might read different ones."""
    found = dict(pairs)
    if len(found) != len(pairs):
        left = list(found)  # in the order of their first appearance
        twice = next(key for place, (key, _) in enumerate(pairs) if place == len(left) or key != left[place])
        raise ValueError(f"duplicate key {twice!r}")
    return found


_scan = JSONDecoder(object_pairs_hook=_unique).scan_once  # pyright: ignore[reportAttributeAccessIssue]
_FIELD = re.compile(r'[ \t\r\n]*("[^"\\]*+(?:\\.[^"\\]*+)*+")[ \t\r\n]*:[ \t\r\n]*')
_NAME = 256
_AFTER = frozenset(",] \t\r\n")


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Array:
    """The elements of a big array: their text from the first to the last, their values and positions in the text.
    Values are shared by all bodies that have the array, and must not be changed."""

    text: str
    values: list[Any]
    spans: tuple[Span, ...]
    separator: str | None
    """The text between two elements; None if it varies."""


Earlier = MutableMapping[tuple[str, str], Array]
"""Arrays of earlier bodies, by field name and the beginning of their text."""


@dataclass(frozen=True, slots=True)
class Body:
    """A JSON object, its text, and the positions of its fields and big arrays in the text."""

    text: str
    value: Mapping[str, Any]
    fields: Mapping[str, Span] = field(default_factory=dict)
    arrays: Mapping[str, tuple[Array, int]] = field(default_factory=dict)
    grown: Mapping[str, tuple[Array, int]] = field(default_factory=dict)
    """For each array that shares its first elements with an earlier one: that array, and the number of them."""
    raw: bytes | None = None

    def encode(self) -> bytes:
        return self.text.encode() if self.raw is None else self.raw

    def known(self) -> Earlier:
        """The arrays, for parsing later bodies."""
        return {(name, array.text[:_NAME]): array for name, (array, _) in self.arrays.items()}

    def with_fields(self, **changes: Any) -> Body:
        """The same text with these top-level fields replaced or added; None is written as null."""
        text = self.text
        present = sorted((self.fields[name], name) for name in changes if name in self.fields)
        for (start, end), name in reversed(present):
            text = text[:start] + dump(changes[name]).decode() + text[end:]
        added = {name: value for name, value in changes.items() if name not in self.fields}
        if added:
            at = text.index("{") + 1
            comma = "," if self.fields else ""
            text = text[:at] + dump(added)[1:-1].decode() + comma + text[at:]
        return parse(text.encode(), self.known())


def count_values(raw: bytes, enough: int = MOST_VALUES) -> int:
    """Estimate the number of JSON values in a body by its commas and opening brackets. Those in strings count too,
    unless there are more than `enough`."""
    count = _count(raw)
    return count if count <= enough else _count(_STRING.sub(b"", raw))


def _count(raw: bytes) -> int:
    return len(raw) - len(raw.translate(None, b"[{,"))


_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
"""Also matches unterminated strings: searching for the end from each quote in one would take quadratic time."""
_NARROW, _HALF = bytes(range(0xC4)), bytes(range(0xF0))


def memory_of(raw: bytes, values: int) -> int:
    """Estimate the memory for parsing, recording and sending a body: its bytes twice, its text three times at one, two
    or four bytes a character, depending on the widest one, and its values."""
    width = 1 if not raw.translate(None, _NARROW) else 2 if not raw.translate(None, _HALF) else 4
    return len(raw) * (2 + 3 * width) + _PER_VALUE * values


_PER_VALUE = 256


def parse(raw: bytes, earlier: Earlier | None = None) -> Body:
    """Parse a JSON object; `BadRequest` for anything else."""
    try:
        return _parse(raw, earlier or {})
    except (ValueError, StopIteration, IndexError, RecursionError) as error:
        raise BadRequest(f"the body is not a JSON object: {error or type(error).__name__}") from None


def _parse(raw: bytes, earlier: Earlier) -> Body:
    text = raw.decode()
    at = _skip(text, 0)
    if text[at] != "{":
        raise ValueError("it does not begin with {")
    value: dict[str, Any] = {}
    fields: dict[str, Span] = {}
    arrays: dict[str, tuple[Array, int]] = {}
    grown: dict[str, tuple[Array, int]] = {}
    at = _skip(text, at + 1)
    while text[at] != "}":
        if fields:
            at = _expect(text, at, ",")
        if (found := _FIELD.match(text, at)) is None:
            raise ValueError(f"expected a name and a colon at {at}")
        name, start = _scan(text, found.start(1))[0], found.end()
        if name in fields:
            raise ValueError(f"duplicate key {name!r}")
        if name in ARRAYS and text[start] == "[":
            first = _skip(text, start + 1)
            known, count = _common(text, first, earlier.get((name, text[first : first + _NAME])))
            array, at = _parse_array(text, first, known, count)
            arrays[name], value[name] = (array, first), list(array.values)
            if known:
                grown[name] = known, count
        else:
            value[name], at = _scan(text, start)
        fields[name] = (start, at)
        at = _skip(text, at)
    if _skip(text, at + 1) != len(text):
        raise ValueError(f"unexpected text after the object at {at + 1}")
    return Body(text, value, fields, arrays, grown, raw)


def _common(text: str, first: int, known: Array | None) -> tuple[Array | None, int]:
    """The earlier array and the number of its elements that the array at `first` begins with; None and 0 if none."""
    if known is None or not known.spans:
        return None, 0
    if text.startswith(known.text, first):
        same = len(known.spans)
    else:
        same, most = 0, len(known.spans)
        while same < most:
            middle = (same + most + 1) // 2
            start, end = known.spans[same][0], known.spans[middle - 1][1]
            if text.startswith(known.text[start:end], first + start):
                same = middle
            else:
                most = middle - 1
    while same and text[first + known.spans[same - 1][1] : first + known.spans[same - 1][1] + 1] not in _AFTER:
        same -= 1
    return (known, same) if same else (None, 0)


def _parse_array(text: str, first: int, known: Array | None, count: int) -> tuple[Array, int]:
    """The array whose first element is at `first`, and the position of its end."""
    values: list[Any] = []
    spans: list[Span] = []
    separators: set[str | None] = set()
    at = first
    if known:
        values, spans = known.values[:count], list(known.spans[:count])
        separators = {known.separator} if count > 1 else set()
        at = _skip(text, first + spans[-1][1])
        if text[at] == "]" and count == len(known.spans):
            return known, at + 1
    while text[at] != "]":
        if spans:
            at = _skip(text, _expect(text, at, ","))
            separators.add(text[first + spans[-1][1] : at])
        value, end = _scan(text, at)
        values.append(value)
        spans.append((at - first, end - first))
        at = end if text[end] in ",]" else _skip(text, end)
    whole = text[first : first + spans[-1][1]] if spans else ""
    separator = "," if not separators else separators.pop() if len(separators) == 1 else None
    return Array(whole, values, tuple(spans), separator), at + 1


def _skip(text: str, at: int) -> int:
    return WHITESPACE.match(text, at).end()


def _expect(text: str, at: int, character: str) -> int:
    if text[at] != character:
        raise ValueError(f"expected {character!r} at {at}")
    return at + 1
