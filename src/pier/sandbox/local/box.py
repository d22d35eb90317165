"""One life of a sandbox: its directory, its init and what limits it, from the lease to the last trace.

What a spec means for a local sandbox: the plan that its init carries out.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import math
import os
import re
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pier.beneath import remove_some
from pier.errors import SandboxError
from pier.lease import Lease
from pier.network.plumbing import RESOLV_CONF
from pier.sandbox.contract import Limits, Mount, SandboxSpec
from pier.sandbox.host import HostRoot, masks
from pier.sandbox.linux.channel import Answer, Channel, close_all
from pier.sandbox.linux.limits import ControlGroup, DiskWatch, Hierarchies, free_bytes
from pier.sandbox.linux.wire import OUT_OF_MEMORY
from pier.sandbox.linux.zygotes import STOP_SECONDS, Zygotes, kill_and_wait

KIND = "sandbox"
_START_SECONDS = 120
_PAUSE = 0.02
_FEW = 32
"""Files and directories that are removed without asking anybody."""
_TRIES = 3000
_OWN_PROCESSES = 3
"""The threads of init and a worker, which the limit on processes does not count."""


class LocalBox:
    """A process tree in its namespaces. `start` it once, `stop` it at any moment."""

    def __init__(self, lease: Lease, zygotes: Zygotes, base: Path, id: str | None = None) -> None:
        self.id = id or secrets.token_hex(6)
        self.directory = base / self.id
        self.channel: Channel
        self._lease = lease
        self._zygotes = zygotes
        self._asked: asyncio.Future[Answer] | None = None
        self._pidfd = -1
        self._group: ControlGroup | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._oom_kills = 0
        self._disk: DiskWatch | None = None
        self.proof: dict[str, str] = {}
        self.watching: list[int] = []
        self.pid = 0
        self.shifted = True
        """Whether ids inside are others outside; root's are not where a file system cannot be mounted so."""

    async def start(
        self,
        plan: dict[str, Any],
        layers: list[str],
        cage: tuple[Hierarchies, Limits] | None,
        keep: Path | None = None,
    ) -> None:
        """Make everything; when this raises or is cancelled, `stop` removes what was made. `cage`: where to make a
        control group, and with which limits."""
        groups = cage[0].plan(self.id, cage[1], own_processes=_OWN_PROCESSES) if cage else {}
        kept = {"keep": str(keep)} if keep else {}
        self._lease.write(KIND, self.id, {"directory": str(self.directory), "groups": list(groups), **kept})
        make_private(self.directory)
        message = {"op": "start", "directory": str(self.directory), "plan": plan, "layers": layers, "groups": groups}
        zygote = await self._zygotes.pick()
        self._group = ControlGroup(tuple(groups)) if groups else None
        self._asked = zygote.ask(message)
        try:
            async with asyncio.timeout(_START_SECONDS):
                self._meet(await asyncio.shield(self._asked))
                answer, self.watching = await self.channel.wait(0)
                self.proof = answer["proof"]
        except TimeoutError:
            problem = f"the sandbox {self.id} did not start in {_START_SECONDS} s"
            raise SandboxError(problem, code="start_timeout") from None

    def _meet(self, answer: Answer) -> None:
        """Take over the init that a zygote gave."""
        message, (self._pidfd, control) = answer
        self.pid, self.shifted = message["pid"], message["shifted"]
        self.channel = Channel(socket.socket(fileno=control), f"the sandbox {self.id} is gone")
        self.channel.hear(OUT_OF_MEMORY, self._on_out_of_memory)

    def _on_out_of_memory(self, message: dict[str, Any], _: list[int]) -> None:
        self._oom_kills += 1 if message else 0

    def oom_kills(self) -> int:
        """How many processes were killed because of the limit on memory."""
        return self._oom_kills + (self._group.oom_kills() if self._group else 0)

    def disk_kills(self) -> int:
        """How often everything was killed because of the limit on disk."""
        return self._disk.kills if self._disk else 0

    async def disk_was_full(self) -> bool:
        """Whether the watched disk was full at some time."""
        return self._disk is not None and await self._disk.was_full()

    def watch_disk(self, limit: int) -> None:
        """From now on kill everything inside whenever what it wrote takes more than `limit` bytes."""
        self._disk = DiskWatch(self.channel, limit, self._free, self._measure)

    async def _free(self) -> int:
        return free_bytes(self.directory)

    async def _measure(self) -> int:
        asked = {"op": "measure", "paths": [str(self.directory / "u")], "pid": self.pid, "descend": True}
        return (await self._zygotes.ask_any(asked))[0]["bytes"]

    async def stop(self) -> None:
        """Kill everything and remove every trace. Callers that come later wait for the first."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        await self.end()
        await self.remove()

    async def end(self) -> None:
        """Kill init, and so everything inside, and wait until the kernel is done with it."""
        close_all(self.watching)
        self.watching.clear()
        if self._asked is not None and self.pid == 0:
            with contextlib.suppress(SandboxError, TimeoutError):
                self._meet(await asyncio.wait_for(asyncio.shield(self._asked), STOP_SECONDS))
        if self._disk is not None:
            await self._disk.stop()
        if self._pidfd >= 0:
            await kill_and_wait(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        elif self._asked is not None and self.pid == 0:
            await wait_for_end(self.directory)
        if hasattr(self, "channel"):
            self.channel.close()
        if self._group is not None:
            await asyncio.to_thread(self._group.remove)

    async def remove(self) -> None:
        """Remove the directory and strike out the lease. A zygote is asked for what is much or belongs to others. A
        disk's journal may hold up each removal, so a thread waits for it."""
        if not await asyncio.to_thread(self._is_removed):
            await self._zygotes.remove(self.directory)
            self._lease.strike(KIND, self.id)

    def _is_removed(self) -> bool:
        """Remove all at once if there is little in the directory; whether that is done."""
        try:
            if not remove_some(str(self.directory), _FEW):
                return False
        except OSError:
            return False
        self._lease.strike(KIND, self.id)
        return True


