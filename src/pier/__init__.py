"""pier runs coding agents in sandboxes, records what they do, and grades the result so that it can be trusted."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {"Gateway": "pier.gateway"}
"""What `pier.NAME` gives, and where it is. Loaded on first use, so that `import pier` costs nothing."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
