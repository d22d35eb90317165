"""A sandbox that dies, an agent that breaks, a directory that is taken: blame is right, and no fault is a zero."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pier.agent.contract import Agent, AgentRun, Launch
from pier.errors import UsageError
from pier.sandbox.contract import OnOutput, Result, Sandbox
from pier.sandbox.linux.sandbox import LinuxSandbox
from pier.trial.config import AgentConfig
from pier.trial.run import run_trial
from pier.trial.spec import TrialSpec
from tests.trial_runs import ON_HOST, PASS, TOML, Bench, open_bench, write_task

pytestmark = pytest.mark.plain


class BrokenAgent(Agent):
    """Raises what it is told to."""

    name = "broken"
    options = ("error",)

    def launch(self, run: AgentRun) -> Launch:
        return Launch(("true",))

    async def run(self, sandbox: Sandbox, run: AgentRun, on_output: OnOutput | None = None) -> Result:
        if run.options["error"] == "timeout":
            raise TimeoutError("an agent's own")
        raise ValueError("a bug in an agent")


class KillerAgent(Agent):
    """Ends its own sandbox from outside, as the kernel would when memory runs out."""

    name = "killer"

    def launch(self, run: AgentRun) -> Launch:
        return Launch(("sleep", "600"))

    async def run(self, sandbox: Sandbox, run: AgentRun, on_output: OnOutput | None = None) -> Result:
        assert isinstance(sandbox, LinuxSandbox)
        async with await sandbox.spawn(["sleep", "600"]) as process:
            os.kill(sandbox.box.pid, signal.SIGKILL)
            return await process.wait()


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with open_bench(tmp_path / "trials") as opened:
        yield opened


async def test_a_sandbox_that_dies_under_the_agent(bench: Bench, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("a plain user's sandboxes run in a namespace whose processes it cannot signal by their number")
    result = await bench.run(write_task(tmp_path / "t"), AgentConfig(name=f"{__name__}:KillerAgent"))
    assert result.verifier_result is None and result.exception_info is not None
    assert (result.exception_info.blame, result.exception_info.retryable) == ("infra", True)
    assert (bench.last / "result.json").exists() and (bench.last / "exception.txt").exists()
    assert (await bench.run(write_task(tmp_path / "u"))).rewards == {"reward": 1}


async def test_a_bug_in_an_agent_is_no_verdict(bench: Bench, tmp_path: Path) -> None:
    task = write_task(tmp_path / "t")
    result = await bench.run(task, AgentConfig(name=f"{__name__}:BrokenAgent", kwargs={"error": "bug"}))
    assert not result.has_verdict and result.exception_info is not None
    assert (result.exception_info.exception_type, result.exception_info.phase) == ("ValueError", "agent")
    assert "a bug in an agent" in (bench.last / "exception.txt").read_text()
    result = await bench.run(task, AgentConfig(name=f"{__name__}:BrokenAgent", kwargs={"error": "timeout"}))
    assert not result.has_verdict and result.exception_info is not None
    assert result.exception_info.exception_type == "TimeoutError"


async def test_a_directory_in_use_is_refused(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "result.json").write_text("mine")
    with pytest.raises(UsageError, match="must be empty"):
        await run_trial(TrialSpec("x", write_task(tmp_path / "t"), tmp_path / "used"), bench.services)
    assert [path.name for path in (tmp_path / "used").iterdir()] == ["result.json"]


async def test_a_late_image_is_nobodys_zero(bench: Bench, tmp_path: Path) -> None:
    task = write_task(tmp_path / "t", toml=TOML + "build_timeout_sec = 0\n")
    result = await bench.run(task)
    assert not result.has_verdict and result.exception_info is not None
    assert result.exception_info.exception_type == "EnvironmentStartTimeoutError"
    assert (result.exception_info.blame, result.exception_info.retryable) == ("infra", True)


async def test_cancelling_in_every_phase_leaves_nothing(bench: Bench, tmp_path: Path) -> None:
    slow = TOML + '[environment.healthcheck]\ncommand = "sleep 0.2"\n'
    task = write_task(
        tmp_path / "t", toml=slow, solve="sleep 0.2; touch /app/done", test="#!/bin/bash\nsleep 0.2\n" + PASS
    )
    await bench.run(task)
    before = bench.services.backend.lease.held()
    for phase in ("prepare", "start", "health", "setup", "agent", "collect", "verify"):
        reached = asyncio.Event()

        def note(now: str, wanted: str = phase, event: asyncio.Event = reached) -> None:
            if now == wanted:
                event.set()

        directory = tmp_path / f"cancelled-{phase}"
        running = asyncio.create_task(
            run_trial(TrialSpec(phase, task, directory, sandbox=ON_HOST), bench.services, note)
        )
        await asyncio.wait_for(reached.wait(), 120)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(running, 120)
        assert not (directory / "result.json").exists()
        assert bench.services.backend.lease.held() == before, phase
