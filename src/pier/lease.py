"""Ownership of things that outlive a process: sandboxes, mounts, cgroups, containers, networks.

A thing is written down *before* it exists, under the name of its owner, and struck out after it is gone. An owner is
a running process that holds a lock on its own file; the lock dies with the process, so another one that can take it
knows that the owner is dead and may sweep what it left. Nothing else is ever touched.

    <home>/leases/<owner>/owner.json      locked while the owner lives
    <home>/leases/<owner>/<kind>.<id>     JSON: what a sweeper must know to destroy the thing

A thing whose data names a file under `keep` is not swept as long as that file holds its id, so that a later process can
take it over. Removing the file releases it.
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
    """One thing that an owner wrote down."""

    owner: str
    kind: str
    id: str
    data: dict[str, Any] = field(default_factory=dict)
    path: Path = field(default_factory=Path, repr=False)


class Lease:
    """The things of one owner, which is this process. Use as a context manager, or `close` at the end."""

    def __init__(self, root: Path | None = None, *, label: str = "pier") -> None:
        self.owner = f"{os.getpid()}-{secrets.token_hex(4)}"
        self.directory = (root or pier_home() / "leases") / self.owner
        unborn = self.directory.with_name(f".{self.owner}")
        unborn.mkdir(parents=True, mode=0o700)
        self._fd = os.open(unborn / "owner.json", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        os.write(self._fd, json.dumps({"pid": os.getpid(), "label": label}).encode())
        unborn.rename(self.directory)

    def write(self, kind: str, id: str, data: Mapping[str, Any] | None = None) -> Held:
        """Write a thing down; call this before creating it. Writing again replaces what is known of it."""
        path = self.directory / f"{kind}.{id}"
        held = Held(self.owner, kind, id, dict(data or {}), path)
        write(path, json.dumps(held.data), mode=0o600, durable=False)
        return held

    def strike(self, kind: str, id: str) -> None:
        """Strike a thing out; call this after it is gone."""
        (self.directory / f"{kind}.{id}").unlink(missing_ok=True)

    def held(self) -> list[Held]:
        """What is written down now."""
        return list(_read(self.directory))

    def close(self) -> None:
        """Give the ownership up. What is still written down is left for a sweep."""
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
    """What a sweep removed, and what it could not (with the reason)."""

    removed: list[Held] = field(default_factory=list)
    failed: list[tuple[Held, str]] = field(default_factory=list)


async def sweep(destroyers: Mapping[str, Destroy], *, root: Path | None = None, dry_run: bool = False) -> Swept:
    """Destroy what dead owners left. `destroyers` maps a kind to what ends one; other kinds are reported as failed."""
    swept = Swept()
    for directory, fd in _dead_owners(root or pier_home() / "leases"):
        try:
            for held in _read(directory):
                await _destroy(held, destroyers, swept, dry_run)
            if not dry_run and not any(_read(directory)):
                shutil.rmtree(directory, ignore_errors=True)
        finally:
            os.close(fd)
    return swept


async def _destroy(held: Held, destroyers: Mapping[str, Destroy], swept: Swept, dry_run: bool) -> None:
    destroy = destroyers.get(held.kind)
    if is_kept(held):
        return
    if destroy is None:
        swept.failed.append((held, f"nothing here knows how to remove a {held.kind}"))
        return
    if not dry_run:
        try:
            await destroy(held)
        except Exception as error:  # noqa: BLE001 - one thing that cannot be removed must not keep the others
            swept.failed.append((held, str(error) or type(error).__name__))
            return
        held.path.unlink(missing_ok=True)
    swept.removed.append(held)


def is_kept(held: Held) -> bool:
    """Whether a thing is to outlive its owner."""
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
    """Await all at once, to their ends. The first failure is raised, with the others as its notes."""
    _raise_first(await asyncio.gather(*works, return_exceptions=True))


async def close_in_turn(*steps: Callable[[], Awaitable[Any]]) -> None:
    """Await one after the other, all of them. The first failure is raised, with the others as its notes."""
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
