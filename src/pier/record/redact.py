"""Keeps credentials out of everything that is written down or handed on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

from pier.secret import looks_secret

SECRET_HEADERS = frozenset(
    {
        *("authorization", "proxy-authorization", "x-api-key", "api-key", "x-goog-api-key", "cookie", "set-cookie"),
        *("openai-organization", "anthropic-organization-id"),
    }
)
REDACTED = "[redacted]"
_SHORTEST_SECRET = 16
"""Shorter keys are stand-ins such as `EMPTY`, which may well be words of an answer."""
_USER_INFO = re.compile(r"(?<=://)[^/?#@:\s]*:[^/?#\s]*@")
_PARAMETER = re.compile(r"([?&]([^=&?]+)=)[^&]*")


def redacted(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers with lower-case names and without what they would give away."""
    return {name.lower(): REDACTED if is_secret_name(name) else value for name, value in headers.items()}


@lru_cache(512)
def redacted_path(path: str) -> str:
    """A path or an address without passwords and keys in it."""

    def clean(found: re.Match[str]) -> str:
        return found[1] + REDACTED if looks_secret(found[2]) else found[0]

    return _PARAMETER.sub(clean, _USER_INFO.sub(f"{REDACTED}@", path))


@lru_cache(512)
def is_secret_name(header: str) -> bool:
    """Whether a header of this name most likely holds a credential."""
    return header.lower() in SECRET_HEADERS or looks_secret(header)


class Scrubber:
    """Removes given secrets from bytes, for the case that an upstream echoes what it was sent: from a whole text when
    it is called, or from a stream with `feed` and `rest`, also where a secret comes in pieces."""

    def __init__(self, *secrets: str | None) -> None:
        self._secrets = tuple(secret.encode() for secret in secrets if secret and len(secret) >= _SHORTEST_SECRET)
        self._held = b""

    def __call__(self, data: bytes) -> bytes:
        for secret in self._secrets:
            if secret in data:
                data = data.replace(secret, REDACTED.encode())
        return data

    def feed(self, data: bytes) -> bytes:
        """More of a stream, but for an end that a secret may begin with."""
        data = self(self._held + data if self._held else data)
        held = 0 if data.endswith(b"\n") else max((_begun(data, secret) for secret in self._secrets), default=0)
        self._held = data[len(data) - held :]
        return data[: len(data) - held] if held else data

    def rest(self) -> bytes:
        """The bytes that were held back, at the end of a stream."""
        held, self._held = self._held, b""
        return held


def _begun(data: bytes, secret: bytes) -> int:
    """How many bytes at the end of `data` are the beginning of the secret."""
    return next((size for size in range(len(secret) - 1, 0, -1) if data.endswith(secret[:size])), 0)
