"""The local backend: what this machine offers, the start and end of sandboxes, snapshots, and `pier doctor`.

What a dead pier left is removed here: its sandboxes end by themselves, their directories and control groups do not. A
snapshot's layer lies below the sandbox that it was taken from, below sandboxes started from it and below later
snapshots of those. It is removed when the last of them is gone, whatever the order.
"""

from __future__ import annotations

import asyncio
import errno
import os
import platform
import secrets
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import get_args

from pier.errors import PolicyError, SandboxError
from pier.home import pier_home
from pier.idmap import IdMap
from pier.image.model import Image
from pier.lease import Held, Lease, close_all, close_in_turn
from pier.network.policy import NetworkMode, Rules
from pier.sandbox import arguments, seccomp
from pier.sandbox.contract import Backend, Capabilities, Change, Finding, Limits, SandboxSpec
from pier.sandbox.host import HostRoot, host_image, prepare
from pier.sandbox.linux.changes import merge
from pier.sandbox.linux.limits import ControlGroup, Hierarchies, find_cgroups, free_bytes
from pier.sandbox.linux.network import offered_modes
from pier.sandbox.linux.root import APT_OF_ONE_ID, NO_OVERLAY
from pier.sandbox.linux.sandbox import LinuxSandbox
from pier.sandbox.linux.zygotes import Zygotes
from pier.sandbox.local.box import (
    KIND,
    LocalBox,
    layers_of,
    limits_of,
    machine_memory,
    make_plan,
    make_private,
    wait_for_end,
)

HOMES = "set PIER_HOME to a directory on ext4, xfs, btrfs or tmpfs"
"""What to do about a file system that sandboxes cannot be kept on."""
_KERNEL = (5, 12)
_OTHERS = "open files by rlimit; disk is watched, and what writes too much is killed"


def examine(ids: IdMap, groups: Hierarchies | None, problem: str, mend: str, *, shifted: bool) -> list[Finding]:
    """All findings. `problem` is why a sandbox could not be started a moment ago, empty if one could, and `mend` what
    helps, if that is known; `shifted` whether its files could be mounted with other ids."""
    return [
        _kernel(),
        _namespaces(problem, mend),
        _ids(ids, shifted),
        _host_image(ids),
        _limits(groups),
        _network(),
        _filter(),
    ]


def _kernel() -> Finding:
    release = platform.release()
    numbers = tuple(int(part) for part in release.split("-")[0].split(".")[:2] if part.isdigit())
    return Finding("kernel", numbers >= _KERNEL, release, "" if numbers >= _KERNEL else "install Linux 5.12 or newer")


def _namespaces(problem: str, mend: str) -> Finding:
    if not problem:
        return Finding("sandboxes", True, "one was started, ran a command and was removed")
    return Finding("sandboxes", False, problem, mend or _mend_namespaces())


def _mend_namespaces() -> str:
    def reads(path: str, value: str) -> bool:
        try:
            return Path(path).read_text().strip() == value
        except OSError:
            return False

    if reads("/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1"):
        return "sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0"
    if reads("/proc/sys/kernel/unprivileged_userns_clone", "0"):
        return "sudo sysctl kernel.unprivileged_userns_clone=1"
    if reads("/proc/sys/user/max_user_namespaces", "0"):
        return "sudo sysctl user.max_user_namespaces=15000"
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists():
        return "start the container with --security-opt seccomp=unconfined --security-opt systempaths=unconfined"
    return "use the docker backend"


def _ids(ids: IdMap, shifted: bool) -> Finding:
    if ids.mode == "root" and not shifted:
        return Finding(
            "ids",
            False,
            "root: a file system here refuses mounts with other ids, so files in sandboxes have the same ids outside; "
            "sandboxes are user namespaces all the same",
            f"{HOMES} (it is {pier_home()})",
        )
    details = {
        "root": "root: ids in sandboxes are 100000 to 165535 outside",
        "subids": "subordinate ids: other users exist and packages install",
        "single": "one id only: sandboxes have no other users, and owners of files are fiction",
    }
    return Finding("ids", ids.mode != "single", details[ids.mode], ids.hint)


