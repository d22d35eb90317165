"""A container's control group, as its host sees it: what it counts, and whether somebody has frozen it."""

from __future__ import annotations

import contextlib
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


class ContainerGroup:
    """The control group of the container whose first process is `pid`, in either version of the kernel's interface."""

    def __init__(self, pid: int) -> None:
        self._memory = self._freezer = Path("/nonexistent")
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            below = _ROOT / controllers / path.lstrip("/")
            if "memory" in controllers.split(","):
                self._memory = below / "memory.oom_control"
            elif "freezer" in controllers.split(","):
                self._freezer = below / "freezer.state"
            elif not controllers and (below / "cgroup.freeze").exists():
                self._memory, self._freezer = below / "memory.events", below / "cgroup.freeze"

    def oom_kills(self) -> int:
        """How many processes the limit on memory has killed."""
        try:
            rows = dict(line.split() for line in self._memory.read_text().splitlines())
        except (OSError, ValueError):
            return 0
        return int(rows.get("oom_kill", 0))

    def is_frozen(self) -> bool:
        try:
            return self._freezer.read_text().strip() in ("FROZEN", "FREEZING", "1")
        except OSError:
            return False

    def thaw(self) -> None:
        """Let the processes run on; the older interface does not deliver even SIGKILL before that."""
        with contextlib.suppress(OSError):
            self._freezer.write_text("THAWED" if self._freezer.name == "freezer.state" else "0")
