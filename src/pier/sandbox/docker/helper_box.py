"""The helper's container: one for each engine and version of pier, made by whoever needs it first and shared by all.

Its name is derived from what it is made of, so that whoever starts at the same instant means the same one. Nobody owns
it: it ends by itself when nobody has used it for a while (`keeper`), and the engine then removes it. A lease has it
only until it runs.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from typing import Any

import aiodocker
import aiohttp
from aiodocker.containers import DockerContainer
from aiodocker.exceptions import DockerError
from aiodocker.stream import Stream

from pier.errors import SandboxError
from pier.home import pier_home
from pier.image.disk import only_one
from pier.lease import Lease
from pier.sandbox.docker.client import Client, bring_image, engine_error
from pier.sandbox.docker.holding import holding
from pier.sandbox.docker.idle import IDLE
from pier.sandbox.docker.keeper import MARK
from pier.sandbox.docker.runtime import Runtime

HELPER = "helper"
"""The kind of lease that a helper has while it is made."""
REPOSITORY = "pier/helper"
_LABEL = "dev.pier.helper"
_CAPABILITIES = ["SYS_ADMIN", "SYS_PTRACE", "NET_ADMIN", "WAKE_ALARM"]
_UNCONFINED = ["seccomp=unconfined", "apparmor=unconfined", "label=disable"]
_ENDING = (404, 409, 500)
"""How engines answer to what is asked of a container that is not there, does not run yet or is just ending."""
_MOST_STARTS = 5
_MAKE_SECONDS = 60
_AGAIN_SECONDS = 1.0


class HelperBox:
    """The container of that name at one engine."""

    def __init__(self, docker: Client, lease: Lease, runtime: Runtime, digest: str) -> None:
        self.volume = f"pier-pack-{digest}"
        """The volume that has the program which keeps containers alive."""
        self._docker = docker
        self._lease = lease
        self._runtime = runtime
        self._image = f"{REPOSITORY}:{digest}"
        self._config = _config(runtime, self._image, self.volume)
        told = json.dumps(self._config, sort_keys=True)
        self.name = f"pier-helper-{hashlib.sha256(told.encode()).hexdigest()[:16]}"
        self._starts = 0
        self._refusal = ""

    async def attach(self, mark: str) -> Stream | None:
        """The standard streams of a new session; None if there is no helper that runs."""
        try:
            session = await self._docker.containers.container(self.name).exec(
                list(self._runtime.argv), stdin=True, user="0:0", environment={MARK: mark}
            )
            stream = session.start()
            await stream._init()
        except DockerError as error:
            if error.status not in _ENDING:
                raise
            self._refusal = str(error.message)
            return None
        return stream

    async def ended(self) -> None:
        """Wait until it does not run. Engines leave the streams of a session open when they kill the container."""
        container = self._docker.containers.container(self.name)
        while True:
            try:
                await container.wait()
                return
            except DockerError as error:
                if error.status == 404:
                    return
            except (aiohttp.ClientError, OSError):
                pass
            await asyncio.sleep(_AGAIN_SECONDS)

    async def ensure(self) -> None:
        """Have it run. When it is just being started or removed by somebody else, it may not do so yet."""
        container = self._docker.containers.container(self.name)
        try:
            state = (await container.show())["State"]
        except DockerError as error:
            if error.status != 404:
                raise
            await self._make_whole()
            return
        try:
            if state.get("Paused"):
                await container.unpause()
            elif not state.get("Running"):
                await container.start()
        except DockerError as error:
            if error.status not in _ENDING:
                raise
            # One that has ended and can be neither started nor waited for must not keep the name for ever.
            await remove_idle(self._docker, self.name)

    async def _make_whole(self) -> None:
        """Make it. An engine goes on with what it was asked for, so whoever is cancelled waits until that is done."""
        making = asyncio.ensure_future(self._make())
        try:
            await asyncio.shield(making)
        except asyncio.CancelledError:
            await asyncio.wait([making], timeout=_MAKE_SECONDS)
            if making.done() and not making.cancelled():
                making.exception()
            raise

    async def _make(self) -> None:
        self._starts += 1
        if self._starts > _MOST_STARTS:
            why = f": {self._refusal}" if self._refusal else ""
            raise SandboxError(f"the helper {self.name} does not stay{why}", code="helper_start", hint="pier doctor")
        self._lease.write(HELPER, self.name, {"engine": self._docker.address, "name": self.name})
        try:
            async with holding(self._image):
                async with only_one(pier_home() / "docker" / "locks", self._image):
                    await bring_image(self._docker, self._image, self._runtime.archive, "pier's helper")
                container = await self._create()
            if container is not None:
                await self._start(container)
        finally:
            self._lease.strike(HELPER, self.name)

    async def _create(self) -> DockerContainer | None:
        """None if somebody else has just made it."""
        try:
            return await self._docker.containers.create(self._config, name=self.name)
        except DockerError as error:
            if error.status != 409 and "already in use" not in str(error.message):
                raise
            return None

    async def _start(self, container: DockerContainer) -> None:
        try:
            await container.start()
        except DockerError as error:
            if error.status != 409:
                await remove_idle(self._docker, self.name)
                raise


async def remove_idle(docker: aiodocker.Docker, name: str) -> None:
    """Remove a helper that was made and never ran. One that runs ends itself, and may be used by others."""
    try:
        await docker.containers.container(name).delete(v=True)
    except DockerError as error:
        if error.status not in _ENDING:
            raise engine_error(error) from error


def _config(runtime: Runtime, image: str, volume: str) -> dict[str, Any]:
    return {
        "Image": image,
        "Entrypoint": [*runtime.argv, "--keep"],
        "Cmd": [],
        "Env": list(runtime.env),
        "User": "0:0",
        "WorkingDir": "/",
        "Labels": {_LABEL: image},
        "HostConfig": {
            "AutoRemove": True,
            "NetworkMode": "host",
            "PidMode": "host",
            "CgroupnsMode": "host",
            "CapAdd": _CAPABILITIES,
            "SecurityOpt": _UNCONFINED,
            "LogConfig": {"Type": "none"},
            "Binds": ["/sys/fs/cgroup:/sys/fs/cgroup:rw"],
            "Mounts": [{"Type": "volume", "Source": volume, "Target": f"/{IDLE}"}],
        },
    }
