"""Whether canonical values hold what their types say: a body may have anything where a dialect has text.

The checks are made once from the types themselves and are a few comparisons for each field. What may be any JSON (a
schema, a field that only one dialect knows) is not looked into.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

Check = Callable[[Any], bool]

_KINDS = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}


def fault(value: Any) -> str | None:
    """Where a canonical value holds a value that its type does not allow, as text; None if it does not."""
    return None if _check(type(value))(value) else _find(value, type(value), "")


@cache
def _check(hint: Any) -> Check:
    """A check whether a value is of a type."""
    origin = get_origin(hint)
    if origin is Literal:
        allowed = frozenset(get_args(hint))
        return lambda value: isinstance(value, str) and value in allowed
    if origin in (Union, types.UnionType):
        return _check_union(get_args(hint))
    if origin is tuple:
        return _check_tuple(get_args(hint)[0])
    if origin is not None and issubclass(origin, Mapping):
        return lambda value: isinstance(value, dict)
    if is_dataclass(hint):
        return _check_class(hint)
    if hint is float:
        return lambda value: type(value) is float or type(value) is int
    return lambda value: type(value) is hint


def _check_tuple(hint: Any) -> Check:
    """Of plain values, of which there may be very many, only the set of their types is looked at."""
    if hint in (int, str, float):
        allowed = {hint} | ({int} if hint is float else set())
        return lambda value: type(value) is tuple and set(map(type, value)) <= allowed
    check = _check(hint)
    return lambda value: type(value) is tuple and all(map(check, value))


def _check_union(hints: tuple[Any, ...]) -> Check:
    classes = {hint: _check(hint) for hint in hints if is_dataclass(hint)}
    others = [_check(hint) for hint in hints if not is_dataclass(hint)]

    def check(value: Any) -> bool:
        known = classes.get(type(value))
        return known(value) if known is not None else any(other(value) for other in others)

    return check


def _check_class(kind: Any) -> Check:
    """Of fields that hold plain values only the types matter, and which types they may have together is remembered."""
    plain = [(name, _check(hint)) for name, hint in _hints(kind) if _is_plain(hint)]
    deep = [(name, _check(hint)) for name, hint in _hints(kind) if not _is_plain(hint)]
    names = [name for name, _ in plain]
    sound: set[tuple[type, ...]] = set()

    def check(value: Any) -> bool:
        if type(value) is not kind:
            return False
        shape = tuple([type(getattr(value, name)) for name in names])
        if shape not in sound:
            if not all(holds(getattr(value, name)) for name, holds in plain):
                return False
            sound.add(shape)
        for name, holds in deep:  # noqa: SIM110 (the long way takes half the time)
            if not holds(getattr(value, name)):
                return False
        return True

    return check


def _is_plain(hint: Any) -> bool:
    """Whether its type says all of a value."""
    if get_origin(hint) in (Union, types.UnionType):
        return all(map(_is_plain, get_args(hint)))
    return hint in (str, int, float, bool, types.NoneType)


@cache
def _hints(kind: Any) -> list[tuple[str, Any]]:
    hints = get_type_hints(kind)
    return [(field.name, hints[field.name]) for field in fields(kind)]


def _find(value: Any, hint: Any, where: str) -> str:
    kind: Any = type(value)
    if is_dataclass(kind):
        for name, inner in _hints(kind):
            if not _check(inner)(getattr(value, name)):
                return _find(getattr(value, name), inner, f"{where}.{name}" if where else name)
    if kind is tuple and (items := _items_of(hint)) is not None:
        for number, item in enumerate(value):
            if not _check(items)(item):
                return _find(item, items, f"{where}[{number}]")
    return f"{where} is {_KINDS.get(kind, 'something else')}"


def _items_of(hint: Any) -> Any:
    """What a tuple of this type holds; of a union, what its tuple does."""
    choices = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return next((get_args(choice)[0] for choice in choices if get_origin(choice) is tuple), None)
