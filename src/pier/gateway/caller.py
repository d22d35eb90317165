"""The agent's side of one call: its request as it came, and the answer on its way back.

Errors and refusals always leave in the caller's dialect. An answer that has begun can only end in its own dialect's
error event, since its status is gone already.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl

from multidict import CIMultiDict

from pier.gateway.body import dump
from pier.gateway.canonical import ErrorKind
from pier.gateway.dialect import DIALECTS, Dialect, Route, recognise
from pier.gateway.http.message import RequestHead, parse_request
from pier.gateway.http.request import Request
from pier.gateway.redact import redacted, redacted_path

MAX_BODY = 64 * 1024 * 1024

HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_NOT_UPSTREAM = HOP_BY_HOP | {
    *("host", "content-length", "content-encoding", "accept-encoding", "expect", "cookie"),
    *("authorization", "x-api-key", "x-goog-api-key", "api-key"),
    *("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip"),
    *("openai-organization", "openai-project", "x-goog-user-project"),
    *("x-http-method-override", "x-http-method", "x-method-override", "cf-connecting-ip"),
}
"""Headers of the connection and of identity. With another account's name, or another method, an agent could make a
provider refuse its calls as if the key were wrong."""
_NOT_DOWNSTREAM = HOP_BY_HOP | {"content-length", "content-encoding", "set-cookie", "server", "date", "alt-svc"}


@dataclass(frozen=True, slots=True)
class Origin:
    """What the head of a request says, all but its length."""

    route: Route
    key: str
    """The credential, wherever this client puts it."""
    path: str
    headers: Mapping[str, str]
    """For the recording, without secrets; so is the path."""
    forwarded: Mapping[str, str]
    """For an upstream of the same dialect: all but those of the connection and of identity."""

    @staticmethod
    def of(head: RequestHead, path: str, query: str) -> Origin:
        asked = dict(parse_qsl(query))
        route = recognise(head.method, path, asked, dict.fromkeys(map(str.lower, head.headers), ""))
        kept = CIMultiDict((name, value) for name, value in head.headers.items() if name.lower() not in _NOT_UPSTREAM)
        if route.dialect == "anthropic":
            kept.setdefault("anthropic-version", "2023-06-01")
        return Origin(route, _key(head.headers, asked), redacted_path(head.target), redacted(head.headers), kept)


def _key(headers: Mapping[str, str], query: Mapping[str, str]) -> str:
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token:
        return token.strip()
    return headers.get("x-api-key") or headers.get("x-goog-api-key") or query.get("key", "")


@lru_cache(512)
def _known_origin(same: bytes, path: str, query: str) -> Origin:
    """An agent asks the same few things again and again."""
    return Origin.of(parse_request(same), path, query)


class Caller:
    """One request of an agent, and where its answer goes."""

    def __init__(self, request: Request) -> None:
        self.request = request
        same, path, query = request.head.same, request.path, request.query_string
        self.origin = Origin.of(request.head, path, query) if same is None else _known_origin(same, path, query)
        self.route: Route = self.origin.route
        self.dialect: Dialect = DIALECTS[self.route.dialect]

    @property
    def started(self) -> bool:
        """Whether an answer has begun."""
        return self.request.started

    @property
    def key(self) -> str:
        return self.origin.key

    def facts(self) -> dict[str, Any]:
        """What is recorded of the request, without secrets."""
        length = self.request.headers.get("Content-Length")
        headers = self.origin.headers
        return {
            "kind": self.route.kind,
            "dialect": self.route.dialect,
            "method": self.request.method,
            "path": self.origin.path,
            "headers": headers if length is None else {**headers, "content-length": length},
        }

    async def read(self) -> bytes:
        """The body, at most `MAX_BODY` bytes of it after decompression; `TooLarge`, `BadMessage` or `BadCoding` if
        there is none to be had."""
        return await self.request.read(MAX_BODY)

    async def reply(
        self, status: int, body: bytes, headers: Mapping[str, str] | None = None, *, close: bool = False
    ) -> None:
        """A whole answer."""
        kept = _kept(headers, ("Content-Type", "application/json"))
        self.request.reply(status, kept, body, close=close)

    async def reply_json(self, value: Mapping[str, Any], status: int = 200) -> None:
        await self.reply(status, dump(value))

    def error_bytes(self, status: int, message: str, kind: ErrorKind) -> bytes:
        return dump(self.dialect.error_body(status, message, kind))

    async def start(self, status: int, headers: Mapping[str, str] | None = None) -> None:
        """Begin a streamed answer."""
        self.request.start(status, _kept(headers, *_OF_STREAMS))

    async def finish(self, data: bytes = b"") -> None:
        await self.request.finish(data)


_OF_STREAMS = (
    ("Content-Type", "text/event-stream; charset=utf-8"),
    ("Cache-Control", "no-cache"),
    ("X-Accel-Buffering", "no"),
)


def _kept(headers: Mapping[str, str] | None, *defaults: tuple[str, str]) -> list[tuple[str, str]]:
    """What an agent gets of a provider's headers, and what it gets when they lack it."""
    kept = [(name, value) for name, value in (headers or {}).items() if name.lower() not in _NOT_DOWNSTREAM]
    present = {name.lower() for name, _ in kept}
    return kept + [(name, value) for name, value in defaults if name.lower() not in present]
