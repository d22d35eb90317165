"""Keeps credentials out of everything that is written down or handed on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

SECRET_HEADERS = frozenset(
    {
        "authorization",
        "proxy-authorization",
        "x-api-key",
        "api-key",
        "x-goog-api-key",
        "cookie",
        "set-cookie",
        "openai-organization",
        "anthropic-organization-id",
    }
)
REDACTED = "[redacted]"
_SHORTEST_SECRET = 16
"""Shorter keys are stand-ins such as `EMPTY`, which may well be words of an answer."""
_KEY_IN_QUERY = re.compile(r"([?&](?:key|api[_-]?key|access_token)=)[^&]*", re.IGNORECASE)


def redacted(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers with lower-case names and without what they would give away."""
    lowered = ((name.lower(), value) for name, value in headers.items())
    return {name: REDACTED if name in SECRET_HEADERS else value for name, value in lowered}


@lru_cache(512)
def redacted_path(path: str) -> str:
    return _KEY_IN_QUERY.sub(rf"\g<1>{REDACTED}", path)


class Scrubber:
    """Removes given secrets from bytes, for the case that an upstream echoes what it was sent."""

    def __init__(self, *secrets: str | None) -> None:
        self._secrets = tuple(secret.encode() for secret in secrets if secret and len(secret) >= _SHORTEST_SECRET)

    def __call__(self, data: bytes) -> bytes:
        for secret in self._secrets:
            if secret in data:
                data = data.replace(secret, REDACTED.encode())
        return data
