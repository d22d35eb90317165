"""Services that rollouts share: opened once, closed by the last user, opened again for users that arrive meanwhile."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pier.rollout.sandboxes import SharedServices
from pier.trial.spec import fewer_collections


async def test_a_user_that_arrives_while_they_close_gets_new_ones() -> None:
    seen: list[str] = []

    @asynccontextmanager
    async def make() -> AsyncIterator[Any]:
        seen.append("opened")
        yield object()
        seen.append("closing")
        await asyncio.sleep(0.05)
        seen.append("closed")

    shared = SharedServices(make)

    async def use_once() -> None:
        async with shared.use(), shared.use():
            pass

    first = asyncio.create_task(use_once())
    while "closing" not in seen:
        await asyncio.sleep(0)
    async with shared.use():
        assert seen == ["opened", "closing", "closed", "opened"]
    await first
    assert shared.opened is None and seen[-1] == "closed"


async def test_services_that_cannot_be_opened_have_no_user() -> None:
    @asynccontextmanager
    async def make() -> AsyncIterator[Any]:
        raise ValueError("no engine")
        yield

    shared = SharedServices(make)
    for _ in range(2):
        with pytest.raises(ValueError, match="no engine"):
            async with shared.use():
                raise AssertionError


@pytest.mark.parametrize(("given", "during"), [((700, 10, 10), (10_000, 10, 10)), ((20_000, 5, 5), (20_000, 5, 5))])
def test_the_callers_collector_is_as_before(given: tuple[int, int, int], during: tuple[int, int, int]) -> None:
    before = gc.get_threshold()
    try:
        gc.set_threshold(*given)
        with fewer_collections(), fewer_collections():
            assert gc.get_threshold() == during
        assert gc.get_threshold() == given
        gc.set_threshold(0)
        with fewer_collections():
            assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)
