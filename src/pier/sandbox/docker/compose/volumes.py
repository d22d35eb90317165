"""The volumes that services of one trial share: made for it, written down first, removed with it."""

from __future__ import annotations

import asyncio
import io
import secrets
import tarfile
from pathlib import Path

import aiodocker
from aiodocker.exceptions import DockerError

from pier.lease import Lease
from pier.sandbox.closing import close_all
from pier.sandbox.docker.box import LABEL, engine_error, passing_container
from pier.sandbox.docker.client import Client

VOLUME = "trial-volume"
_INSIDE = "pier-volume"


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
        host = {"NetworkMode": "none", "Binds": [f"{name}:/{_INSIDE}"]}
        config = {"Image": self._image, "Cmd": ["none"], "HostConfig": host}
        packed = await asyncio.to_thread(_packed, directory, ".")
        mode = _packed(directory, _INSIDE, recursive=False)
        try:
            async with passing_container(self._docker, self._lease, config) as container:
                await container.put_archive(f"/{_INSIDE}", packed)
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


def _packed(directory: Path, name: str, *, recursive: bool = True) -> bytes:
    def as_roots(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        return info

    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        archive.add(directory, name, recursive=recursive, filter=as_roots)
    return packed.getvalue()
