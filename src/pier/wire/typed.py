"""Checks that canonical values hold what their types say: what is parsed comes from agents and providers."""

from __future__ import annotations

import types
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_TYPE_NAMES = {
    dict: "an object",
    list: "a list",
    str: "text",
    bool: "true or false",
    int: "a number",
    float: "a number",
}


@dataclass(frozen=True, slots=True)
class _Allowed:
    """The values that a type allows: their classes, the texts among them (None: all), and the items of a tuple."""

    kinds: frozenset[Any]
    texts: frozenset[str] | None = None
    items: _Allowed | None = None


def type_error_in(value: Any) -> str | None:
    """Where a canonical value holds a value that its type does not allow, as text; None if it does not."""
    problem = _type_error(value, _Allowed(frozenset({type(value)})))
    return problem.removeprefix(".") if problem else None


def _type_error(value: Any, allowed: _Allowed) -> str | None:
    kind = type(value)
    if kind not in allowed.kinds or (kind is str and allowed.texts is not None and value not in allowed.texts):
        return f" is {_TYPE_NAMES.get(kind, 'something else')}"
    if kind is tuple and allowed.items and not (_PLAIN >= allowed.items.kinds >= set(map(type, value))):
        for number, item in enumerate(value):
            if problem := _type_error(item, allowed.items):
                return f"[{number}]{problem}"
    elif kind not in _PLAIN:
        for name, inner in _fields(kind):
            held = getattr(value, name)
            if type(held) in _LEAVES and type(held) in inner.kinds and (inner.texts is None or held in inner.texts):
                continue
            if problem := _type_error(held, inner):
                return f".{name}{problem}"
    return None


_PLAIN = frozenset({int, str, float})
"""Of these a tuple may hold very many."""
_LEAVES = _PLAIN | {bool, types.NoneType}
"""Nothing is inside of these."""


def _allowed(hint: Any) -> _Allowed:
    kinds, texts, items = set[Any](), None, None
    for choice in get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,):
        origin = get_origin(choice)
        if origin is Literal:
            kinds, texts = kinds | {str}, frozenset(get_args(choice))
        elif origin is tuple:
            kinds, items = kinds | {tuple}, _allowed(get_args(choice)[0])
        else:
            kinds |= {dict} if origin else {int, float} if choice is float else {choice}
    return _Allowed(frozenset(kinds), texts, items)


@cache
def _fields(kind: Any) -> tuple[tuple[str, _Allowed], ...]:
    hints = get_type_hints(kind) if is_dataclass(kind) else {}
    return tuple((field.name, _allowed(hints[field.name])) for field in (fields(kind) if hints else ()))
