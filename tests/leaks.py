"""What of the machine's state a test run may not change: processes, mounts and control groups."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

_MARK = "PIER_TEST_SESSION"
_TEST = "PYTEST_CURRENT_TEST"
"""pytest's variable: the running test and its phase, which every process that it starts inherits."""


@dataclass(frozen=True)
class Footprint:
    """What could be leaked, as it is now."""

    processes: frozenset[str]
    mounts: frozenset[str]
    cgroups: frozenset[str]

    @classmethod
    def take(cls) -> Footprint:
        return cls(frozenset(_processes()), _mounts(), _cgroups())

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


def wait_for_orphans(module: str, seconds: float) -> list[str]:
    """Processes that tests of `module` started in their bodies and left behind, after giving them up to `seconds` to
    end. What a fixture started may serve other modules too."""
    deadline = time.monotonic() + seconds
    while left := [row for row in _processes() if f" ({module}::" in row and row.endswith(" (call))")]:
        if time.monotonic() > deadline:
            return left
        time.sleep(0.1)
    return []


def mark_session() -> None:
    """Mark this process and whatever it starts, so that what others run beside it is not taken for its own."""
    os.environ[_MARK] = str(os.getpid())


def _processes() -> list[str]:
    """Number, name and, if known, test of each process that this one started: its descendants, and orphans with its
    mark. An orphan whose environment this user cannot read is not found."""
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path("/proc", entry, "stat").read_text()
            except OSError:
                continue
            parents[int(entry)] = int(stat.rpartition(")")[2].split()[1])
            names[int(entry)] = stat[stat.index("(") + 1 : stat.rindex(")")]
    root = os.getpid()
    rows = []
    for pid, name in names.items():
        environ = _environ(pid)
        if pid != root and (environ.get(_MARK) == str(root) or root in _above(pid, parents)):
            rows.append(f"{pid} {name}" + (f" ({environ[_TEST]})" if _TEST in environ else ""))
    return rows


def _above(pid: int, parents: dict[int, int]) -> set[int]:
    found: set[int] = set()
    while pid in parents and pid not in found:
        found.add(pid)
        pid = parents[pid]
    return found


def _environ(pid: int) -> dict[str, str]:
    """The environment that a process was started with."""
    try:
        rows = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(row.split("=", 1) for row in rows if "=" in row)


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
