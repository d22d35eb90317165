"""The private networks of one trial, served by whoever entered its containers: this process, or the helper.

Standard library only: the helper runs it too.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass

from pier.network.dns import Answer, Names
from pier.sandbox.linux.channel import Channel

Places = list[tuple[int, int]]
"""Where a container is: pairs of a network's number and its own number there."""


@dataclass(frozen=True, slots=True)
class Member:
    """A container that joins: the way to its attendant, who answers it for names outside, and its places."""

    channel: Channel
    answer: Answer
    places: Places


class Hub:
    """Private networks and the containers in them. `open` it once, `close` it at any moment."""

    def __init__(self) -> None:
        self._fd = -1
        self._names: Names | None = None

    async def open(self, members: list[Member], names: Mapping[int, Mapping[str, int]]) -> None:
        """Make the networks in `names`, which has for each its names, and link every member to its own."""
        _, (self._fd, resolver) = await members[0].channel.ask({"op": "hub", "networks": len(names)})
        askers = {place: member.answer for member in members for place in member.places}
        self._names = Names(names, askers)
        self._names.serve(resolver)
        await asyncio.gather(
            *(member.channel.ask({"op": "join", "places": member.places}, [self._fd]) for member in members)
        )

    def close(self) -> None:
        """Stop serving; the networks are gone. Idempotent."""
        if self._names is not None:
            self._names.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
