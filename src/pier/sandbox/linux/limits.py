"""Limits that hold for all of a sandbox together: memory, processes and cpu by control groups, disk by measuring.

`find_cgroups` says where groups can be made: a delegated or root-owned cgroup v2 tree that has the controllers, else
writable v1 hierarchies, else nowhere (None). A `ControlGroup` is a few directories called `pier/<id>`; everything is
done by plain file operations, so a process that can import nothing more can still join one. `DiskWatch` keeps a sandbox
below its limit where the file system has no quota for it.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pier.errors import SandboxError
from pier.sandbox.linux.channel import Channel

if TYPE_CHECKING:
    from pier.sandbox.contract import Limits

_CONTROLLERS = ("memory", "pids", "cpu")
_LIMITED = {"memory": "memory", "pids": "processes", "cpu": "cpus"}
"""The limit that each controller keeps."""
_PERIOD = 100_000
Setting = tuple[str, str, bool]
"""A file of a group, what is written to it, and whether it must exist: not every kernel limits swap."""


@dataclass(frozen=True, slots=True)
class Hierarchies:
    """Where groups can be made: for each controller the directory that new ones go into."""

    version: int
    parents: Mapping[str, Path]

    @property
    def limits(self) -> frozenset[str]:
        """The fields of `Limits` that groups made here enforce."""
        return frozenset(_LIMITED[controller] for controller in self.parents)

    def plan(self, id: str, limits: Limits, *, own_processes: int = 1) -> dict[str, list[Setting]]:
        """The directories that make up the group `id` with these limits, and what to write into each. `own_processes`
        are pier's own inside, which the limit does not count."""
        plan: dict[str, list[Setting]] = {}
        for controller, parent in self.parents.items():
            if getattr(limits, _LIMITED[controller]) is not None:
                plan.setdefault(f"{parent}/{id}", []).extend(_settings(self.version, controller, limits, own_processes))
        return plan


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """The directories of one group. They can be written down and made into a `Group` again by a sweeper."""

    paths: tuple[str, ...]

    @property
    def files(self) -> tuple[str, ...]:
        """The files that move a process into the group when its id is written there."""
        return tuple(f"{path}/cgroup.procs" for path in self.paths)

    def members(self) -> set[int]:
        """The processes in the group now."""
        found: set[int] = set()
        for name in self.files:
            found.update(int(row) for row in _read(name).split())
        return found

    def oom_kills(self) -> int:
        """How many processes the kernel killed because the group was out of memory."""
        for path in self.paths:
            for name in ("memory.events", "memory.oom_control"):
                for row in _read(f"{path}/{name}").splitlines():
                    if row.startswith("oom_kill "):
                        return int(row.split()[1])
        return 0

    def kill(self) -> None:
        """Kill all members once. v2 does it at one stroke; on v1 a forking member may escape: call until empty."""
        for path in self.paths:
            try:
                _write(f"{path}/cgroup.kill", "1")
            except OSError:
                continue
            return
        for pid in self.members():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def remove(self, seconds: float = 10.0) -> bool:
        """Kill what is inside and remove the directories; False if they could not be removed in time."""
        deadline = time.monotonic() + seconds
        left = [path for path in self.paths if not _rmdir(path)]
        while left and time.monotonic() < deadline:
            self.kill()
            time.sleep(0.005)
            left = [path for path in left if not _rmdir(path)]
        return not left


def find_cgroups(mountinfo: str | None = None) -> Hierarchies | None:
    """Where this process can make groups with limits, or None."""
    mounts = list(_mounts(mountinfo if mountinfo is not None else Path("/proc/self/mountinfo").read_text()))
    unified = [where for kind, where, _ in mounts if kind == "cgroup2"]
    for mount in unified:
        for base in _ancestors(mount):
            if (parent := _enable(base)) is not None:
                return Hierarchies(2, {name: parent for name in _CONTROLLERS if name in _words(parent)})
    parents = {}
    for kind, where, options in mounts:
        for controller in _CONTROLLERS:
            if kind == "cgroup" and controller in options and (parent := _open_v1(where)):
                parents[controller] = parent
    return Hierarchies(1, parents) if parents else None


def _mounts(text: str) -> Iterable[tuple[str, Path, list[str]]]:
    for row in text.splitlines():
        left, _, right = row.partition(" - ")
        kind, _, options = right.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            yield kind, Path(left.split()[4]), options.split(",")


def _ancestors(mount: Path) -> Iterable[Path]:
    """The directories above this process in a v2 tree, nearest first; only those can hold a group for it."""
    own = next((row[3:] for row in _read("/proc/self/cgroup").splitlines() if row.startswith("0::")), "/")
    path = mount / own.lstrip("/")
    while path != mount and mount in path.parents:
        yield path
        path = path.parent
    yield mount


