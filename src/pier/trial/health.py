"""Health checks, with the meaning that Docker gives them: in the start period failures do not count."""

from __future__ import annotations

import asyncio
import time

from pier.errors import SandboxError
from pier.sandbox.contract import Sandbox
from pier.task.config import Healthcheck


async def wait_until_healthy(sandbox: Sandbox, check: Healthcheck, *, cwd: str, user: str | None = None) -> None:
    """Return when the check's command succeeds; `SandboxError` with code `healthcheck` when it does not."""
    begun = time.monotonic()
    failures = 0
    while True:
        starting = time.monotonic() < begun + check.start_period_sec
        result = await sandbox.exec(["/bin/sh", "-c", check.command], cwd=cwd, user=user, timeout=check.timeout_sec)
        if result.ok:
            return
        if not starting:
            failures += 1
            if failures >= check.retries:
                how = "took too long" if result.timed_out else f"ended with exit code {result.exit_code}"
                raise SandboxError(
                    f"the health check failed {failures} times: {check.command!r} {how}: {result.error_text[-400:]}",
                    code="healthcheck",
                    blame="task",
                )
        await asyncio.sleep(check.start_interval_sec if starting else check.interval_sec)
