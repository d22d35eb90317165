"""What the sandbox contract promises, as checks that run against any backend.

Whoever writes a backend runs them all:

    from pier.sandbox.conformance import CHECKS, verify

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
    async def test_conformance(check):
        async with MyBackend(lease) as backend:
            await verify(check, backend, image)

A check whose capability the backend lacks is not left out: `verify` then sees to it that asking for the thing is
refused with a `SandboxError`, as the contract says. The image needs a POSIX shell and the usual small tools (busybox
is enough).
"""

from __future__ import annotations

from pier.sandbox.conformance import arguments, commands, files, lifecycle, network, user_files
from pier.sandbox.conformance.bench import CHECKS, Bench, Check, offered, verify

__all__ = ["CHECKS", "Bench", "Check", "offered", "verify"]

MODULES = (arguments, commands, files, user_files, network, lifecycle)
