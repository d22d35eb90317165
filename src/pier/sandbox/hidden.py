"""Directories that no sandbox sees, whatever it is made of: tasks, jobs, packs and pier's own state."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from pier.errors import SandboxError
from pier.home import packs_home, private_directories
from pier.sandbox.contract import Mount

_SIZE = 4096
_MOST = 512


def masks(mounts: Sequence[Mount], hidden: Iterable[Path], trees: Sequence[str] = ()) -> tuple[Mount, ...]:
    """Empty directories to be mounted over what is to be hidden of `mounts`, and of `trees` of this machine that a
    sandbox has at the same paths. A mount from inside of a hidden directory is of pier's own making and stays."""
    shown = [(tree, tree) for tree in trees]
    shown += [(_real(mount.source).rstrip("/"), mount.target) for mount in mounts if mount.source is not None]
    sources = tuple(source for source, _ in shown)
    found: set[str] = set()
    for path in _directories(hidden) if shown else ():
        for source, target in shown if path.startswith(sources) else ():
            inside = path.startswith(source) and (path[len(source) :].startswith("/") or path in trees)
            if inside and Path(path).is_dir():
                found.add(target.rstrip("/") + path[len(source) :])
    outermost = sorted(path for path in found if not any(path.startswith(f"{other}/") for other in found))
    if len(outermost) > _MOST:
        message = f"cannot hide {len(outermost)} directories, such as {outermost[0]}, from one sandbox"
        raise SandboxError(message, code="hidden_mount", blame="user", retryable=False, hint="mount less")
    return tuple(Mount(path, read_only=True, size=_SIZE) for path in outermost)


def refuse_hidden(mounts: Iterable[Mount], hidden: Iterable[Path] = ()) -> None:
    """Refuse to mount what no sandbox may see, apart from a pack."""
    for mount in mounts:
        source = _real(mount.source) if mount.source is not None else ""
        if not source or source.startswith(f"{_real(packs_home())}/"):
            continue
        for path in _directories(hidden):
            if source == path or source.startswith(f"{path}/"):
                message = f"cannot mount {source}: it lies in {path}, which no sandbox may see"
                raise SandboxError(message, code="hidden_mount", blame="user", retryable=False)


def _directories(hidden: Iterable[Path]) -> set[str]:
    return {_real(path) for path in (*hidden, *private_directories())} - {"/"}


@functools.lru_cache(maxsize=1024)
def _real(path: Path) -> str:
    return os.path.realpath(path)
