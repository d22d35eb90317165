"""A container's control group, as its host sees it: what it counts, and whether somebody has frozen it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path

from pier.sandbox.linux.channel import Channel

CONTAINER_ENDED = "container_ended"
"""The code of the error that a container's first process is not to be found."""
_ROOT = Path("/sys/fs/cgroup")
_ALL = ["0", "0", "4294967295"]
_WATCH_SECONDS = 1.0
_FROZEN_LOOKS = 5
"""A container that was seen frozen that many times in a row is given up. Engines freeze one for a moment for their own
purposes, such as a commit."""


class ContainerGroup:
    """The control group of the container whose first process is `pid`, in either version of the kernel's interface."""

    def __init__(self, pid: int) -> None:
        self._memory = self._freezer = Path("/nonexistent")
        self._told = Path(f"/proc/{pid}/cgroup").read_text()
        for line in self._told.splitlines():
            _, controllers, path = line.split(":", 2)
            below = _ROOT / controllers / path.lstrip("/")
            if "memory" in controllers.split(","):
                self._memory = below / "memory.oom_control"
            elif "freezer" in controllers.split(","):
                self._freezer = below / "freezer.state"
            elif not controllers and (below / "cgroup.freeze").exists():
                self._memory, self._freezer = below / "memory.events", below / "cgroup.freeze"

        self._users = (_ids(pid), _ids("self"))

    @property
    def has_users_of_its_own(self) -> bool:
        """Whether its root is another user than root here, though that one is the machine's."""
        theirs, ours = self._users
        return theirs != ours and ours == _ALL

    def is_of(self, id: str) -> bool:
        """Whether it is that of the container `id`: engines name groups after it."""
        return id in self._told

    def oom_kills(self) -> int:
        """How many processes the limit on memory has killed."""
        try:
            rows = dict(line.split() for line in self._memory.read_text().splitlines())
        except (OSError, ValueError):
            return 0
        return int(rows.get("oom_kill", 0))

    def kill(self, *pidfds: int) -> None:
        """Kill everything in the container, whether it is frozen or not; a number below 0 stands for no process."""
        for fd in pidfds:
            if fd >= 0:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
        self.thaw()

    def is_frozen(self) -> bool:
        try:
            return self._freezer.read_text().strip() in ("FROZEN", "FREEZING", "1")
        except OSError:
            return False

    def thaw(self) -> None:
        """Let the processes run on; the older interface does not deliver even SIGKILL before that."""
        with contextlib.suppress(OSError):
            self._freezer.write_text("THAWED" if self._freezer.name == "freezer.state" else "0")


def _ids(pid: int | str) -> list[str]:
    return Path(f"/proc/{pid}/uid_map").read_text().split()


async def until_frozen(group: ContainerGroup, channel: Channel) -> bool:
    """Watch a container: True once somebody has frozen it, False when its channel is closed. What is frozen answers
    nothing, so that everybody who asks would wait for as long as somebody else likes."""
    looks = 0
    while not channel.closed and looks < _FROZEN_LOOKS:
        await asyncio.sleep(_WATCH_SECONDS)
        looks = looks + 1 if group.is_frozen() else 0
    return looks == _FROZEN_LOOKS
