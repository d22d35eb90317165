"""Volumes at an engine: copies of this machine's directories, and the volumes that services of one trial share.

A copy is named by its content and filled once; it is complete when its last file, a marker, is there. Nothing in it
changes afterwards, so all runs and machines that use the engine share it. `collect_volumes` removes those that no
container uses. A trial's volumes are written into the lease first and removed with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import os
import re
import secrets
import stat
import tarfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiodocker
from aiodocker.containers import DockerContainer
from aiodocker.exceptions import DockerError

from pier.errors import SandboxError
from pier.image.model import OnProgress
from pier.lease import Lease, close_all
from pier.sandbox.docker.client import Client, creation_lock, engine_error, in_use_lock, removal_lock, sending
from pier.sandbox.docker.sandbox import LABEL, temporary_container

PREFIX = "pier-pack-"
_OURS = re.compile(PREFIX + "[0-9a-f]{24}")
_INSIDE = "/pack"
_WHOLE = ".pier-whole"
_CHUNK = 1 << 20


class PackVolumes:
    """The volumes of one engine that hold copies of directories. `image`: any image that the engine has."""

    def __init__(self, docker: Client, lease: Lease, image: str) -> None:
        self._docker = docker
        self._lease = lease
        self._image = image
        self._known: dict[Path, str] = {}
        self._locks: dict[Path, asyncio.Lock] = {}
        self._held = AsyncExitStack()

    async def ensure(self, directory: Path, on_progress: OnProgress | None = None) -> str:
        """The name of the volume with the content that `directory` had when it was first asked for. It is kept until
        `close`, also while no container uses it."""
        async with self._locks.setdefault(directory, asyncio.Lock()):
            if directory not in self._known:
                self._known[directory] = await self._fill(directory, on_progress)
            return self._known[directory]

    async def _fill(self, directory: Path, on_progress: OnProgress | None) -> str:
        name = PREFIX + await asyncio.to_thread(digest_of, directory)
        await self._held.enter_async_context(in_use_lock(name))
        host = {"NetworkMode": "none", "Binds": [f"{name}:{_INSIDE}"]}
        config = {"Image": self._image, "Cmd": ["none"], "HostConfig": host}
        try:
            # It stays until the end: nobody takes away what a container uses, not even who prunes an engine, which
            # would make an empty volume in the place of one that is gone.
            container = await self._held.enter_async_context(temporary_container(self._docker, self._lease, config))
            async with creation_lock(name):
                if not await self._is_whole(container):
                    await self._copy(directory, container, on_progress)
        except DockerError as error:
            raise engine_error(error) from error
        return name

    async def _copy(self, directory: Path, container: DockerContainer, on_progress: OnProgress | None) -> None:
        what = f"copying {directory} to the engine"
        async with (
            sending(_packed(directory), what, on_progress) as stream,
            self._docker._query(
                f"containers/{container.id}/archive",
                "PUT",
                params={"path": _INSIDE, "noOverwriteDirNonDir": "0"},
                data=stream,
                headers={"Content-Type": "application/x-tar"},
            ) as answer,
        ):
            await answer.read()

    async def close(self) -> None:
        """Let the volumes go, for whoever collects; what an engine that is gone still holds ends with the lease."""
        with contextlib.suppress(SandboxError):
            await self._held.aclose()

    async def _is_whole(self, container: DockerContainer) -> bool:
        try:
            async with self._docker._query(
                f"containers/{container.id}/archive", "GET", params={"path": f"{_INSIDE}/{_WHOLE}"}
            ):
                return True
        except DockerError as error:
            if error.status != 404:
                raise
            return False


async def collect_volumes(docker: Client, *, dry_run: bool = False) -> list[str]:
    """Remove the volumes of pier's that no container uses; their names."""
    rows = (await docker._query_json("volumes")).get("Volumes") or []
    containers: list[dict[str, Any]] = await docker._query_json("containers/json", params={"all": "1"})
    used = {mount.get("Name") for container in containers for mount in container.get("Mounts") or []}
    found = sorted(row["Name"] for row in rows if _OURS.fullmatch(row["Name"]) and row["Name"] not in used)
    removed: list[str] = []
    for name in found:
        with removal_lock(name) as is_free:
            if is_free and (dry_run or await _remove(docker, name)):
                removed.append(name)
    return removed


async def _remove(docker: Client, name: str) -> bool:
    """Whether it is gone; an engine keeps what a container that was made meanwhile uses."""
    try:
        async with docker._query(f"volumes/{name}", "DELETE"):
            return True
    except DockerError as error:
        if error.status in (404, 409):
            return error.status == 404
        raise engine_error(error) from error


