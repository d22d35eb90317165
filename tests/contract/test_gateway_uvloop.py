"""The gateway on uvloop's event loop, where `pier gateway serve` runs it: the same HTTP, bursts, budgets and ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.contract.test_gateway_budgets import *  # noqa: F403
from tests.contract.test_gateway_http import *  # noqa: F403
from tests.contract.test_gateway_relay import *  # noqa: F403
from tests.fault.test_gateway_bursts import *  # noqa: F403
from tests.fault.test_gateway_leaving import *  # noqa: F403

uvloop: Any = pytest.importorskip("uvloop", reason="uvloop is not installed")


@pytest.fixture(scope="module")
def event_loop_policy() -> Any:
    return uvloop.EventLoopPolicy()


async def test_it_is_the_other_loop() -> None:
    assert not isinstance(asyncio.get_running_loop(), asyncio.BaseEventLoop)
