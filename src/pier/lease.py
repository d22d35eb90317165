"""Ownership of resources that outlive a process: sandboxes, mounts, cgroups, containers, networks.

A resource is recorded *before* it is created, under the name of its owner, and the record is deleted after the resource
is gone. An owner is a running process that holds a lock on its own file. The kernel releases the lock when the process
ends, so a process that can take the lock may sweep the resources of the dead owner. Nothing else is ever touched.

    <home>/leases/<owner>/owner.json      locked while the owner lives
    <home>/leases/<owner>/<kind>.<id>     JSON: the data needed to destroy the resource

A resource whose data names a file under `keep` is not swept while that file contains its id, so that a later process
can adopt it. Removing the file releases it.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pier.files import write
from pier.home import pier_home


@dataclass(frozen=True, slots=True)
class Held:
    """The record of one resource."""

    owner: str
    kind: str
    id: str
    data: dict[str, Any] = field(default_factory=dict)
    path: Path = field(default_factory=Path, repr=False)


class Lease:
    """The resources of this process. Use as a context manager, or `close` at the end."""

    def __init__(self, root: Path | None = None, *, label: str = "pier") -> None:
        self.owner = f"{os.getpid()}-{secrets.token_hex(4)}"
        self.directory = (root or pier_home() / "leases") / self.owner
        hidden = self.directory.with_name(f".{self.owner}")
        hidden.mkdir(parents=True, mode=0o700)
        self._fd = os.open(hidden / "owner.json", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        os.write(self._fd, json.dumps({"pid": os.getpid(), "label": label}).encode())
        hidden.rename(self.directory)

    def write(self, kind: str, id: str, data: Mapping[str, Any] | None = None) -> Held:
        """Record a resource, before it is created. Writing again replaces its data."""
        path = self.directory / f"{kind}.{id}"
        held = Held(self.owner, kind, id, dict(data or {}), path)
        write(path, json.dumps(held.data), mode=0o600, durable=False)
        return held

    def strike(self, kind: str, id: str) -> None:
        """Delete the record of a resource, after it is gone."""
        (self.directory / f"{kind}.{id}").unlink(missing_ok=True)

    def held(self) -> list[Held]:
        """Return the current records."""
        return list(_read(self.directory))

    def close(self) -> None:
        """Release ownership. Resources that are still recorded are left for a sweep."""
        if self._fd < 0:
            return
        if not self.held():
            shutil.rmtree(self.directory, ignore_errors=True)
        os.close(self._fd)
        self._fd = -1

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


Destroy = Callable[[Held], Awaitable[None]]


@dataclass(slots=True)
class Swept:
    """The resources that a sweep removed, and those that it could not remove, with the reasons."""

    removed: list[Held] = field(default_factory=list)
    failed: list[tuple[Held, str]] = field(default_factory=list)


async def sweep(destroyers: Mapping[str, Destroy], *, root: Path | None = None, dry_run: bool = False) -> Swept:
    """Destroy the resources of dead owners. `destroyers` maps each kind to its destructor; other kinds are reported as
    failed."""
    swept = Swept()
    for directory, fd in _dead_owners(root or pier_home() / "leases"):
        try:
            for held in _read(directory):
                if is_kept(held):
                    continue
                if held.kind not in destroyers:
                    swept.failed.append((held, f"no available backend can remove a {held.kind}"))
                    continue
                try:
                    if not dry_run:
                        await destroyers[held.kind](held)
                        held.path.unlink(missing_ok=True)
                    swept.removed.append(held)
                except Exception as error:  # noqa: BLE001 - a failure must not stop the sweep
                    swept.failed.append((held, str(error) or type(error).__name__))
            if not dry_run and not any(_read(directory)):
                shutil.rmtree(directory, ignore_errors=True)
        finally:
            os.close(fd)
    return swept


def is_kept(held: Held) -> bool:
    """Whether a resource must outlive its owner."""
    try:
        return Path(held.data["keep"]).read_text() == held.id
    except (OSError, KeyError, TypeError, ValueError):
        return False


def _dead_owners(root: Path) -> Iterator[tuple[Path, int]]:
    if not root.is_dir():
        return
    for directory in sorted(path for path in root.iterdir() if not path.name.startswith(".")):
        try:
            fd = os.open(directory / "owner.json", os.O_RDWR | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            continue
        yield directory, fd


def _read(directory: Path) -> Iterator[Held]:
    try:
        names = sorted(path for path in directory.iterdir() if path.name != "owner.json" and path.suffix != ".tmp")
    except FileNotFoundError:
        return
    for path in names:
        kind, _, id = path.name.partition(".")
        try:
            data = json.loads(path.read_text())
        except FileNotFoundError:
            continue
        except ValueError:
            data = {}
        yield Held(directory.name, kind, id, data, path)


async def close_all(works: Iterable[Awaitable[Any]]) -> None:
    """Await all concurrently until each has ended. The first failure is raised, with the others as its notes."""
    _raise_first(await asyncio.gather(*works, return_exceptions=True))


async def close_in_turn(*steps: Callable[[], Awaitable[Any]]) -> None:
    """Await all steps in order, also after a failure. The first failure is raised, with the others as its notes."""
    outcomes: list[Any] = []
    for step in steps:
        outcomes += await asyncio.gather(step(), return_exceptions=True)
    _raise_first(outcomes)


def _raise_first(outcomes: list[Any]) -> None:
    failures = [each for each in outcomes if isinstance(each, BaseException)]
    for other in failures[1:]:
        failures[0].add_note(f"also failed: {type(other).__name__}: {other}")
    if failures:
        raise failures[0]
