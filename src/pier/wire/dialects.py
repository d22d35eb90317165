"""The table of all dialects, and the detection of a request's dialect."""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import lru_cache
from urllib.parse import parse_qsl

from pier.wire.anthropic import Anthropic
from pier.wire.chat import Chat
from pier.wire.contract import Dialect, Route
from pier.wire.gemini import Gemini
from pier.wire.responses import Responses
from pier.wire.turn import DialectName
from pier.wire.values import BadRequest, BadResponse

__all__ = ["DIALECTS", "BadRequest", "BadResponse", "Dialect", "Route", "check_name", "recognise", "rollout_in"]

DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in (Anthropic(), Responses(), Gemini(), Chat())}


def check_name(name: str) -> DialectName:
    """Return `name` if it is the name of a dialect; raise `ValueError` otherwise."""
    if name not in DIALECTS:
        raise ValueError(f"unknown dialect {name!r}: expected {', '.join(sorted(DIALECTS))}")
    return name


_ROLLOUT = re.compile(r"^/+rollout/+([^/]+)(?=/|$)")


def rollout_in(path: str) -> str | None:
    """The id of the rollout in a path such as `/rollout/ID/v1/messages`; None for any other path."""
    found = _ROLLOUT.match(path)
    return found[1] if found else None


@lru_cache(128)
def recognise(method: str, path: str, query: str = "", headers: tuple[str, ...] = ()) -> Route:
    """The route of a request; one of kind `unknown` in the caller's most likely dialect if no dialect has it.

    `headers` are the names of the request's headers in lower case. Paths may have a doubled or trailing slash and a
    doubled or missing version, as some clients send them. A leading rollout id is ignored.
    """
    clean = re.sub(r"/+", "/", "/" + _ROLLOUT.sub("", path))
    clean = clean.rstrip("/") or "/"
    clean = re.sub(r"^(/v1(?:beta)?)(?:/v1(?:beta)?)+(?=/|$)", r"\1", clean)
    likely = _likely(clean, headers)
    if clean == "/" and method in ("GET", "HEAD"):
        return Route(likely.name, "probe")
    asked = dict(parse_qsl(query))
    routes = (dialect.match(method, clean, asked) for dialect in (likely, *DIALECTS.values()))
    return next(filter(None, routes), Route(likely.name, "unknown"))


def _likely(path: str, headers: Collection[str]) -> Dialect:
    known = DIALECTS.values()
    found = (dialect for dialect in known if dialect.is_likely(path, headers))
    by_key = (dialect for dialect in known if dialect.key_header in headers)
    return next(found, None) or next(by_key, DIALECTS["chat"])
