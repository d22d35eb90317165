"""The address, key and model name with which an agent calls its model.

The gateway creates endpoints and agents receive them, so neither imports the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

GATEWAY_PORT = 4000
"""Port of the gateway on the loopback of every sandbox."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One session at the gateway, as seen from inside a sandbox.

    `url` has no path and no trailing slash, e.g. `http://127.0.0.1:4000`; each agent adds the path of its dialect
    (`/v1`, `/v1beta`, ...). `key` is the session's identity and credential; it is revoked when the trial ends.
    """

    url: str
    key: str = field(repr=False)
    model: str
    context_window: int | None = None
    max_output_tokens: int | None = None