def _words(path: Path) -> list[str]:
    return _read(str(path / "cgroup.subtree_control")).split()


def _enable(base: Path) -> Path | None:
    """`base/pier` with the controllers handed down to its children, or None if that is not possible here."""
    offered = _read(str(base / "cgroup.controllers")).split()
    if "memory" not in offered or "pids" not in offered:
        return None
    wanted = " ".join(f"+{name}" for name in _CONTROLLERS if name in offered)
    parent = base / "pier"
    try:
        _write(f"{base}/cgroup.subtree_control", wanted)
        parent.mkdir(exist_ok=True)
        _write(f"{parent}/cgroup.subtree_control", wanted)
    except OSError:
        return None
    return parent if os.access(parent, os.W_OK) and os.access(base / "cgroup.procs", os.W_OK) else None


def _open_v1(mount: Path) -> Path | None:
    parent = mount / "pier"
    try:
        parent.mkdir(exist_ok=True)
    except OSError:
        return None
    return parent if os.access(parent, os.W_OK) else None


def _settings(version: int, controller: str, limits: Limits, own: int) -> Iterator[Setting]:
    if controller == "pids" and limits.processes is not None:
        yield "pids.max", str(limits.processes + own), True
    if controller == "memory" and limits.memory is not None:
        size = str(limits.memory)
        yield f"memory.{'max' if version == 2 else 'limit_in_bytes'}", size, True
        yield ("memory.swap.max", "0", False) if version == 2 else ("memory.memsw.limit_in_bytes", size, False)
    if controller == "cpu" and limits.cpus is not None:
        quota = max(1000, round(limits.cpus * _PERIOD))
        if version == 2:
            yield "cpu.max", f"{quota} {_PERIOD}", True
        else:
            yield "cpu.cfs_period_us", str(_PERIOD), True
            yield "cpu.cfs_quota_us", str(quota), True


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _read(name: str) -> str:
    try:
        with open(name, "rb", buffering=0) as stream:
            return stream.readall().decode()
    except OSError:
        return ""


def _rmdir(path: str) -> bool:
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno in (errno.EBUSY, errno.ENOTEMPTY):
            return False
        raise
    return True


_WATCH_SECONDS = 0.5
_MEASURE_SECONDS = 10.0
_LARGE = 1 << 30
"""A limit from which on measuring waits for a sign that it may be passed."""
_LITTLE = 64 << 20
"""Bytes of free space below which a disk counts as full; a quarter of the limit if that is less."""


class DiskWatch:
    """Kills everything inside whenever what it wrote takes more than `limit` bytes. `free` says how much space the disk
    has left (None if that is unknown), `measure` how much the sandbox takes."""

    def __init__(
        self,
        channel: Channel,
        limit: int,
        free: Callable[[], Awaitable[int | None]],
        measure: Callable[[], Awaitable[int]],
    ) -> None:
        self.kills = 0
        self._was_full = False
        self._channel = channel
        self._limit = limit
        self._free = free
        self._measure = measure
        self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        """To measure costs much. Under a large limit it is done when the disk lost so much that the limit may be
        passed, and now and then, since others may have freed as much meanwhile."""
        loop = asyncio.get_running_loop()
        pause, used, most, due = _WATCH_SECONDS, 0, 0, loop.time() + _MEASURE_SECONDS
        while not self._channel.closed:
            await asyncio.sleep(pause)
            began = loop.time()
            try:
                free = await self._look() or 0
                most = max(most, free)
                if self._limit >= _LARGE and used + most - free <= self._limit and began < due:
                    continue
                used = await self._measure()
                most, due = free, began + _MEASURE_SECONDS
                if used > self._limit:
                    self.kills += 1
                    await self._channel.ask({"op": "kill_all"})
            except (SandboxError, OSError):
                continue
            pause = max(_WATCH_SECONDS, 10 * (loop.time() - began))

    async def _look(self) -> int | None:
        free = await self._free()
        self._was_full |= free is not None and free < min(_LITTLE, self._limit // 4)
        return free

    async def was_full(self) -> bool:
        """Whether the disk was found with hardly any space left, now or before."""
        with suppress(SandboxError, OSError):
            await self._look()
        return self._was_full

    async def stop(self) -> None:
        self._watching.cancel()
        await asyncio.wait([self._watching])


def free_bytes(directory: Path) -> int:
    """How much a user may still write where a directory is, or will be."""
    while not directory.exists():
        directory = directory.parent
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize
