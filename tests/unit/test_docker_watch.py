"""When a container counts as paused for good."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from pier.sandbox.docker import container
from pier.sandbox.docker.container import until_frozen
from pier.sandbox.linux.channel import Channel


class Looks:
    """A control group that is frozen as often as it is said, and then closes what is watched."""

    def __init__(self, frozen: list[bool], channel: Channel) -> None:
        self.frozen = frozen
        self.channel = channel

    def is_frozen(self) -> bool:
        if not self.frozen:
            self.channel.close("the test is over")
            return False
        return self.frozen.pop(0)


@pytest.mark.parametrize(
    ("looks", "given_up"),
    [([True] * 5, True), ([True] * 4 + [False] + [True] * 4 + [False], False), ([False] * 9, False)],
)
async def test_only_a_long_pause_is_given_up(
    looks: list[bool], given_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(container, "_WATCH_SECONDS", 0)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = Channel(ours, "gone")
    watched: Any = Looks(looks, channel)
    assert await until_frozen(watched, channel) == given_up
    channel.close()
    theirs.close()
