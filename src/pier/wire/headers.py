"""Which of a client's headers and parameters reach a provider.

An agent chooses both, and a server in front of a provider may refuse any of them with the status of an outage. So only
those pass that clients are known to send: the usual ones, and those that their dialect names. `plain_headers` are what
a request has that owes nothing to an agent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

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
"""What pier sets itself in every request."""
_USUAL = name_pattern("accept user-agent idempotency-key x-request-id x-client-request-id x-session-id x-stainless-*")
_VALUE = re.compile(r"[\x21-\x7e]([\x20-\x7e]{0,4094}[\x21-\x7e])?")
_MOST = 16 * 1024
"""Characters of all headers that pass; servers take at least as many."""


def plain_headers(dialect: Dialect) -> dict[str, str]:
    """What pier itself sends with every request."""
    return {"Content-Type": "application/json", "User-Agent": "pier", **dialect.headers}


def passed_headers(dialect: Dialect, headers: Iterable[tuple[str, str]]) -> tuple[dict[str, str], tuple[str, ...]]:
    """The headers for a provider, and the names of those that were dropped. One that comes several times is joined."""
    found: dict[str, tuple[str, str]] = {}
    dropped: set[str] = set()
    size = 0
    for written, value in headers:
        name = written.lower()
        if name in _REPLACED:
            continue
        first, before = found.get(name, (written, ""))
        joined = f"{before}, {value}" if before else value
        size += len(name) + len(value)
        is_known = _USUAL.fullmatch(name) or dialect.is_client_header(name)
        if name not in dropped and is_known and _VALUE.fullmatch(joined) and size <= _MOST:
            found[name] = first, joined
        else:
            dropped.add(name)
            found.pop(name, None)
    own = {name: value for name, value in plain_headers(dialect).items() if name.lower() not in found}
    return own | dict(found.values()), tuple(sorted(dropped))


def passed_query(dialect: Dialect, query: str) -> str:
    """The parameters for a provider."""
    return "&".join(part for part in query.split("&") if dialect.client_query.fullmatch(part))
