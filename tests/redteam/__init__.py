"""Attacks on the grade, the host and the user's secrets. Each route is one row with the outcome that pier promises.

A test declares its route with `@route(...)`. `python -m tests.redteam` writes the table of all routes into the
documentation, and `test_table.py` fails when that table is out of date.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

F = TypeVar("F", bound=Callable[..., object])


@dataclass(frozen=True, slots=True, order=True)
class Route:
    """One attack or fault, and what happens instead of what it was meant to do."""

    section: str
    attack: str
    outcome: str


ROUTES: list[Route] = []


def route(section: str, attack: str, outcome: str) -> Callable[[F], F]:
    """Declare the route that a test tries. `section` is one of `SECTIONS`."""
    if section not in SECTIONS:
        raise ValueError(f"unknown section {section!r}: expected one of {', '.join(SECTIONS)}")
    ROUTES.append(Route(section, attack, outcome))
    return lambda test: test


SECTIONS = {
    "host": "Reaching the host",
    "grading": "Bending the grade",
    "verdicts": "False zeros and lost verdicts",
    "secrets": "Reading or leaking secrets",
    "network": "Leaving the network policy",
    "closed_book": "Leaving the closed book",
    "identity": "Mixing up results",
    "faults": "Hangs and leaks",
}
"""Each section has a title in the docs."""
