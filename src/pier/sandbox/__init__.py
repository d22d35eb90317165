"""Sandboxes: the contract that every backend keeps, and the backends by name.

The module can be called: `pier.sandbox("host")` is `pier.sandbox.opening.open_sandbox("host")`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from types import ModuleType
from typing import Any

from pier.lease import Lease
from pier.plugin import find
from pier.sandbox.contract import Backend, Capabilities, Limits, Mount, NewFile, Process, Result, Sandbox, SandboxSpec

BACKENDS = {
    "local": "pier.sandbox.local:LocalBackend",
    "docker": "pier.sandbox.docker:DockerBackend",
}
"""The built-in backends. Each takes the `Lease` to write into, and the `options` that its class names."""


def open_backend(name: str, lease: Lease, options: Mapping[str, str] | None = None) -> Backend:
    """The backend called `name`: built in, by entry point (`pier.backends`) or `module:Class`."""
    return find("backend", name, BACKENDS)(lease, **(options or {}))


__all__ = [
    "BACKENDS",
    "Backend",
    "Capabilities",
    "Limits",
    "Mount",
    "NewFile",
    "Process",
    "Result",
    "Sandbox",
    "SandboxSpec",
    "open_backend",
]


class _Callable(ModuleType):
    def __call__(self, *given: Any, **named: Any) -> AbstractAsyncContextManager[Sandbox]:
        from pier.sandbox.opening import open_sandbox

        return open_sandbox(*given, **named)


sys.modules[__name__].__class__ = _Callable