def _host_image(ids: IdMap) -> Finding:
    if ids.mode == "root":
        return Finding("host image", True, "this machine's software, copy-on-write")
    return Finding("host image", True, "this machine's software, read-only, since you are not root")


def _limits(groups: Hierarchies | None) -> Finding:
    if groups is None:
        weaker = "memory is watched, cpus are bound to cores, processes by namespace or rlimit"
        detail = f"no writable control groups: {weaker}; {_OTHERS}"
        return Finding("limits", False, detail, "run as root, or in a session with delegated control groups")
    return Finding("limits", True, f"control groups v{groups.version}: {', '.join(sorted(groups.limits))}; {_OTHERS}")


def _network() -> Finding:
    modes = offered_modes()
    if "allowlist" in modes:
        return Finding("networks", True, "none, allowlist and public: TCP and lookups; under public UDP and pings too")
    return Finding("networks", False, "only none: the kernel has no nftables", "sudo modprobe nf_tables")


def _filter() -> Finding:
    machine = os.uname().machine
    if seccomp.supported(machine):
        return Finding("system call filter", True, machine)
    return Finding("system call filter", False, f"no filter exists for {machine}", "use the docker backend")


SNAPSHOT = "snapshot"


class Snapshots:
    """The snapshots of one backend."""

    def __init__(self, lease: Lease, zygotes: Zygotes, base: Path) -> None:
        self._lease = lease
        self._zygotes = zygotes
        self._base = base
        self._holders: dict[Path, set[str]] = {}

    async def freeze(self, upper: Path) -> Path:
        """Take a writable layer that nothing writes to any more, and give the layer that it became."""
        id = secrets.token_hex(6)
        directory = self._base / id
        self._lease.write(SNAPSHOT, id, {"directory": str(directory)})
        make_private(directory)
        layer = directory / "layer"
        await self._zygotes.ask_any({"op": "move", "path": str(upper), "to": str(layer)})
        self._holders[layer] = set()
        return layer

    def hold(self, holder: str, layers: Iterable[Path]) -> None:
        """Note that `holder` (an image or a sandbox) needs those of `layers` that are snapshots."""
        for layer in layers:
            if layer in self._holders:
                self._holders[layer].add(holder)

    async def release(self, holder: str) -> None:
        """Note that `holder` is gone, and remove what nobody needs any more."""
        for layer, holders in list(self._holders.items()):
            if holder not in holders:
                continue
            holders.discard(holder)
            if not holders:
                del self._holders[layer]
                await self._zygotes.tell_all({"op": "forget", "id": 0, "path": str(layer)})
                await self._zygotes.remove(layer.parent)
                self._lease.strike(SNAPSHOT, layer.parent.name)


_LOST = ("zygote_gone", "sandbox_gone")

NO_PLACE = "no_place"
"""The code of the error that the file system of pier's home cannot hold sandboxes."""


