"""HTTP headers and addresses: those of an agent that reach a provider, and the credentials that must not be kept.

An agent chooses headers and parameters, and a server in front of a provider may refuse any of them with the status of
an outage. So only those that known clients send are passed on: the usual ones and those that the dialect lists.
Credentials are removed from everything that is recorded or returned to the agent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

from pier.secret import looks_secret
from pier.wire.contract import Dialect, name_pattern

HOP_BY_HOP = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection"),
        *("te", "trailer", "transfer-encoding", "upgrade"),
    }
)
_REPLACED = HOP_BY_HOP | {
    *("host", "content-length", "content-encoding", "content-type", "accept-encoding", "expect"),
    *("authorization", "x-api-key", "x-goog-api-key", "api-key"),
}
"""Headers that pier sets itself in every request."""
_USUAL = name_pattern("accept user-agent idempotency-key x-request-id x-client-request-id x-session-id x-stainless-*")
_VALUE = re.compile(r"[\x21-\x7e]([\x20-\x7e]{0,4094}[\x21-\x7e])?")
_MAX_SIZE = 16 * 1024
"""Characters of all headers that are passed on; servers accept at least that."""
_SECRET_HEADERS = frozenset(
    {
        *("authorization", "proxy-authorization", "x-api-key", "api-key", "x-goog-api-key", "cookie", "set-cookie"),
        *("openai-organization", "anthropic-organization-id"),
    }
)
REDACTED = "[redacted]"
_SHORTEST_SECRET = 16
"""Shorter keys are placeholders such as `EMPTY`, which may occur as words of an answer."""
_USER_INFO = re.compile(r"(?<=://)[^/?#@:\s]*:[^/?#\s]*@")
_PARAMETER = re.compile(r"([?&]([^=&?]+)=)[^&]*")


def plain_headers(dialect: Dialect) -> dict[str, str]:
    """The headers of every request to a provider that do not come from an agent."""
    return {"Content-Type": "application/json", "User-Agent": "pier", **dialect.headers}


def passed_headers(dialect: Dialect, headers: Iterable[tuple[str, str]]) -> tuple[dict[str, str], tuple[str, ...]]:
    """The headers for a provider, and the names of those that were dropped. Repeated headers are joined."""
    passed: dict[str, tuple[str, str]] = {}
    dropped: set[str] = set()
    size = 0
    for written, value in headers:
        name = written.lower()
        if name in _REPLACED:
            continue
        first, before = passed.get(name, (written, ""))
        joined = f"{before}, {value}" if before else value
        size += len(name) + len(value)
        is_known = _USUAL.fullmatch(name) or dialect.is_client_header(name)
        if name not in dropped and is_known and _VALUE.fullmatch(joined) and size <= _MAX_SIZE:
            passed[name] = first, joined
        else:
            dropped.add(name)
            passed.pop(name, None)
    defaults = {name: value for name, value in plain_headers(dialect).items() if name.lower() not in passed}
    return defaults | dict(passed.values()), tuple(sorted(dropped))


def passed_query(dialect: Dialect, query: str) -> str:
    """The parameters for a provider."""
    return "&".join(part for part in query.split("&") if dialect.client_query.fullmatch(part))


def redacted(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers with lower-case names and without credentials."""
    return {name.lower(): REDACTED if is_secret_name(name) else value for name, value in headers.items()}


@lru_cache(512)
def redacted_path(path: str) -> str:
    """A path or an address without passwords and keys."""

    def clean(match: re.Match[str]) -> str:
        return match[1] + REDACTED if looks_secret(match[2]) else match[0]

    return _PARAMETER.sub(clean, _USER_INFO.sub(f"{REDACTED}@", path))


@lru_cache(512)
def is_secret_name(header: str) -> bool:
    """Whether a header of this name most likely holds a credential."""
    return header.lower() in _SECRET_HEADERS or looks_secret(header)


class Scrubber:
    """Removes given secrets from bytes in case an upstream echoes them: from a whole text when called, or from a stream
    with `feed` and `rest`, which also find a secret that is split over several pieces."""

    def __init__(self, *secrets: str | None) -> None:
        self._secrets = tuple(secret.encode() for secret in secrets if secret and len(secret) >= _SHORTEST_SECRET)
        self._held = b""

    def __call__(self, data: bytes) -> bytes:
        for secret in self._secrets:
            if secret in data:
                data = data.replace(secret, REDACTED.encode())
        return data

    def feed(self, data: bytes) -> bytes:
        """The next piece of a stream, without a tail that may be the beginning of a secret."""
        data = self(self._held + data if self._held else data)
        held = 0 if data.endswith(b"\n") else max((_overlap(data, secret) for secret in self._secrets), default=0)
        self._held = data[len(data) - held :]
        return data[: len(data) - held] if held else data

    def rest(self) -> bytes:
        """The bytes that were held back, at the end of a stream."""
        held, self._held = self._held, b""
        return held


def _overlap(data: bytes, secret: bytes) -> int:
    """Number of bytes at the end of `data` that are the beginning of the secret."""
    return next((size for size in range(len(secret) - 1, 0, -1) if data.endswith(secret[:size])), 0)
