"""Talks to OCI registries: finds manifests and downloads blobs, each checked against its digest.

A download that was cut off goes on where it stopped, in this process or in a later one.

A registry leads to other hosts: token servers, and redirects to where blobs are stored. Which of them are reached
depends on who named the image:

- A registry that the user named, or has credentials for, is reached wherever it is. Other hosts that it names are
  reached at public and private addresses.
- A registry that only a task named is reached at public and private addresses. Other hosts that it names are reached
  at public addresses.

Loopback, link-local and metadata addresses and those of this machine are reached in no other case.

Credentials are those that `docker login` left in Docker's own configuration.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import ipaddress
import json
import os
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from pier.beneath import write_all
from pier.errors import ImageError
from pier.image.model import DEFAULT_REGISTRY, OnProgress, Reference, choose_platform, digest_of, disk_errors
from pier.image.outbound import HostRefused, open_session
from pier.network.outside import Outside, Refused
from pier.network.policy import Address, objection

_HUB = "https://index.docker.io/v1/"


@dataclass(frozen=True, slots=True)
class Credentials:
    """A name with a password, or a token that stands for both."""

    username: str = ""
    password: str = ""
    identity_token: str = ""

    def __repr__(self) -> str:
        return f"Credentials(username={self.username!r})"


async def find_credentials(registry: str) -> Credentials | None:
    """The credentials for a registry, None if there are none. A credential helper that is named but not installed, or
    that fails, is an `ImageError` with code `credentials`."""
    config = _read_config()
    names = _names(registry)
    helpers = config.get("credHelpers") or {}
    helper = next((helpers[name] for name in names if name in helpers), config.get("credsStore"))
    if helper:
        for name in names:
            if (found := await _ask_helper(str(helper), name)) is not None:
                return found
    for name, entry in (config.get("auths") or {}).items():
        if _host(name) in {_host(wanted) for wanted in names} and (found := _from_entry(entry)) is not None:
            return found
    return None


def _read_config() -> dict[str, Any]:
    directory = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")
    path = directory / "config.json"
    try:
        value = json.loads(path.read_text())
    except (FileNotFoundError, PermissionError, NotADirectoryError):
        return {}
    except ValueError as error:
        raise ImageError(f"{path} is not JSON: {error}", code="credentials", blame="user") from None
    return value if isinstance(value, dict) else {}


def _names(registry: str) -> list[str]:
    return [_HUB, "index.docker.io", registry] if registry == DEFAULT_REGISTRY else [registry, f"https://{registry}"]


def _host(name: str) -> str:
    return name.removeprefix("https://").removeprefix("http://").partition("/")[0]


def _from_entry(entry: dict[str, Any]) -> Credentials | None:
    if token := entry.get("identitytoken"):
        return Credentials(identity_token=token)
    if auth := entry.get("auth"):
        try:
            name, _, password = base64.b64decode(auth).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            return None
        return Credentials(name, password)
    if entry.get("username"):
        return Credentials(entry["username"], entry.get("password", ""))
    return None


async def _ask_helper(helper: str, registry: str) -> Credentials | None:
    program = f"docker-credential-{helper}"
    if shutil.which(program) is None:
        raise ImageError(
            f"Docker's configuration keeps the credentials of {registry} in {helper!r}, and there is no program "
            f"{program}",
            code="credentials",
            blame="user",
            hint=f"install {program}, or remove credsStore from ~/.docker/config.json and run docker login again",
        )
    process = await asyncio.create_subprocess_exec(
        program, "get", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(60):
            out, problem = await process.communicate(registry.encode())
    except TimeoutError:
        raise ImageError(f"{program} did not answer", code="credentials") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        text = (out + problem).decode(errors="replace").strip()
        if "not found" in text.lower():
            return None
        raise ImageError(f"{program} failed: {text}", code="credentials")
    answer = json.loads(out)
    if answer.get("Username") == "<token>":
        return Credentials(identity_token=answer.get("Secret", ""))
    return Credentials(answer.get("Username", ""), answer.get("Secret", ""))


_MANIFESTS = ", ".join(
    f"application/vnd.{kind}+json"
    for kind in (
        "oci.image.index.v1",
        "oci.image.manifest.v1",
        "docker.distribution.manifest.list.v2",
        "docker.distribution.manifest.v2",
    )
)
_TRIES = 5
_CHUNK = 1 << 18
_CHALLENGE = re.compile(r'([a-z_]+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Manifest:
    """An image's manifest for this machine, and its digest."""

    digest: str
    config: str
    layers: tuple[str, ...]


