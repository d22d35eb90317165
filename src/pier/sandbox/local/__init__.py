"""The backend that needs no daemon: Linux namespaces over copy-on-write layers, forked from a warm process."""

import sys

from pier.errors import UsageError

if sys.platform != "linux":
    raise UsageError(
        f"the backend local needs Linux, and this is {sys.platform}",
        hint="--env docker, with a Docker engine that runs here",
        code="no-linux",
    )

from pier.sandbox.local.backend import LocalBackend

__all__ = ["LocalBackend"]
