"""Who to be at a registry: what `docker login` left in Docker's own configuration."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pier.errors import ImageError
from pier.image.reference import DEFAULT_REGISTRY

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
