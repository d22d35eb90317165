"""What every dialect can do: recognise its routes, read and write calls, answers, streams, errors and small replies.

All of it is pure: bytes and parsed JSON in, bytes and JSON out. A body that cannot be read as the dialect raises
`BadRequest` (the client's) or `BadResponse` (the upstream's). Unknown fields are kept, never refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from pier.errors import ProviderError, UsageError
from pier.gateway.canonical import Delta, DialectName, ErrorKind, Request, Turn

RouteKind = Literal["generate", "count_tokens", "models", "model", "probe", "unknown"]


class BadRequest(UsageError):
    """The client's body is not of its dialect, or asks for what no recorder can give (several choices)."""

    code = "bad_request"


class BadResponse(ProviderError):
    """The upstream's answer is not of its dialect."""

    code = "bad_response"


@dataclass(frozen=True, slots=True)
class Route:
    """What a method and path mean. `stream` and `model` are set where the path says it (Gemini); else the body does."""

    dialect: DialectName
    kind: RouteKind
    model: str | None = None
    stream: bool | None = None
    sse: bool = True
    """False for a Gemini client that wants its stream as one JSON array."""


class StreamParser(Protocol):
    """Reads an upstream's stream, cut anywhere. Never raises: what is broken becomes a `StreamError`."""

    def feed(self, data: bytes) -> list[Delta]: ...

    def close(self) -> list[Delta]:
        """The upstream ended; a stream without its proper end gives a `StreamError` here."""
        ...


class StreamRenderer(Protocol):
    """Writes a stream for the client. Each `render` gives whole events, or nothing."""

    content_type: str

    def render(self, delta: Delta) -> bytes: ...

    def keep_alive(self) -> bytes:
        """Bytes that the dialect's clients take as a sign of life, right now in the stream; never an empty event."""
        ...

    def error(self, status: int, message: str, kind: ErrorKind) -> bytes:
        """The error event that ends this stream."""
        ...


class Dialect(Protocol):
    name: DialectName

    def match(self, method: str, path: str, query: Mapping[str, str]) -> Route | None:
        """The route if this dialect has it. `path` has no doubled slashes and no trailing slash."""
        ...

    def parse_request(self, body: Mapping[str, Any], route: Route | None = None) -> Request: ...

    def render_request(self, request: Request) -> dict[str, Any]: ...

    def request_path(self, request: Request) -> str:
        """Where to send it, below the provider's base URL without its version (`/v1/messages`), query included."""
        ...

    def parse_response(self, body: Mapping[str, Any]) -> Turn: ...

    def render_response(self, turn: Turn, request: Request) -> dict[str, Any]: ...

    def stream_parser(self) -> StreamParser: ...

    def stream_renderer(self, request: Request, route: Route | None = None) -> StreamRenderer: ...

    def error_body(self, status: int, message: str, kind: ErrorKind) -> dict[str, Any]: ...

    def parse_error(self, status: int, body: Any) -> tuple[str, ErrorKind]:
        """The message and kind of an upstream's error, whatever its body is (JSON of the dialect, other JSON, text)."""
        ...

    def models_body(self, models: tuple[str, ...]) -> dict[str, Any]: ...

    def model_body(self, model: str) -> dict[str, Any]: ...

    def count_tokens_body(self, tokens: int) -> dict[str, Any]: ...
