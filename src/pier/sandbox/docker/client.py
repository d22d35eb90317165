"""A connection to an engine's API, and what an engine says as errors with blame."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import aiodocker
import aiohttp
from aiodocker.exceptions import DockerError

from pier.errors import SandboxError
from pier.image.reach import SshConnector, is_socket, open_connector, shown

OLDEST = (1, 41)
"""The oldest version of the API that pier speaks: that of Docker 20.10 and podman 4."""

_CONNECT_SECONDS = 60


class Client(aiodocker.Docker):
    """The API of the engine at an address of `pier.image.reach`. `close` ends every connection and its process."""

    def __init__(self, address: str) -> None:
        self.address = address
        connector, base = open_connector(address)
        super().__init__(base, connector, aiohttp.ClientSession(connector=connector))

    async def close(self) -> None:
        await super().close()
        await self.session.close()
        if isinstance(self.connector, SshConnector):
            await self.connector.ended()

    async def complaint(self) -> str:
        """What the way to the engine said itself, if it is one that talks."""
        return await self.connector.failure() if isinstance(self.connector, SshConnector) else ""


async def connect(address: str) -> tuple[Client, dict[str, Any]]:
    """A connection to the engine that answers at `address`, and what it says of its version."""
    if not address:
        raise no_engine()
    client = Client(address)
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            version = await client.version()
        _refuse_old(address, version)
        return client, version
    except (DockerError, aiohttp.ClientError, OSError, ValueError) as error:
        told = await client.complaint()
        await client.close()
        raise _unreachable(address, error, told) from error
    except BaseException:
        await client.close()
        raise


def no_engine() -> SandboxError:
    """Nothing says where an engine is."""
    return SandboxError(
        "no Docker engine was found: DOCKER_HOST is not set, no context is chosen and the usual sockets are not there",
        code="no_engine",
        blame="user",
        retryable=False,
        hint="start an engine, set DOCKER_HOST, or use --env local",
    )


def _refuse_old(address: str, version: dict[str, Any]) -> None:
    told = str(version.get("ApiVersion", ""))
    parts = told.split(".")
    if len(parts) == 2 and all(part.isdigit() for part in parts) and (int(parts[0]), int(parts[1])) < OLDEST:
        raise SandboxError(
            f"the Docker engine at {shown(address)} is too old: its API is {told}, below {OLDEST[0]}.{OLDEST[1]}",
            code="engine_too_old",
            blame="user",
            retryable=False,
            hint="update the engine to Docker 20.10 or podman 4, or newer",
        )


def _unreachable(address: str, error: BaseException, told: str) -> SandboxError:
    why = told.splitlines()[-1] if told else str(error) or f"no answer in {_CONNECT_SECONDS} s"
    where = shown(address)
    cause = error if isinstance(error, OSError) else error.__cause__ or error.__context__
    if getattr(cause, "errno", None) in (errno.EACCES, errno.EPERM):
        return SandboxError(
            f"this user may not use the Docker engine's socket at {where}",
            code="engine_forbidden",
            blame="user",
            retryable=False,
            hint="add the user to the socket's group (docker) and log in again",
        )
    if isinstance(cause, aiohttp.ClientSSLError | aiohttp.ClientConnectorCertificateError):
        return SandboxError(
            f"the Docker engine at {where} and its certificates do not agree: {why}",
            code="engine_tls",
            blame="user",
            retryable=False,
            hint="check DOCKER_CERT_PATH, and the name in the engine's certificate",
        )
    hint = (
        "start the engine, or set DOCKER_HOST" if is_socket(address) else f"check that {where} answers: docker version"
    )
    return SandboxError(f"the Docker engine at {where} does not answer: {why}", code="engine_down", hint=hint)


def is_disk_full(text: str) -> bool:
    """Whether an engine's words mean that it has no space left."""
    return "no space left" in text.lower() or "disk quota exceeded" in text.lower()


def maps_users(where: str) -> SandboxError:
    """Root in such an engine's containers is another user of its host; whoever enters from there would not be."""
    return SandboxError(
        f"{where} maps the users of its containers to others (userns-remap), which pier does not support",
        code="engine_userns",
        blame="user",
        retryable=False,
        hint="use an engine without userns-remap, a rootless one, or --env local",
    )


def is_no_driver(error: DockerError) -> bool:
    """Whether an engine says that it has nothing that hands out devices of the kind that was asked for."""
    return "could not select device driver" in str(error.message)


def engine_error(error: DockerError) -> SandboxError:
    """What an engine said, as an error with blame."""
    text = error.message if isinstance(error.message, str) else str(error)
    if error.status == 900:
        return SandboxError(f"the Docker engine does not answer: {text}", code="engine_down", hint="pier doctor")
    if is_disk_full(text):
        return SandboxError(f"the Docker engine's disk is full: {text}", code="disk_full", hint="docker system df")
    if "user namespaces are enabled" in text:
        return maps_users("the Docker engine")
    if "nvidia-container" in text:
        return SandboxError(
            f"the Docker engine could not hand out the GPUs: {text}",
            code="gpu",
            retryable=False,
            hint="look at the GPUs of the engine's host: nvidia-smi, docker run --gpus all",
        )
    if error.status == 404:
        return SandboxError(f"the Docker engine lost it: {text}", code="container_gone")
    return SandboxError(f"the Docker engine refused: {text}", code="engine")
