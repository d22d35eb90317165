"""Services that rollouts share: opened once, closed by the last user, opened again for users that arrive meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pier.rollout.sandboxes import SharedServices


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
