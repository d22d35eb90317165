"""The four wire dialects, and which of them a request is in."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pier.wire.anthropic import Anthropic
from pier.wire.chat import Chat
from pier.wire.checks import Checked
from pier.wire.contract import BadRequest, BadResponse, Dialect, Route, StreamParser, StreamRenderer
from pier.wire.gemini import Gemini
from pier.wire.responses import Responses

__all__ = [
    "DIALECTS",
    "BadRequest",
    "BadResponse",
    "Dialect",
    "Route",
    "StreamParser",
    "StreamRenderer",
    "recognise",
]

DIALECTS: dict[str, Dialect] = {
    "anthropic": Checked(Anthropic()),
    "responses": Checked(Responses()),
    "gemini": Checked(Gemini()),
    "chat": Checked(Chat()),
}


def recognise(method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str]) -> Route:
    """The route of a request, always: of the kind `unknown`, in the caller's likely dialect, when there is none.

    `headers` have lower-case names. Paths are taken as clients really write them: a doubled slash, a doubled or a
    missing version, a trailing slash.
    """
    clean = re.sub(r"/+", "/", "/" + path)
    clean = clean.rstrip("/") or "/"
    clean = re.sub(r"^(/v1(?:beta)?)(?:/v1(?:beta)?)+(?=/|$)", r"\1", clean)
    order = sorted(DIALECTS.values(), key=lambda dialect: dialect.name != _likely(clean, headers))
    if clean == "/" and method in ("GET", "HEAD"):
        return Route(order[0].name, "probe")
    for dialect in order:
        if route := dialect.match(method, clean, query):
            return route
    return Route(order[0].name, "unknown")


def _likely(path: str, headers: Mapping[str, str]) -> str:
    if "anthropic-version" in headers or "anthropic-beta" in headers or path.startswith("/v1/messages"):
        return "anthropic"
    if "x-goog-api-key" in headers or "x-goog-api-client" in headers or path.startswith("/v1beta"):
        return "gemini"
    if path.endswith("/responses"):
        return "responses"
    return "anthropic" if "x-api-key" in headers else "chat"
