"""What this machine offers to local sandboxes, and the command that mends what is missing."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from pier.home import pier_home
from pier.idmap import IdMap
from pier.sandbox import seccomp
from pier.sandbox.contract import Finding
from pier.sandbox.linux.limits import Hierarchies
from pier.sandbox.linux.network import offered_modes

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