def digest_of(directory: Path) -> str:
    """Names the content of a tree: paths, kinds, modes, links and bytes."""
    made = hashlib.sha256()
    for path, found in _entries(directory):
        made.update(f"{path.relative_to(directory)}\0{found.st_mode:o}\0{found.st_size}\n".encode())
        if stat.S_ISLNK(found.st_mode):
            made.update(os.fsencode(path.readlink()))
        elif stat.S_ISREG(found.st_mode):
            with path.open("rb") as stream:
                while data := stream.read(_CHUNK):
                    made.update(data)
    return made.hexdigest()[:24]


def _entries(directory: Path) -> list[tuple[Path, os.stat_result]]:
    """What is below a directory, parents first; what is no file, directory or link is left out."""
    found: list[tuple[Path, os.stat_result]] = []
    for path in sorted(directory.rglob("*")):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode) or stat.S_ISLNK(status.st_mode):
            found.append((path, status))
    return found


async def _packed(directory: Path) -> AsyncIterator[bytes]:
    """A tar stream of the tree, root's, with the mark of its end as the last file."""
    for path, found in await asyncio.to_thread(_entries, directory):
        info = tarfile.TarInfo(str(path.relative_to(directory)))
        info.mode, info.mtime = stat.S_IMODE(found.st_mode), int(found.st_mtime)
        if stat.S_ISLNK(found.st_mode):
            info.type, info.linkname = tarfile.SYMTYPE, str(path.readlink())
        elif stat.S_ISDIR(found.st_mode):
            info.type = tarfile.DIRTYPE
        else:
            info.size = found.st_size
        yield info.tobuf(tarfile.PAX_FORMAT)
        if info.isreg():
            async for data in _content(path, info.size):
                yield data
    end = tarfile.TarInfo(_WHOLE)
    end.mode = 0o444
    yield end.tobuf(tarfile.PAX_FORMAT) + bytes(2 * tarfile.BLOCKSIZE)


async def _content(path: Path, size: int) -> AsyncIterator[bytes]:
    with path.open("rb") as stream:
        left = size
        while left:
            data = await asyncio.to_thread(stream.read, min(_CHUNK, left))
            if not data:
                raise OSError(f"{path} became shorter while it was copied")
            left -= len(data)
            yield data
    yield bytes(-size % tarfile.BLOCKSIZE)


VOLUME = "trial-volume"
_VOLUME_INSIDE = "pier-volume"


class TrialVolumes:
    """The volumes of one trial, by the names that its compose file has for them. `image` is any image of the engine:
    files come into a volume by way of a container that never runs."""

    def __init__(self, docker: Client, lease: Lease, image: str) -> None:
        self._docker = docker
        self._image = image
        self._lease = lease
        self._made: dict[str, str] = {}

    async def get(self, key: str) -> str:
        """The engine's name of the volume `key`, which is made when it is first asked for."""
        if key not in self._made:
            id = secrets.token_hex(6)
            self._made[key] = name = f"pier-volume-{id}"
            self._lease.write(VOLUME, id, {"engine": self._docker.address, "name": name})
            try:
                await self._docker.volumes.create({"Name": name, "Labels": {LABEL: self._lease.owner}})
            except DockerError as error:
                raise engine_error(error) from error
        return self._made[key]

    async def filled(self, directory: Path) -> str:
        """The engine's name of the volume with a copy of `directory`, whose files are root's there."""
        key = f"//{directory}"
        if key in self._made:
            return self._made[key]
        name = await self.get(key)
        host = {"NetworkMode": "none", "Binds": [f"{name}:/{_VOLUME_INSIDE}"]}
        config = {"Image": self._image, "Cmd": ["none"], "HostConfig": host}
        packed = await asyncio.to_thread(_packed_whole, directory, ".")
        mode = _packed_whole(directory, _VOLUME_INSIDE, recursive=False)
        try:
            async with temporary_container(self._docker, self._lease, config) as container:
                await container.put_archive(f"/{_VOLUME_INSIDE}", packed)
                # The mode of a volume itself is set from above it only.
                await container.put_archive("/", mode)
        except DockerError as error:
            raise engine_error(error) from error
        return name

    async def remove(self) -> None:
        """Remove all of them; no container may use one any more. Idempotent."""
        names = list(self._made.values())
        self._made.clear()
        await close_all(self._remove(name) for name in names)

    async def _remove(self, name: str) -> None:
        await remove_volume(self._docker, name)
        self._lease.strike(VOLUME, name.rpartition("-")[2])


async def remove_volume(docker: aiodocker.Docker, name: str) -> None:
    """Remove a volume; one that is gone already is fine."""
    try:
        async with docker._query(f"volumes/{name}", method="DELETE", params={"force": "1"}):
            return
    except DockerError as error:
        if error.status != 404:
            raise engine_error(error) from error


def _packed_whole(directory: Path, name: str, *, recursive: bool = True) -> bytes:
    def as_roots(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        return info

    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        archive.add(directory, name, recursive=recursive, filter=as_roots)
    return packed.getvalue()
