"""How an agent reaches its model: where to call, with which key and under which name.

The gateway makes endpoints and agents are handed them, so neither imports the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

GATEWAY_PORT = 4000
"""The port on a sandbox's own loopback where the gateway is served, the same in every sandbox."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One session at the gateway, as seen from inside a sandbox.

    `url` has no path and no trailing slash, e.g. `http://127.0.0.1:4000`; each agent adds the path its dialect wants
    (`/v1`, `/v1beta`, ...). `key` is the session's identity and credential; it dies with the trial.
    """

    url: str
    key: str = field(repr=False)
    model: str
    context_window: int | None = None
    max_output_tokens: int | None = None
