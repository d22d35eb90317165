"""Directories that no sandbox sees, whatever it is made of: tasks, jobs, packs and pier's own state."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pier.errors import SandboxError
from pier.home import packs_home, private_directories
from pier.sandbox.contract import Mount

_SIZE = 4096
_MOST = 512


def masks(mounts: Iterable[Mount], hidden: Iterable[Path], trees: Iterable[str] = ()) -> tuple[Mount, ...]:
    """Empty directories to be mounted over what is to be hidden of `mounts`, and of `trees` of this machine that a
    sandbox has at the same paths. A mount from inside of a hidden directory is of pier's own making and stays."""
    shown = [(Path(tree), tree) for tree in trees]
    shown += [(mount.source.resolve(), mount.target) for mount in mounts if mount.source is not None]
    if not shown:
        return ()
    own = {Path(tree) for tree in trees}
    found = {
        Path(target) / path.relative_to(source)
        for path in _directories(hidden)
        for source, target in shown
        if path.is_relative_to(source) and (path != source or source in own)
    }
    outermost = sorted(path for path in found if found.isdisjoint(path.parents))
    if len(outermost) > _MOST:
        message = f"cannot hide {len(outermost)} directories, such as {outermost[0]}, from one sandbox"
        raise SandboxError(message, code="hidden_mount", blame="user", retryable=False, hint="mount less")
    return tuple(Mount(str(path), read_only=True, size=_SIZE) for path in outermost)


def refuse_hidden(mounts: Iterable[Mount], hidden: Iterable[Path] = ()) -> None:
    """Refuse to mount what no sandbox may see, apart from a pack."""
    packs = packs_home().resolve()
    for mount in mounts:
        source = mount.source.resolve() if mount.source is not None else None
        if source is None or packs in source.parents:
            continue
        for path in _directories(hidden):
            if source.is_relative_to(path):
                message = f"cannot mount {source}: it lies in {path}, which no sandbox may see"
                raise SandboxError(message, code="hidden_mount", blame="user", retryable=False)


def _directories(hidden: Iterable[Path]) -> set[Path]:
    return {path.resolve() for path in (*hidden, *private_directories()) if path.is_dir()}
