"""A request body as bytes with a map: parsed once, edited and stored by the span, never encoded again.

A relayed body reaches the provider as the agent wrote it. Edits replace the bytes of one top-level field; the
recording takes the elements of the big arrays (messages, tools) apart so that each is stored once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from json.decoder import WHITESPACE, JSONDecoder, scanstring  # pyright: ignore[reportAttributeAccessIssue]
from typing import Any

from pier.gateway.dialect.contract import BadRequest

ARRAYS = frozenset({"messages", "input", "contents", "tools", "system"})
"""The top-level arrays whose elements come again in the next call."""

Span = tuple[int, int]
_scan = JSONDecoder().scan_once  # pyright: ignore[reportAttributeAccessIssue]


@dataclass(frozen=True, slots=True)
class Body:
    """A JSON object, its text, and where in the text its fields and the elements of its big arrays are."""

    text: str
    value: Mapping[str, Any]
    fields: Mapping[str, Span] = field(default_factory=dict)
    elements: Mapping[str, tuple[Span, ...]] = field(default_factory=dict)

    def encode(self) -> bytes:
        return self.text.encode()

    def with_fields(self, **changes: Any) -> Body:
        """The same text but for these top-level fields; None removes nothing, it is written as null."""
        text = self.text
        present = sorted((self.fields[name], name) for name in changes if name in self.fields)
        for (start, end), name in reversed(present):
            text = text[:start] + dump(changes[name]).decode() + text[end:]
        added = {name: value for name, value in changes.items() if name not in self.fields}
        if added:
            at = text.index("{") + 1
            comma = "," if self.fields else ""
            text = text[:at] + dump(added)[1:-1].decode() + comma + text[at:]
        return parse(text.encode())


def dump(value: Any) -> bytes:
    """JSON as bytes; also of text with half a character in it, which cut-off tool outputs have."""
    try:
        return json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return json.dumps(value).encode()


def parse(raw: bytes) -> Body:
    """Read a JSON object; `BadRequest` if it is none."""
    try:
        return _parse(raw.decode())
    except (ValueError, StopIteration, IndexError, RecursionError) as error:
        raise BadRequest(f"the body is not a JSON object: {error or type(error).__name__}") from None


def _parse(text: str) -> Body:
    at = _skip(text, 0)
    if text[at] != "{":
        raise ValueError("it does not begin with {")
    value: dict[str, Any] = {}
    fields: dict[str, Span] = {}
    elements: dict[str, tuple[Span, ...]] = {}
    at = _skip(text, at + 1)
    while text[at] != "}":
        if fields:
            at = _skip(text, _expect(text, at, ","))
        if text[at] != '"':
            raise ValueError(f"a name was expected at {at}")
        name, at = scanstring(text, at + 1, True)
        start = _skip(text, _expect(text, _skip(text, at), ":"))
        if name in ARRAYS and text[start] == "[":
            value[name], elements[name], at = _parse_array(text, start)
        else:
            value[name], at = _scan(text, start)
        fields[name] = (start, at)
        at = _skip(text, at)
    if _skip(text, at + 1) != len(text):
        raise ValueError(f"there is more after the object at {at + 1}")
    return Body(text, value, fields, elements)


def _parse_array(text: str, start: int) -> tuple[list[Any], tuple[Span, ...], int]:
    values: list[Any] = []
    spans: list[Span] = []
    at = _skip(text, start + 1)
    while text[at] != "]":
        if spans:
            at = _skip(text, _expect(text, at, ","))
        value, end = _scan(text, at)
        values.append(value)
        spans.append((at, end))
        at = end if text[end] in ",]" else _skip(text, end)
    return values, tuple(spans), at + 1


def _skip(text: str, at: int) -> int:
    if text[at : at + 1] > " ":
        return at
    if text[at : at + 1] == " " and text[at + 1 : at + 2] > " ":
        return at + 1
    return WHITESPACE.match(text, at).end()


def _expect(text: str, at: int, character: str) -> int:
    if text[at] != character:
        raise ValueError(f"{character!r} was expected at {at}")
    return at + 1
