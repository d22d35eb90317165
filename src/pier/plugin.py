"""Lookup of plugins (agents, backends): built in, by entry point, or as `module:Class`.

Built-in plugins are `module:attribute` strings, so that listing names imports nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from typing import Any

from pier.errors import UsageError


def load(reference: str) -> Any:
    """Import `module:attribute`."""
    module, _, attribute = reference.partition(":")
    if not module or not attribute:
        raise UsageError(f"invalid reference {reference!r}: expected module:attribute", code="plugin")
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"cannot import {module!r}: {error}", hint=f"pip install the package of {module!r}") from error
    try:
        return getattr(found, attribute)
    except AttributeError:
        raise UsageError(f"module {module!r} has no {attribute!r}", code="plugin") from None


def find(kind: str, name: str, built_in: Mapping[str, str]) -> Any:
    """Load the plugin `name`: built in, `module:Class`, or an entry point of the group `pier.<kind>s`."""
    if name in built_in:
        return load(built_in[name])
    if ":" in name:
        return load(name)
    for point in entry_points(group=f"pier.{kind}s"):
        if point.name == name:
            return point.load()
    known = names(kind, built_in)
    near = nearest(name, known)
    raise UsageError(
        f"unknown {kind} {name!r}; known: {', '.join(known)}",
        hint=f"use {near!r}" if near else f"give your own {kind} as module:Class",
    )


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name closest to `name`, for "did you mean" hints."""
    import difflib

    return next(iter(difflib.get_close_matches(name, list(known), n=1)), None)


def names(kind: str, built_in: Mapping[str, str]) -> list[str]:
    """Return all names that `find` accepts, built-in ones first."""
    others = sorted(point.name for point in entry_points(group=f"pier.{kind}s"))
    return [*built_in, *(name for name in others if name not in built_in)]
