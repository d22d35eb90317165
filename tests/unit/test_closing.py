"""Whatever fails at the end of several things, all of them end, and no failure is lost."""

from __future__ import annotations

import asyncio

import pytest

from pier.lease import close_all, close_in_turn


class Things:
    def __init__(self) -> None:
        self.ended: list[str] = []

    async def end(self, name: str, *, fails: bool = False) -> None:
        await asyncio.sleep(0)
        self.ended.append(name)
        if fails:
            raise OSError(f"{name} failed")


async def test_all_at_once() -> None:
    things = Things()
    with pytest.raises(OSError, match="b failed") as caught:
        await close_all([things.end("a"), things.end("b", fails=True), things.end("c", fails=True), things.end("d")])
    assert things.ended == ["a", "b", "c", "d"]
    assert caught.value.__notes__ == ["also failed: OSError: c failed"]
    await close_all([])


async def test_in_turn() -> None:
    things = Things()
    with pytest.raises(OSError, match="a failed"):
        await close_in_turn(lambda: things.end("a", fails=True), lambda: things.end("b"))
    assert things.ended == ["a", "b"]
