"""A connection to an engine's API: its errors with blame, long uploads, and locks on the names of images there.

`in_use_lock` keeps collection away from an image while a container is made from it, `removal_lock` is its counterpart,
and `creation_lock` keeps other processes of this user away while something is made under a name. A long upload reports
progress, and one that stalls is given up (`sending`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import aiodocker
import aiohttp
from aiodocker.exceptions import DockerError

from pier.errors import ImageError, SandboxError
from pier.files import locked
from pier.home import pier_home
from pier.image.engine_address import SshConnector, is_encrypted, is_socket, open_connector, shown
from pier.image.model import OnProgress
from pier.image.store import only_one

OLDEST = (1, 41)
"""The oldest version of the API that pier speaks: that of Docker 20.10 and podman 4."""

DISK_FULL = "disk_full"
SPACE_HINT = "pier image gc --env docker, and docker system df for what others left"

_CONNECT_SECONDS = 60


class Client(aiodocker.Docker):
    """The API of the engine at an address (`pier.image.engine_address`). `close` ends all connections and processes."""

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
        report = await client.complaint()
        await client.close()
        raise _unreachable(address, error, report) from error
    except BaseException:
        await client.close()
        raise


async def bring_image(docker: Client, name: str, archive: Callable[[], bytes], message: str) -> None:
    """Make an image of the root file system in a tar archive, unless the engine has one of that name."""
    try:
        await docker.images.inspect(name)
    except DockerError as error:
        if error.status != 404:
            raise
        query, data = {"fromSrc": "-", "repo": name, "message": message}, await asyncio.to_thread(archive)
        async with docker._query("images/create", "POST", params=query, data=data) as answer:
            report = await answer.text()
        if '"error"' in report:
            raise SandboxError(f"the engine did not take {message}: {report[-300:]}", code="helper_image") from None


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
    report = str(version.get("ApiVersion", ""))
    parts = report.split(".")
    if len(parts) == 2 and all(part.isdigit() for part in parts) and (int(parts[0]), int(parts[1])) < OLDEST:
        raise SandboxError(
            f"the Docker engine at {shown(address)} is too old: its API is {report}, below {OLDEST[0]}.{OLDEST[1]}",
            code="engine_too_old",
            blame="user",
            retryable=False,
            hint="update the engine to Docker 20.10 or podman 4, or newer",
        )


def _unreachable(address: str, error: BaseException, report: str) -> SandboxError:
    where = shown(address)
    reason = _reason(error)
    if (doubt := _doubt(address, error, reason)) is not None:
        text, hint = doubt
        return SandboxError(
            f"the Docker engine at {where} {text}", code="engine_tls", blame="user", retryable=False, hint=hint
        )
    if is_socket(address) and getattr(reason, "errno", None) in (errno.EACCES, errno.EPERM):
        return SandboxError(
            f"this user may not use the Docker engine's socket at {where}",
            code="engine_forbidden",
            blame="user",
            retryable=False,
            hint="add the user to the socket's group (docker) and log in again",
        )
    why = report.splitlines()[-1] if report else _in_words(reason) or str(error) or f"no answer in {_CONNECT_SECONDS} s"
    hint = (
        "start the engine, or set DOCKER_HOST" if is_socket(address) else f"check that {where} answers: docker version"
    )
    return SandboxError(f"the Docker engine at {where} does not answer: {why}", code="engine_down", hint=hint)


def _reason(error: BaseException) -> BaseException:
    """What is at the bottom of an error: who tried to connect wraps what the system said, often twice."""
    chain: list[BaseException] = [error]
    while (inner := chain[-1].__cause__ or chain[-1].__context__) is not None and inner not in chain:
        chain.append(inner)
    found = [getattr(each, "certificate_error", None) or getattr(each, "os_error", None) or each for each in chain]
    for kind in (ssl.SSLError, OSError):
        if (reason := next((each for each in found if isinstance(each, kind)), None)) is not None:
            return reason
    return error


def _doubt(address: str, error: BaseException, reason: BaseException) -> tuple[str, str] | None:
    """What is wrong with the certificates of this side or the other, and what to look at; None if nothing is."""
    if isinstance(reason, ssl.SSLError):
        look = "check DOCKER_CERT_PATH, and the name in the engine's certificate"
        return f"and its certificates do not agree: {_in_words(reason)}", look
    if is_encrypted(address) and getattr(reason, "errno", None) == errno.ECONNRESET:
        return "closed the connection, as it does for a certificate that it does not know", "check DOCKER_CERT_PATH"
    if "HTTPS server" in str(error):
        return "requires TLS", "set DOCKER_TLS_VERIFY=1 and DOCKER_CERT_PATH"
    return None


def _in_words(reason: BaseException | None) -> str:
    """Why a connection failed, without the layers of who tried."""
    if isinstance(reason, ssl.SSLCertVerificationError):
        return reason.verify_message
    if isinstance(reason, ssl.SSLError):
        return (reason.reason or str(reason)).lower().replace("_", " ")
    number = getattr(reason, "errno", None)
    if isinstance(number, int) and number > 0:
        return os.strerror(number)
    return str(getattr(reason, "strerror", None) or "")


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
        return SandboxError(f"the Docker engine's disk is full: {text}", code=DISK_FULL, hint=SPACE_HINT)
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


_PAUSE = 0.02


@asynccontextmanager
async def in_use_lock(name: str) -> AsyncIterator[None]:
    """Keep an image while a container is made from it. Many may at once; waits while it is being removed."""
    fd = os.open(_place(name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                break
            await asyncio.sleep(_PAUSE)
        yield
    finally:
        os.close(fd)


def creation_lock(name: str) -> AbstractAsyncContextManager[None]:
    """While something is made at an engine under a name: others of this user wait."""
    return only_one(pier_home() / "docker" / "locks", name)


def removal_lock(name: str) -> AbstractContextManager[bool]:
    """While an image is removed: whether nobody holds it."""
    return locked(_place(name), wait=False)


def _place(name: str) -> Path:
    directory = pier_home() / "docker" / "held"
    directory.mkdir(parents=True, exist_ok=True)
    return directory / name.replace("/", "-")


STALL_SECONDS = 900.0
"""How long an engine may take nothing and say nothing while something is sent to it. Some unpack all of it after the
last byte, before they answer."""
_REPORT_EVERY = 1.0


@asynccontextmanager
async def sending(
    parts: AsyncIterator[bytes], what: str, on_progress: OnProgress | None
) -> AsyncIterator[AsyncIterator[bytes]]:
    """Give `parts` to be sent inside of this. `what` is said with the size so far once it takes longer than a moment.
    A connection that breaks is a `DockerError`, an engine that takes nothing more an `ImageError`: nothing that is held
    meanwhile is held for ever."""
    patience = asyncio.timeout(STALL_SECONDS)

    async def watched() -> AsyncIterator[bytes]:
        size, last = 0, time.monotonic()
        async for data in parts:
            patience.reschedule(asyncio.get_running_loop().time() + STALL_SECONDS)
            yield data
            size += len(data)
            if on_progress is not None and time.monotonic() - last > _REPORT_EVERY:
                last = time.monotonic()
                on_progress(f"{what}: {size / 1e6:.0f} MB")

    try:
        async with patience:
            yield watched()
    except TimeoutError:
        if not patience.expired():
            raise
        message = f"{what}: the engine took nothing for {STALL_SECONDS:g} s"
        raise ImageError(message, code="engine_stalled", retryable=True, hint="pier doctor") from None
    except aiohttp.ClientError as error:
        raise DockerError(900, f"{what}: {error}") from error
