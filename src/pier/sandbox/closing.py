"""Ends several things so that the failure of one keeps none of the others from ending, and is raised afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any


async def close_all(works: Iterable[Awaitable[Any]]) -> None:
    """Await all at once, to their ends. The first failure is raised, with the others as its notes."""
    _raise_first(await asyncio.gather(*works, return_exceptions=True))


async def close_in_turn(*steps: Callable[[], Awaitable[Any]]) -> None:
    """Await one after the other, all of them. The first failure is raised, with the others as its notes."""
    outcomes: list[Any] = []
    for step in steps:
        outcomes += await asyncio.gather(step(), return_exceptions=True)
    _raise_first(outcomes)


def _raise_first(outcomes: list[Any]) -> None:
    failures = [each for each in outcomes if isinstance(each, BaseException)]
    for other in failures[1:]:
        failures[0].add_note(f"also failed: {type(other).__name__}: {other}")
    if failures:
        raise failures[0]
