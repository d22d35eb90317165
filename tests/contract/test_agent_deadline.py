"""Agents know their time and budget, are asked to end before they are killed, and lose no log without a word."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pier.agent import contract
from pier.agent.command import CommandAgent
from pier.agent.contract import AgentRun, Launch
from pier.agent.packed import PackedAgent
from pier.image.model import HOST, Image
from pier.lease import Lease
from pier.sandbox.contract import Sandbox, SandboxSpec
from pier.sandbox.local import LocalBackend
from pier.trial.config import AgentConfig
from tests.trial_runs import Bench, open_bench, write_task


class Logger(PackedAgent):
    """Writes a log below its home, and a file where that log should be kept."""

    name = "logger"
    logs = ((".logger", "kept"), (".nothing", "nothing"))

    def launch(self, run: AgentRun) -> Launch:
        line = "mkdir -p $HOME/.logger && echo said > $HOME/.logger/log && touch /app/done"
        return Launch(["/bin/sh", "-c", f"{line} && {run.options.get('then', ':')}"])


class Blocker(Logger):
    name = "blocker"

    def launch(self, run: AgentRun) -> Launch:
        return super().launch(AgentRun("", run.workdir, options={"then": "echo in the way > /logs/agent/kept"}))


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    with Lease() as lease:
        async with LocalBackend(lease) as backend, await backend.start(SandboxSpec(Image(HOST, HOST))) as found:
            await found.write_file("/desk/.keep", b"")
            yield found


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with open_bench(tmp_path) as found:
        yield found


def told(command: str, seconds: float, **budget: float) -> AgentRun:
    return AgentRun("Do it.", "/desk", options={"command": command}, seconds=seconds, budget=budget)


async def test_an_agent_is_told_its_time_and_budget(sandbox: Sandbox) -> None:
    before = int(time.time())
    names = ("PIER_SECONDS", "PIER_DEADLINE", "PIER_MAX_TURNS", "PIER_MAX_COST_USD", "PIER_MAX_TOTAL_TOKENS")
    line = "; ".join(f'echo "${{{name}-none}}"' for name in names)
    result = await CommandAgent().run(sandbox, told(line, 600, turns=7, cost_usd=0.25, total_tokens=12_345_678))
    seconds, end, *limits = result.text.split()
    assert (seconds, limits) == ("600", ["7", "0.25", "12345678"])
    assert before + 600 <= int(end) <= time.time() + 600


async def test_a_soft_stop_comes_before_the_kill(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "GRACE", 115.0)
    monkeypatch.setattr(contract, "SHARE", 1.0)
    line = "trap 'echo saved > saved; exit 5' TERM; while :; do sleep 1; done"
    result = await CommandAgent().run(sandbox, told(line, 120))
    assert result.timed_out and result.exit_code == 5
    assert await sandbox.read_file("/desk/saved") == b"saved\n"


async def test_one_that_will_not_stop_is_killed(sandbox: Sandbox) -> None:
    result = await CommandAgent().run(sandbox, told("trap '' TERM INT; while :; do sleep 1; done", 3))
    assert result.timed_out and result.exit_code == 137


async def test_one_that_reads_nothing_is_still_stopped(sandbox: Sandbox) -> None:
    big = AgentRun("x" * 1_000_000, "/desk", options={"command": "exec sleep 3600"}, seconds=3)
    assert (await CommandAgent().run(sandbox, big)).timed_out


async def test_logs_that_cannot_be_kept_are_a_warning(bench: Bench, tmp_path: Path) -> None:
    task = write_task(tmp_path / "t")
    result = await bench.run(task, AgentConfig(name=f"{__name__}:Logger"))
    assert (bench.last / "agent" / "kept" / "log").read_text() == "said\n"
    assert result.pier is not None and result.exception_info is None
    assert not any("could not be kept" in warning for warning in result.pier.warnings)
    result = await bench.run(task, AgentConfig(name=f"{__name__}:Blocker"))
    assert result.pier is not None and result.exception_info is None
    assert any("logs of blocker" in warning for warning in result.pier.warnings)
    assert "logs of blocker" in (bench.last / "trial.log").read_text()