class LocalBackend(Backend):
    """Sandboxes of this machine's own kernel."""

    name = "local"

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._ids = IdMap.detect()
        self._base = pier_home() / "sandboxes"
        self._groups = find_cgroups()
        self._capabilities = Capabilities(
            networks=offered_modes(),
            switch_network=True,
            snapshot=True,
            users=self._ids.mode != "single",
            isolates_verifier=True,
            limits=limits_of(self._groups),
        )
        self._zygotes = Zygotes(self._ids)
        self._snapshots = Snapshots(lease, self._zygotes, pier_home() / "snapshots")
        self._sandboxes: set[LinuxSandbox[LocalBox]] = set()
        self._host: HostRoot | None = None
        self._host_lock = asyncio.Lock()

    @property
    def lease(self) -> Lease:
        return self._lease

    @property
    def kinds(self) -> frozenset[str]:
        return frozenset({KIND, SNAPSHOT})

    @property
    def zygotes(self) -> list[int]:
        """The processes that sandboxes are forked from."""
        return self._zygotes.pids()

    async def capabilities(self) -> Capabilities:
        return self._capabilities

    async def share(self) -> Limits:
        """Half of the memory, and half of the disk that is free."""
        return replace(await super().share(), memory=machine_memory() // 2, disk=free_bytes(self._base) // 2 or None)

    async def start(self, spec: SandboxSpec) -> LinuxSandbox[LocalBox]:
        return await self._start(spec, ())

    async def reopen(self, id: str, spec: SandboxSpec) -> LinuxSandbox[LocalBox]:
        """The writable layer of the dead sandbox becomes the topmost of those below a new one."""
        directory = self._base / id
        await wait_for_end(directory)
        if not (directory / "u").is_dir():
            raise SandboxError(f"{directory} is not there", code="cannot_reopen", retryable=False)
        return await self._start(spec, (directory / "u",))

    async def _start(self, spec: SandboxSpec, frozen: tuple[Path, ...]) -> LinuxSandbox[LocalBox]:
        _refuse_what_lacks(spec, self._capabilities)
        box = await self._start_box(spec, frozen)
        sandbox = LinuxSandbox[LocalBox](spec, box, self)
        sandbox.frozen = frozen
        self._snapshots.hold(sandbox.id, spec.image.layers)
        self._sandboxes.add(sandbox)
        await sandbox.begin()
        return sandbox

    async def _start_box(self, spec: SandboxSpec, frozen: tuple[Path, ...]) -> LocalBox:
        """Start what runs a sandbox; once more, when the zygote that was asked or the init that it gave was killed."""
        host = await self._prepare_host() if spec.image.is_host else None
        limits = spec.limits
        wanted = {name for name in ("memory", "processes", "cpus") if getattr(limits, name) is not None}
        cage = (self._groups, limits) if self._groups is not None and wanted else None
        layers = [*layers_of(spec, host), *map(str, frozen)]
        for last in range(2):
            plan = make_plan(spec, host, enforced_by=self._capabilities.limits)
            box = LocalBox(self._lease, self._zygotes, self._base)
            try:
                await box.start(plan, layers, cage, spec.keep)
            except BaseException as error:
                await asyncio.shield(box.stop())
                if isinstance(error, SandboxError) and error.code in _LOST and not last:
                    continue
                if isinstance(error, SandboxError) and NO_OVERLAY in error.message:
                    raise self._no_place(error) from error
                raise
            if limits.disk is not None:
                box.watch_disk(limits.disk)
            return box
        raise AssertionError("the last try returns or raises")

    def _no_place(self, error: Exception) -> SandboxError:
        message = f"the file system of {self._base} cannot hold sandboxes: {error}"
        return SandboxError(message, code=NO_PLACE, blame="user", retryable=False, hint=HOMES)

    async def _prepare_host(self) -> HostRoot:
        async with self._host_lock:
            if self._host is None:
                id = f"host-{self._lease.owner}"
                directory = self._base / id
                self._lease.write(KIND, id, {"directory": str(directory), "groups": []})
                make_private(directory)
                try:
                    self._host = await asyncio.to_thread(prepare, directory)
                except OSError as error:
                    await self._zygotes.remove(directory)
                    self._lease.strike(KIND, id)
                    if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EINVAL):
                        raise
                    raise self._no_place(error) from error
            return self._host

    async def snapshot(self, sandbox: LinuxSandbox[LocalBox]) -> Image:
        """Freeze what a sandbox wrote and let it go on, above that, with new processes."""
        before = sandbox.box
        if before.channel.closed:
            raise before.channel.lost()
        await before.end()
        layer = await self._snapshots.freeze(before.directory / "u")
        spec = sandbox.spec
        digest = f"snapshot:{layer.parent.name}"
        layers = (*spec.image.layers, *sandbox.frozen, layer)
        self._snapshots.hold(digest, layers)
        self._snapshots.hold(sandbox.id, layers)
        sandbox.frozen = (*sandbox.frozen, layer)
        await before.remove()
        sandbox.box = await self._start_box(spec, sandbox.frozen)
        reference = digest.replace(":", "-")
        return Image(reference, digest, layers, spec.image.config, on_host=spec.image.is_host)

    async def remove_snapshot(self, image: Image) -> None:
        await self._snapshots.release(image.digest)

    async def changes(self, sandbox: LinuxSandbox[LocalBox]) -> list[Change]:
        """What a sandbox wrote since it began, in all its layers."""
        host = self._host if sandbox.spec.image.is_host else None
        layers, trees = layers_of(sandbox.spec, host), list(host.trees) if host else []
        looks: list[list[list[str]]] = []
        for upper in (*sandbox.frozen, sandbox.box.directory / "u"):
            asked = {"op": "changes", "path": str(upper), "layers": layers, "trees": trees}
            message, _ = await self._zygotes.ask_any(asked)
            looks.append(message["changes"])
            layers = [*layers, str(upper)]
        own = {"/etc/hosts", "/etc/hostname", "/etc/resolv.conf", APT_OF_ONE_ID.removeprefix("/m")}
        own.update(mount.target for mount in sandbox.spec.mounts)
        return [Change(*row) for row in merge(looks) if row[0] not in own]

    async def end(self, sandbox: LinuxSandbox[LocalBox]) -> None:
        """Remove every trace of a sandbox."""
        await sandbox.box.stop()
        await self._snapshots.release(sandbox.id)
        self._sandboxes.discard(sandbox)

    async def doctor(self) -> list[Finding]:
        problem = mend = ""
        shifted = True
        try:
            sandbox = await self.start(SandboxSpec(host_image()))
            async with sandbox:
                await sandbox.exec(["true"])
                shifted = sandbox.box.shifted
        except (SandboxError, OSError) as error:
            problem = str(error)
            mend = HOMES if isinstance(error, SandboxError) and error.code == "no_place" else ""
        return examine(self._ids, self._groups, problem, mend, shifted=shifted)

    async def destroy(self, held: Held) -> None:
        directory = Path(held.data["directory"])
        await wait_for_end(directory)
        if groups := held.data.get("groups"):
            await asyncio.to_thread(ControlGroup(tuple(groups)).remove)
        if directory.exists():
            await self._zygotes.remove(directory)

    async def close(self) -> None:
        """All sandboxes are stopped, also when one of them fails to; what failed is raised in the end."""
        stops = [sandbox.stop() for sandbox in self._sandboxes]
        try:
            await close_in_turn(lambda: close_all(stops), self._remove_host)
        finally:
            self._zygotes.close()

    async def _remove_host(self) -> None:
        if self._host is not None:
            id = f"host-{self._lease.owner}"
            await self._zygotes.remove(self._base / id)
            self._lease.strike(KIND, id)
            self._host = None


def _refuse_what_lacks(spec: SandboxSpec, capabilities: Capabilities) -> None:
    arguments.check_spec(spec)
    mode = spec.network.mode
    if mode not in capabilities.networks:
        known = ", ".join(name for name in get_args(NetworkMode) if name in capabilities.networks)
        raise PolicyError(f"the local backend cannot enforce the network policy {mode!r} here; it can: {known}")
    Rules(spec.network.hosts)
    if spec.gpus:
        raise SandboxError("the local backend has no gpus", code="no_gpus", blame="user", retryable=False)
    for name in ("cpus", "memory", "processes", "disk", "open_files"):
        value = getattr(spec.limits, name)
        if value is not None and value <= 0:
            raise SandboxError(
                f"the limit {name}={value} leaves nothing", code="bad_limit", blame="user", retryable=False
            )
        if value is not None and name not in capabilities.limits:
            raise SandboxError(
                f"nothing here can limit {name}", code="no_limit", blame="user", retryable=False, hint="pier doctor"
            )
