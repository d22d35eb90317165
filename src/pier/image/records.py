"""What a store writes down: one JSON file for each image and each layer, and which layers are in use.

Each process that uses layers notes them in a file that it keeps locked: the lock dies with the process, so a layer is
never collected under a living sandbox, and never kept for a dead one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from pier.files import locked
from pier.image.model import ImageConfig

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
