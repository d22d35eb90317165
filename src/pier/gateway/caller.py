"""The agent's side of one call: its request as it came, and the answer on its way back.

Errors and refusals always leave in the caller's dialect. An answer that has begun can only end in its own dialect's
error event, since its status is gone already.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl

from aiohttp import web
from multidict import CIMultiDict

from pier.gateway.body import dump
from pier.gateway.canonical import ErrorKind
from pier.gateway.dialect import DIALECTS, Dialect, Route, recognise
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
}
_NOT_DOWNSTREAM = HOP_BY_HOP | {"content-length", "content-encoding", "set-cookie", "server", "date", "alt-svc"}


@lru_cache(512)
def _recognise(method: str, path: str, query: str, headers: frozenset[str]) -> Route:
    """An agent asks the same few things again and again."""
    return recognise(method, path, dict(parse_qsl(query)), dict.fromkeys(headers, ""))


class TooLarge(Exception):
    """The request's body is over the limit."""


class Caller:
    """One request of an agent, and where its answer goes."""

    def __init__(self, request: web.BaseRequest) -> None:
        self.request = request
        names = frozenset(map(str.lower, request.headers))
        self.route: Route = _recognise(request.method, request.path, request.query_string, names)
        self.dialect: Dialect = DIALECTS[self.route.dialect]
        self.response: web.StreamResponse | None = None

    @property
    def key(self) -> str:
        """The credential, wherever this client puts it."""
        headers = self.request.headers
        scheme, _, token = headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer" and token:
            return token.strip()
        return headers.get("x-api-key") or headers.get("x-goog-api-key") or self.request.query.get("key", "")

    def facts(self) -> dict[str, Any]:
        """What is recorded of the request, without secrets."""
        return {
            "kind": self.route.kind,
            "dialect": self.route.dialect,
            "method": self.request.method,
            "path": redacted_path(self.request.raw_path if self.request.method != "CONNECT" else ""),
            "headers": redacted(self.request.headers),
        }

    def forwarded_headers(self) -> CIMultiDict[str]:
        """The agent's headers for an upstream of the same dialect: all but those of the connection and of identity."""
        kept = CIMultiDict(
            (name, value) for name, value in self.request.headers.items() if name.lower() not in _NOT_UPSTREAM
        )
        if self.route.dialect == "anthropic":
            kept.setdefault("anthropic-version", "2023-06-01")
        return kept

    async def read(self) -> bytes:
        """The body, at most `MAX_BODY` bytes of it after decompression."""
        length = self.request.content_length
        if length is not None and length > MAX_BODY:
            raise TooLarge
        if self.request.headers.get("Expect", "").lower() == "100-continue" and self.request.transport:
            self.request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        content = self.request.content
        data = await content.readany()
        if content.at_eof():
            return data
        parts, size = [data], len(data)
        while not content.at_eof():
            part = await content.readany()
            size += len(part)
            if size > MAX_BODY:
                raise TooLarge
            parts.append(part)
        return b"".join(parts)

    async def reply(
        self, status: int, body: bytes, headers: Mapping[str, str] | None = None, *, close: bool = False
    ) -> web.StreamResponse:
        """A whole answer."""
        kept = {name: value for name, value in (headers or {}).items() if name.lower() not in _NOT_DOWNSTREAM}
        if not any(name.lower() == "content-type" for name in kept):
            kept["Content-Type"] = "application/json"
        self.response = web.Response(status=status, body=body, headers=kept)
        if close:
            self.response.force_close()
        return self.response

    async def reply_json(self, value: Mapping[str, Any], status: int = 200) -> web.StreamResponse:
        return await self.reply(status, dump(value))

    def error_bytes(self, status: int, message: str, kind: ErrorKind) -> bytes:
        return dump(self.dialect.error_body(status, message, kind))

    async def start(self, status: int, headers: Mapping[str, str] | None = None) -> None:
        """Begin a streamed answer."""
        kept = {name: value for name, value in (headers or {}).items() if name.lower() not in _NOT_DOWNSTREAM}
        kept.setdefault("Content-Type", "text/event-stream; charset=utf-8")
        kept.setdefault("Cache-Control", "no-cache")
        kept.setdefault("X-Accel-Buffering", "no")
        self.response = web.StreamResponse(status=status, headers=kept)
        await self.response.prepare(self.request)

    async def write(self, data: bytes) -> None:
        """More of a streamed answer; waits while the agent reads slower than we write."""
        assert self.response is not None
        if data:
            await self.response.write(data)

    async def finish(self) -> web.StreamResponse:
        assert self.response is not None
        await self.response.write_eof()
        return self.response
