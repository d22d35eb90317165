"""Which layers are in use: each process that got layers from a store notes them in a file that it keeps locked.

The lock dies with the process, so a layer is never collected under a living sandbox, and never kept for a dead one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from pier.files import locked


@dataclass(slots=True)
class _Mine:
    fd: int
    layers: set[str] = field(default_factory=set)


_mine: dict[Path, _Mine] = {}
"""What this process noted, by store. It is kept until the process ends: an `Image` may outlive its `ImageStore`."""


class Users:
    """The users of the store at `root`."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def using(self) -> AbstractContextManager[bool]:
        """Held while layers are looked up and noted; `collecting` waits for it."""
        return locked(self._root / "users.lock", shared=True)

    def collecting(self) -> AbstractContextManager[bool]:
        """Held while unused layers are taken out of sight."""
        return locked(self._root / "users.lock")

    def note(self, layers: Iterable[str]) -> None:
        """Keep layers while this process lives. Call it inside `using`."""
        mine = _mine.get(self._root)
        if mine is None:
            place = self._root / "users"
            place.mkdir(exist_ok=True)
            path = place / f"{os.getpid()}-{secrets.token_hex(4)}"
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX)
            mine = _mine[self._root] = _Mine(fd)
        new = [layer for layer in layers if layer not in mine.layers]
        if new:
            os.write(mine.fd, "".join(f"{layer}\n" for layer in new).encode())
            mine.layers.update(new)

    def noted(self) -> set[str]:
        """The layers that living processes use. Call it inside `collecting`."""
        found: set[str] = set()
        with contextlib.suppress(FileNotFoundError):
            for path in sorted((self._root / "users").iterdir()):
                found.update(_read(path))
        return found


def _read(path: Path) -> Iterator[str]:
    """What the process behind `path` uses; the file of a dead one is removed."""
    with contextlib.suppress(FileNotFoundError), locked(path, wait=False) as is_dead:
        if is_dead:
            path.unlink()
        else:
            yield from path.read_text().splitlines()
