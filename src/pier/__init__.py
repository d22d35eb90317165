"""pier runs coding agents in sandboxes, records what they do, and grades the result so that it can be trusted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pier.gateway import Gateway

__all__ = ["Gateway", "__version__"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Loads what is exported here on first use, so that `import pier` costs nothing."""
    if name == "Gateway":
        from pier.gateway import Gateway

        return Gateway
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
