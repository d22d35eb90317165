"""Has an engine pull an image from its registry, and tells how far it is."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import aiodocker
from aiodocker.exceptions import DockerError

from pier.errors import ImageError
from pier.image.model import Reference, parse
from pier.image.registry import find_credentials
from pier.sandbox.docker.client import DISK_FULL, SPACE_HINT, is_disk_full

_DONE = ("Pull complete", "Already exists")


async def pull(docker: aiodocker.Docker, reference: str, on_progress: Callable[[str], None] | None = None) -> None:
    """Pull `reference` with the credentials that `docker login` left. `ImageError` with the code `not_found`,
    `unauthorized` or `unreachable` says why it could not."""
    named = parse(reference)
    tell = on_progress or (lambda _: None)
    params = {"fromImage": f"{named.registry}/{named.repository}", "tag": named.digest or named.tag}
    layers: dict[str, str] = {}
    try:
        async with docker._query("images/create", "POST", params=params, headers=await _headers(named)) as answer:
            async for line in answer.content:
                message: dict[str, Any] = json.loads(line) if line.strip() else {}
                if "error" in message:
                    raise _failure(reference, str(message["error"]))
                _tell(message, layers, tell)
    except DockerError as error:
        raise _failure(reference, error.message if isinstance(error.message, str) else str(error)) from error


async def _headers(named: Reference) -> dict[str, str]:
    found = await find_credentials(named.registry)
    if found is None:
        return {}
    who = {"username": found.username, "password": found.password, "serveraddress": named.registry}
    if found.identity_token:
        who = {"identitytoken": found.identity_token, "serveraddress": named.registry}
    return {"X-Registry-Auth": base64.urlsafe_b64encode(json.dumps(who).encode()).decode()}


def _tell(message: dict[str, Any], layers: dict[str, str], tell: Callable[[str], None]) -> None:
    """One line for each step of each layer, not for each piece of it."""
    status, layer = str(message.get("status", "")), str(message.get("id", ""))
    size = (message.get("progressDetail") or {}).get("total")
    if not layer or layers.get(layer) == status or "Pulling from" in status:
        return
    layers[layer] = status
    done = sum(each in _DONE for each in layers.values())
    told = f" of {size / 1e6:.1f} MB" if size else ""
    tell(f"{layer}: {status}{told} ({done} of {len(layers)} layers)")


def _failure(reference: str, text: str) -> ImageError:
    lower = text.lower()
    message = f"the engine cannot pull {reference}: {text}"
    if is_disk_full(text):
        return ImageError(message, code=DISK_FULL, hint=SPACE_HINT, retryable=True)
    if any(word in lower for word in ("unauthorized", "denied", "authentication required", "no basic auth")):
        hint = f"docker login {parse(reference).registry}"
        return ImageError(message, code="unauthorized", hint=hint, blame="user")
    if any(word in lower for word in ("not found", "manifest unknown", "no such image", "no such manifest")):
        hint = f"check the name and its tag: docker manifest inspect {reference}"
        return ImageError(message, code="not_found", hint=hint, blame="user")
    hint = f"check that the engine reaches {parse(reference).registry}: docker pull {reference}"
    return ImageError(message, code="unreachable", hint=hint, retryable=True)
