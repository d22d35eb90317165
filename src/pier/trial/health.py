"""What is done in a sandbox before a step begins: its files, its set-up script, its health check.

Health checks have the meaning that Docker gives them: in the start period failures do not count.
"""

from __future__ import annotations

import asyncio
import time

from pier.errors import SandboxError, TaskError
from pier.sandbox.contract import Sandbox
from pier.task import Step
from pier.task.config import Healthcheck
from pier.trial.agents import user_text
from pier.trial.spec import TrialSpec


async def prepare_step(spec: TrialSpec, step: Step, sandbox: Sandbox, workdir: str) -> None:
    """Bring the step's files into the working directory, run its set-up script and wait for its health check."""
    user = user_text(step.agent.user)
    if step.workdir is not None:
        await sandbox.upload(step.workdir, workdir)
        if (step.workdir / "setup.sh").is_file():
            await _run_setup(spec, step, sandbox, workdir, user)
    if step.healthcheck is not None:
        await wait_until_healthy(sandbox, step.healthcheck, cwd=workdir, user=user)


async def _run_setup(spec: TrialSpec, step: Step, sandbox: Sandbox, workdir: str, user: str | None) -> None:
    limit = spec.task.config.environment.build_timeout_sec * spec.multipliers.of("environment_build")
    result = await sandbox.exec(["bash", f"{workdir.rstrip('/')}/setup.sh"], cwd=workdir, user=user, timeout=limit)
    if not result.ok:
        how = "took too long" if result.timed_out else f"ended with exit code {result.exit_code}"
        raise TaskError(f"step {step.name!r}: setup.sh {how}: {result.error_text[-500:]}", code="step_setup")


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