class Registry:
    """One repository of a registry. Make it with `open_registry`."""

    def __init__(self, session: aiohttp.ClientSession, reference: Reference) -> None:
        self._session = session
        self._reference = reference
        self._authorization = ""
        self._login = asyncio.Lock()
        self._base = ""

    async def manifest(self) -> Manifest:
        """The manifest that the reference names; of several platforms' the one for this machine."""
        wanted = self._reference.digest or self._reference.tag
        digest, value = await self._manifest(wanted)
        for _ in range(3):
            if "manifests" not in value:
                break
            chosen = choose_platform(value["manifests"], str(self._reference))
            _, value = await self._manifest(digest_of(chosen))
        if "config" not in value or "layers" not in value:
            raise ImageError(f"{self._reference} is not a container image", code="manifest")
        return Manifest(digest, digest_of(value["config"]), tuple(digest_of(layer) for layer in value["layers"]))

    async def _manifest(self, wanted: str) -> tuple[str, dict[str, Any]]:
        async with self._get(f"manifests/{wanted}", {"Accept": _MANIFESTS}) as answer:
            body = await answer.read()
        digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
        if wanted.startswith("sha256:") and digest != wanted:
            raise ImageError(f"the manifest {wanted} of {self._reference} has the digest {digest}", code="digest")
        try:
            value = json.loads(body)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise ImageError(f"the manifest of {self._reference} is not a JSON object", code="manifest")
        return digest, value

    async def blob(self, digest: str) -> bytes:
        """A small blob."""
        async with self._get(f"blobs/{digest}") as answer:
            body = await answer.read()
        _check(digest, hashlib.sha256(body).hexdigest(), self._reference)
        return body

    async def download(self, digest: str, target: Path, on_progress: OnProgress) -> None:
        """Download a blob to `target`; what is there already is not asked for again."""
        for attempt in range(_TRIES):
            try:
                await self._download(digest, target, on_progress)
                break
            except (aiohttp.ClientError, TimeoutError) as error:
                if attempt == _TRIES - 1:
                    raise _unreachable(self._reference, error) from error
                await asyncio.sleep(0.2 * 2**attempt)
        found = await asyncio.to_thread(_digest_of, target)
        if f"sha256:{found}" != digest:
            target.unlink(missing_ok=True)
        _check(digest, found, self._reference)

    async def _download(self, digest: str, target: Path, on_progress: OnProgress) -> None:
        there = target.stat().st_size if target.exists() else 0
        headers = {"Range": f"bytes={there}-", "Accept-Encoding": "identity"} if there else {}
        async with self._get(f"blobs/{digest}", headers, allowed=(200, 206, 416)) as answer:
            if answer.status == 416:
                return
            with target.open("ab" if answer.status == 206 else "wb", buffering=0) as sink:
                total = (answer.content_length or 0) + sink.tell()
                last = asyncio.get_running_loop().time()
                async for chunk in answer.content.iter_chunked(_CHUNK):
                    with disk_errors(f"downloading {digest}"):
                        write_all(sink.fileno(), chunk)
                    now = asyncio.get_running_loop().time()
                    if now - last > 1:
                        last = now
                        on_progress(f"  {digest[7:19]}  {sink.tell() / 1e6:.1f} of {total / 1e6:.1f} MB")

    @asynccontextmanager
    async def _get(
        self, path: str, headers: dict[str, str] | None = None, allowed: tuple[int, ...] = (200,)
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        base = await self._find_base()
        url = f"{base}/v2/{self._reference.repository}/{path}"
        for attempt in range(2):
            used = self._authorization
            sent = dict(headers or {}) | ({"Authorization": used} if used else {})
            async with self._session.get(url, headers=sent) as answer:
                if answer.status == 401 and attempt == 0:
                    await self._log_in(answer.headers.get("WWW-Authenticate", ""), used)
                    continue
                await self._check_status(answer, allowed)
                yield answer
                return

    async def _check_status(self, answer: aiohttp.ClientResponse, allowed: tuple[int, ...]) -> None:
        if answer.status in allowed:
            return
        text = (await answer.text(errors="replace"))[:300].strip()
        name = str(self._reference)
        if answer.status in (401, 403):
            raise ImageError(
                f"{self._reference.registry} refuses {name}: {text}",
                code="unauthorized",
                blame="user",
                hint=f"docker login {self._reference.registry}",
            )
        if answer.status == 404:
            raise ImageError(f"{self._reference.registry} has no {name}", code="not_found", blame="user")
        if answer.status >= 500:
            answer.raise_for_status()
        raise ImageError(
            f"{self._reference.registry} answered {answer.status}: {text}",
            code="registry",
            retryable=answer.status == 429,
        )

    async def _find_base(self) -> str:
        """Where the registry is. One on this machine's loopback may speak plain HTTP, as with Docker."""
        if self._base:
            return self._base
        host = _api_host(self._reference.registry)
        if _is_loopback(host):
            try:
                async with self._session.get(f"https://{host}/v2/"):
                    pass
            except (aiohttp.ClientSSLError, aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                self._base = f"http://{host}"
                return self._base
        self._base = f"https://{host}"
        return self._base

    async def _log_in(self, challenge: str, used: str) -> None:
        async with self._login:
            if self._authorization != used:
                return
            credentials = await find_credentials(self._reference.registry)
            kind, _, rest = challenge.partition(" ")
            if kind.lower() == "basic":
                if credentials is None:
                    raise self._refused("it requires a user name and a password")
                self._authorization = aiohttp.encode_basic_auth(credentials.username, credentials.password)
            elif kind.lower() == "bearer":
                self._authorization = f"Bearer {await self._token(dict(_CHALLENGE.findall(rest)), credentials)}"
            else:
                raise self._refused(f"it requires {kind or 'an unknown kind of'} authentication")

    async def _token(self, asked: dict[str, str], credentials: Credentials | None) -> str:
        realm = asked.get("realm", "")
        scope = asked.get("scope") or f"repository:{self._reference.repository}:pull"
        if credentials is not None and credentials.identity_token:
            form = {
                "grant_type": "refresh_token",
                "refresh_token": credentials.identity_token,
                "client_id": "pier",
                "service": asked.get("service", ""),
                "scope": scope,
            }
            request = self._session.post(realm, data=form)
        else:
            query = {"service": asked.get("service", ""), "scope": scope}
            headers = {}
            if credentials is not None:
                headers["Authorization"] = aiohttp.encode_basic_auth(credentials.username, credentials.password)
            request = self._session.get(realm, params=query, headers=headers)
        async with request as answer:
            if answer.status != 200:
                raise self._refused(f"its token server answered {answer.status}")
            value = await answer.json(content_type=None)
        return value.get("token") or value.get("access_token") or ""

    def _refused(self, why: str) -> ImageError:
        return ImageError(
            f"{self._reference.registry} refuses {self._reference}: {why}",
            code="unauthorized",
            blame="user",
            hint=f"docker login {self._reference.registry}",
        )


class _Reach:
    """Which hosts one registry may lead to, and at which addresses."""

    def __init__(self, registry: str, for_task: bool) -> None:
        self._registry = registry
        self._for_task = for_task
        self._outside = Outside()

    async def check(self, host: str, port: int) -> list[Address]:
        try:
            addresses: list[Address] = [ipaddress.ip_address(host)]
        except ValueError:
            addresses = await self._outside.resolve(host)
        own = host == _host_name(_api_host(self._registry))
        usable = [one for one in addresses if not objection(one, private_too=not own)]
        if not usable and await self._is_trusted():
            usable = [one for one in addresses if own or not objection(one, private_too=False)]
        if not usable:
            raise Refused(objection(addresses[0], private_too=True) if addresses else "has no address")
        return usable

    async def _is_trusted(self) -> bool:
        return not self._for_task or await find_credentials(self._registry) is not None


@asynccontextmanager
async def open_registry(reference: Reference, *, for_task: bool = False) -> AsyncIterator[Registry]:
    """The registry of a reference. Not being able to reach it is an `ImageError` with code `unreachable`, and a host
    that may not be reached one with code `refused`."""
    async with open_session(_Reach(reference.registry, for_task).check, connect_seconds=30) as session:
        try:
            yield Registry(session, reference)
        except HostRefused as error:
            raise ImageError(
                f"cannot pull {reference}: it leads to {error}",
                code="refused",
                blame="task" if for_task else "infra",
                hint=f"pier image pull {reference.familiar}, if you trust this registry" if for_task else None,
            ) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _unreachable(reference, error) from error


def _unreachable(reference: Reference, error: BaseException) -> ImageError:
    return ImageError(
        f"the registry {reference.registry} cannot be reached: {error or type(error).__name__}",
        code="unreachable",
        retryable=True,
    )


def _check(digest: str, found: str, reference: Reference) -> None:
    if f"sha256:{found}" != digest:
        raise ImageError(f"a blob of {reference} has the digest sha256:{found}, not {digest}", code="digest")


def _digest_of(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _api_host(registry: str) -> str:
    return "registry-1.docker.io" if registry == DEFAULT_REGISTRY else registry


def _host_name(host: str) -> str:
    return re.sub(r":\d+$", "", host).strip("[]").lower()


def _is_loopback(host: str) -> bool:
    name = _host_name(host)
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
