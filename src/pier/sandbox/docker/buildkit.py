"""What BuildKit tells of a build: messages of its protocol, of which only steps, their output and errors are read."""

from __future__ import annotations

import base64
from collections.abc import Iterator

_VERTEX, _LOG = 1, 3
_NAME, _CACHED, _COMPLETED = 3, 4, 6
_TEXT = 4


class Trace:
    """Reads the messages of one build; `lines` gives what is new in each."""

    def __init__(self) -> None:
        self._told: set[tuple[str, str]] = set()

    def lines(self, packed: str) -> Iterator[str]:
        """The steps that began, were found in the cache or ended, once each, and what commands print."""
        for number, value in _fields(base64.b64decode(packed)):
            if number == _VERTEX and isinstance(value, bytes):
                yield from self._step(dict(_fields(value)))
            elif number == _LOG and isinstance(value, bytes):
                yield from _text(dict(_fields(value)).get(_TEXT)).splitlines()

    def _step(self, step: dict[int, int | bytes]) -> Iterator[str]:
        state = "cached" if step.get(_CACHED) else "done" if _COMPLETED in step else ""
        name = _text(step.get(_NAME))
        if (name, state) not in self._told:
            self._told.add((name, state))
            yield f"{name} {state}".rstrip()


def _text(value: int | bytes | None) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else ""


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message as they are on the wire: numbers, and bytes that may be messages in turn."""
    at = 0
    while at < len(data):
        key, at = _number(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _number(data, at)
            yield key >> 3, value
        elif kind == 2:
            size, at = _number(data, at)
            yield key >> 3, data[at : at + size]
            at += size
        else:
            at += {1: 8, 5: 4}.get(kind, len(data))


def _number(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    return value, at
