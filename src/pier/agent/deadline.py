"""Runs an agent's command within its time: asks it to end shortly before its deadline, and kills it there.

A command that ends by itself leaves what it started running, as a task that wants a server up asks for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pier.sandbox.contract import OnOutput, Process, Result, Sandbox

GRACE = 10.0
"""At most how many seconds before its deadline an agent is asked to end."""
SHARE = 0.05
"""The part of its time that this may be."""


@dataclass(frozen=True, slots=True)
class Order:
    """One command, and how long it may take. `soft_stop` is the signal that asks it to end."""

    argv: Sequence[str]
    cwd: str
    soft_stop: int
    env: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    stdin: bytes | None = None
    seconds: float | None = None


async def execute(sandbox: Sandbox, order: Order, on_output: OnOutput | None = None) -> Result:
    """Run the command to its end or its deadline; a deadline is reported in the result. A cancel kills its tree."""
    process = await sandbox.spawn(
        list(order.argv),
        cwd=order.cwd,
        env=order.env,
        user=order.user,
        stdin=order.stdin is not None,
        on_output=on_output,
    )
    feeding = asyncio.ensure_future(_feed(process, order.stdin))
    waiting = asyncio.ensure_future(process.wait())
    try:
        return await _until_deadline(process, waiting, order)
    except BaseException:
        await asyncio.shield(process.kill())
        raise
    finally:
        feeding.cancel()
        waiting.cancel()
        await asyncio.gather(feeding, waiting, return_exceptions=True)


async def _feed(process: Process, data: bytes | None) -> None:
    if data is not None:
        await process.write(data)
        await process.close_stdin()


async def _until_deadline(process: Process, waiting: asyncio.Future[Result], order: Order) -> Result:
    if order.seconds is None:
        return await waiting
    grace = min(GRACE, order.seconds * SHARE)
    done, _ = await asyncio.wait({waiting}, timeout=order.seconds - grace)
    if done:
        return waiting.result()
    await process.signal(order.soft_stop)
    await asyncio.wait({waiting}, timeout=grace)
    await process.kill()
    return replace(await waiting, timed_out=True)