def make_private(directory: Path) -> None:
    """Make a directory that nobody else on this machine can come to: what is inside has owners and set-id bits."""
    try:
        directory.mkdir(mode=0o755)
    except FileNotFoundError:
        directory.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        directory.mkdir(mode=0o755)


async def wait_for_end(directory: Path) -> None:
    """Wait until no process of a sandbox is left: its init, which ends when its owner does, holds a lock."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        for _ in range(_TRIES):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            await asyncio.sleep(_PAUSE)
        raise SandboxError(f"the processes of {directory.name} outlived their owner and do not end")
    finally:
        os.close(fd)


_HOSTS = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n127.0.1.1\t{name}\n"
_SLACK = 3
"""Processes of pier's own inside, which a limit by rlimit would count too."""
_SEEN_IN_TIME = 8 << 30
"""A file of a size like this takes longer to write than the disk goes unwatched. Sparse ones may be as long."""


def make_plan(spec: SandboxSpec, host: HostRoot | None, *, enforced_by: Mapping[str, str]) -> dict[str, Any]:
    """The plan for `spec`. `enforced_by` says which limits are left to init."""
    rlimits: dict[str, int] = {}
    if spec.limits.open_files is not None:
        rlimits["RLIMIT_NOFILE"] = spec.limits.open_files
    if spec.limits.disk is not None and spec.limits.disk < _SEEN_IN_TIME:
        rlimits["RLIMIT_FSIZE"] = spec.limits.disk
    by_init = spec.limits.processes if enforced_by.get("processes") != "cgroup" else None
    if by_init is not None:
        rlimits["RLIMIT_NPROC"] = by_init + _SLACK
    return {
        "trees": list(host.trees) if host else [],
        "mounts": [_mount(mount) for mount in (*spec.mounts, *_masks(spec, host))],
        "etc": {
            "resolv.conf": RESOLV_CONF,
            "hosts": _HOSTS.format(name=spec.hostname),
            "hostname": spec.hostname + "\n",
        },
        "hostname": spec.hostname,
        "volatile": spec.keep is None,
        "rlimits": rlimits,
        "processes": (by_init or 0) + _SLACK if by_init else 0,
        "no_new_privileges": spec.no_new_privileges,
        "shm_size": spec.limits.memory // 2 if spec.limits.memory else 64 << 20,
        "memory": spec.limits.memory or 0,
        "watched_memory": (spec.limits.memory or 0) if enforced_by.get("memory") == "watched" else 0,
        "cores": math.ceil(spec.limits.cpus) if spec.limits.cpus and enforced_by.get("cpus") == "affinity" else 0,
    }


def limits_of(groups: Hierarchies | None) -> dict[str, str]:
    """By what each limit is enforced here."""
    found = dict.fromkeys(groups.limits if groups else (), "cgroup")
    count = "namespace" if _counts_in_namespaces() else "rlimit"
    weaker = {"processes": count, "open_files": "rlimit", "memory": "watched", "disk": "watched", "cpus": "affinity"}
    return weaker | found


def _counts_in_namespaces() -> bool:
    """Whether the kernel limits how many processes a pid namespace has: those from 6.14 on do."""
    found = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return found is not None and (int(found[1]), int(found[2])) >= (6, 14)


def machine_memory() -> int:
    """How many bytes of memory this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def layers_of(spec: SandboxSpec, host: HostRoot | None) -> list[str]:
    """The layers of the root, lowest first."""
    below = host.layers if host else ()
    layers = (*below, *spec.image.layers)
    for path in layers:
        if not path.is_dir():
            raise SandboxError(
                f"the image {spec.image.reference} lacks its layer {path}",
                code="image_gone",
                hint=f"pier image pull {spec.image.reference}",
                retryable=False,
            )
    if not layers:
        raise SandboxError(f"the image {spec.image.reference} has no layers", code="image_gone", retryable=False)
    return [str(path) for path in layers]


def _masks(spec: SandboxSpec, host: HostRoot | None) -> tuple[Mount, ...]:
    if host is None:
        return masks(spec.mounts, spec.hidden)
    return masks(spec.mounts, (*spec.hidden, *host.hidden), host.trees)


def _mount(mount: Mount) -> dict[str, Any]:
    wanted: dict[str, Any] = {"target": mount.target, "read_only": mount.read_only, "size": mount.size}
    if mount.source is not None:
        if not mount.source.exists():
            raise SandboxError(
                f"cannot mount {mount.source}: it does not exist", code="no_mount", blame="user", retryable=False
            )
        wanted["source"] = str(mount.source.resolve())
    return wanted
