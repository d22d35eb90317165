"""What a trial needs of the gateway, so that a trial runs with any gateway or none."""

from __future__ import annotations

from typing import Protocol

from pier.endpoint import Endpoint
from pier.sandbox.contract import Sandbox


class ModelSession(Protocol):
    """One agent's access to its model, from the start of the agent to its end."""

    endpoint: Endpoint

    async def close(self) -> None: ...


class SessionSource(Protocol):
    """Opens sessions."""

    async def open(self, sandbox: Sandbox, model: str) -> ModelSession: ...
