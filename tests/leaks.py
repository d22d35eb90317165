"""What of the machine's state a test run may not change: processes, mounts, namespaces, cgroups, containers."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

_MARK = "PIER_TEST_SESSION"


@dataclass(frozen=True)
class Footprint:
    """What could be leaked, as it is now."""

    processes: frozenset[str]
    mounts: frozenset[str]
    cgroups: frozenset[str]

    @classmethod
    def take(cls) -> Footprint:
        return cls(_descendants(os.getpid()), _mounts(), _cgroups())

    def beyond(self, other: Footprint) -> list[str]:
        """What is here and was not in `other`."""
        rows = [f"process {row}" for row in sorted(self.processes - other.processes)]
        rows += [f"mount {row}" for row in sorted(self.mounts - other.mounts)]
        return rows + [f"cgroup {row}" for row in sorted(self.cgroups - other.cgroups)]


def wait_until_clean(before: Footprint, seconds: float) -> list[str]:
    """What is left beyond `before`, after giving what is ending up to `seconds` to end."""
    deadline = time.monotonic() + seconds
    while (left := Footprint.take().beyond(before)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def _descendants(root: int) -> frozenset[str]:
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
        except OSError:
            continue
        pid = int(entry.name)
        fields = stat.rpartition(")")[2].split()
        parents[pid] = int(fields[1])
        names[pid] = stat[stat.index("(") + 1 : stat.rindex(")")]
    found = set()
    for pid in parents:
        above = pid
        while above in parents and above != root:
            above = parents[above]
        if above == root and pid != root:
            found.add(f"{pid} {names[pid]}")
    orphans = {f"{pid} {names[pid]}" for pid in names if names[pid].startswith("pier-") and _is_mine(pid)}
    return frozenset(found | orphans)


def mark_session() -> None:
    """Mark this process and whatever it starts, so that what others run beside it is not taken for its own."""
    os.environ[_MARK] = str(os.getpid())


def _is_mine(pid: int) -> bool:
    wanted = f"{_MARK}={os.environ[_MARK]}".encode()
    try:
        return wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def _mounts() -> frozenset[str]:
    """Mounts of pier's, but for those of the tests' own Docker engines: another worker's engine may well be running."""
    rows = Path("/proc/self/mountinfo").read_text().splitlines()
    return frozenset(row.split()[4] for row in rows if "pier" in row and "/pier-engine-" not in row)


def _cgroups() -> frozenset[str]:
    """Control groups of pier's without a process: those with one are in use, perhaps by another worker."""
    found = set()
    for base in ("/sys/fs/cgroup", "/sys/fs/cgroup/memory", "/sys/fs/cgroup/pids", "/sys/fs/cgroup/cpu"):
        for path in Path(base).glob("pier*/*") if Path(base).is_dir() else ():
            if path.is_dir() and not _members(path):
                found.add(str(path))
    return frozenset(found)


def _members(group: Path) -> str:
    try:
        return (group / "cgroup.procs").read_text()
    except OSError:
        return "gone"
