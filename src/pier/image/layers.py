"""Content-addressed layers on disk, safe under concurrent processes: a layer is named by its diff id.

    <store>/layers/<hex>/fs           the files, in overlay format; never changed once visible
    <store>/layers/<hex>/layer.json   how the layer came
    <store>/tmp/<name>/               what is being made, locked through <name>.lock while its maker lives

A layer is made in `tmp` and renamed into place when it is whole, so it is never half visible. What a killed process
left in `tmp` is known by its free lock and swept by `gc`.

What a store writes down: one JSON file for each image and each layer, and which layers are in use.

Each process that uses layers notes them in a file that it keeps locked: the lock dies with the process, so a layer is
never collected under a living sandbox, and never kept for a dead one.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from pier.files import locked, write_json
from pier.image import owner
from pier.image.model import ImageConfig, disk_errors

Origin = Literal["import", "docker", "pull", "build"]


class ConfigRecord(BaseModel):
    """`ImageConfig` on disk."""

    model_config = ConfigDict(extra="ignore")

    env: dict[str, str] = Field(default_factory=dict)
    workdir: str = "/"
    user: str = ""
    entrypoint: list[str] = Field(default_factory=list)
    cmd: list[str] = Field(default_factory=list)
    shell: list[str] = Field(default_factory=lambda: ["/bin/sh", "-c"])
    labels: dict[str, str] = Field(default_factory=dict)
    exposed_ports: list[str] = Field(default_factory=list)
    volumes: list[str] = Field(default_factory=list)
    stop_signal: str = ""
    healthcheck: dict[str, Any] | None = None
    on_build: list[str] = Field(default_factory=list)

    @classmethod
    def of(cls, config: ImageConfig) -> ConfigRecord:
        return cls.model_validate({name: getattr(config, name) for name in cls.model_fields}, from_attributes=True)

    def value(self) -> ImageConfig:
        data = self.model_dump()
        for name in ("entrypoint", "cmd", "shell", "exposed_ports", "volumes", "on_build"):
            data[name] = tuple(data[name])
        return ImageConfig(**data)


class ImageRecord(BaseModel):
    """An image in the store. `layers` are ids, lowest first; `on_host` says that the machine's root lies below."""

    model_config = ConfigDict(extra="ignore")

    reference: str
    digest: str
    layers: list[str]
    config: ConfigRecord = Field(default_factory=ConfigRecord)
    on_host: bool = False
    origin: Origin = "import"
    source: str = ""
    created: str = ""


class LayerRecord(BaseModel):
    """A layer in the store: how it came and how many bytes its files hold."""

    model_config = ConfigDict(extra="ignore")

    id: str
    size: int = 0
    origin: Origin = "import"
    source: str = ""


def image_digest(layers: list[str], config: ConfigRecord, *, base: str = "") -> str:
    """The identity of an image: the same layers and settings have the same digest, on every machine."""
    value = json.dumps([base, layers, config.model_dump(mode="json")], sort_keys=True)
    return f"sha256:{hashlib.sha256(value.encode()).hexdigest()}"


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


def hex_of(layer_id: str) -> str:
    return layer_id.removeprefix("sha256:")


class Draft:
    """A layer that is being made in `path`."""

    def __init__(self, layers: Layers, directory: Path) -> None:
        self._layers = layers
        self._directory = directory
        self.path = directory / "fs"

    async def keep(self, layer_id: str, *, size: int, origin: Origin, source: str = "") -> Path:
        """Make the layer visible as `layer_id`; if it is there already this one is dropped. Its directory."""
        record = LayerRecord(id=layer_id, size=size, origin=origin, source=source)
        final = self._layers.root / "layers" / hex_of(layer_id)
        with disk_errors("keeping a layer"):
            write_json(self._directory / "layer.json", record.model_dump(), durable=False)
            final.parent.mkdir(parents=True, exist_ok=True)
        with self._layers.users.using():
            self._layers.users.note([layer_id])
            try:
                self._directory.rename(final)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
        return final / "fs"


class Layers:
    """The layers below one directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.users = Users(root)

    def path(self, layer_id: str) -> Path | None:
        """The directory of a layer, None if the store does not have it."""
        directory = self.root / "layers" / hex_of(layer_id)
        return directory / "fs" if (directory / "layer.json").is_file() else None

    def record(self, layer_id: str) -> LayerRecord | None:
        try:
            text = (self.root / "layers" / hex_of(layer_id) / "layer.json").read_text()
        except FileNotFoundError:
            return None
        return LayerRecord.model_validate_json(text)

    def use(self, layer_id: str) -> LayerRecord | None:
        """Like `record`, and keeps the layer while this process lives."""
        if not (self.root / "layers").is_dir():
            return None
        with self.users.using():
            found = self.record(layer_id)
            if found is not None:
                self.users.note([layer_id])
                self.touch(layer_id)
        return found

    def ids(self) -> Iterator[str]:
        """The ids of all layers."""
        with contextlib.suppress(FileNotFoundError):
            for entry in sorted((self.root / "layers").iterdir()):
                if (entry / "layer.json").is_file():
                    yield f"sha256:{entry.name}"

    def last_used(self, layer_id: str) -> float:
        try:
            return (self.root / "layers" / hex_of(layer_id) / "layer.json").stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def touch(self, layer_id: str) -> None:
        """Note that a layer was used now."""
        with contextlib.suppress(FileNotFoundError):
            os.utime(self.root / "layers" / hex_of(layer_id) / "layer.json")

    @asynccontextmanager
    async def scratch(self) -> AsyncIterator[Path]:
        """A private directory on the store's file system, gone at the end; what was renamed away stays."""
        name = f"{os.getpid()}-{secrets.token_hex(6)}"
        place = self.root / "tmp"
        place.mkdir(parents=True, exist_ok=True)
        lock = place / f"{name}.lock"
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            directory = place / name
            directory.mkdir()
            try:
                yield directory
            finally:
                await _remove(directory)
                lock.unlink(missing_ok=True)
        finally:
            os.close(fd)

    @asynccontextmanager
    async def draft(self) -> AsyncIterator[Draft]:
        """A new layer to fill; it is dropped unless it was kept."""
        async with self.scratch() as directory:
            inner = directory / "layer"
            inner.mkdir(mode=0o755)
            (inner / "fs").mkdir(mode=0o755)
            yield Draft(self, inner)

    def hide(self, layer_id: str, directory: Path) -> None:
        """Take a layer out of sight, into `directory`. Call it inside `users.collecting`."""
        with contextlib.suppress(FileNotFoundError):
            (self.root / "layers" / hex_of(layer_id)).rename(directory / hex_of(layer_id))

    async def sweep(self, *, dry_run: bool = False) -> list[Path]:
        """Remove what dead processes left in `tmp`."""
        left: list[Path] = []
        place = self.root / "tmp"
        for lock in sorted(place.glob("*.lock")) if place.is_dir() else []:
            fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            else:
                directory = lock.with_suffix("")
                left.append(directory)
                if not dry_run:
                    await owner.run("remove_tree", path=str(directory))
                    lock.unlink(missing_ok=True)
            finally:
                os.close(fd)
        return left


async def _remove(directory: Path) -> None:
    """Remove a directory to the end, also when this is cancelled meanwhile."""
    try:
        directory.rmdir()
        return
    except OSError:
        work = asyncio.ensure_future(owner.run("remove_tree", path=str(directory)))
    cancelled = False
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            cancelled = True
    work.result()
    if cancelled:
        raise asyncio.CancelledError
