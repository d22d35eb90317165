"""The gateway: every model call of every agent, intercepted, recorded, budgeted and replayable."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pier.gateway.budget import Budget, Meter
    from pier.gateway.policy import Policy, Replicas
    from pier.gateway.providers import Directory, Provider
    from pier.gateway.server import Gateway
    from pier.gateway.session import Session

__all__ = ["Budget", "Directory", "Gateway", "Meter", "Policy", "Provider", "Replicas", "Session"]

_HOMES = {
    "Budget": "budget",
    "Meter": "budget",
    "Directory": "providers",
    "Policy": "policy",
    "Provider": "providers",
    "Replicas": "policy",
    "Gateway": "server",
    "Session": "session",
}


def __getattr__(name: str) -> Any:
    """Import on first use, so that readers of recordings do not load the HTTP stack."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
