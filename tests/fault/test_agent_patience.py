"""A model that takes longer than an agent waits for a quiet stream: signs of life keep the agent waiting."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from pier.agent.codex import PROVIDER
from pier.gateway.script import Script
from pier.trial.config import AgentConfig
from pier.wire.turn import Request, Turn
from tests.agent_rig import PACKS, need_pack
from tests.fault.test_agent_faults import Mine, calls, told
from tests.trial_runs import open_bench, write_task

pytestmark = pytest.mark.parts
IMPATIENT = f"[model_providers.{PROVIDER}]\nstream_idle_timeout_ms = 2000\nstream_max_retries = 0\n"


async def test_codex_waits_for_a_generation_longer_than_its_own_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_pack("codex")
    monkeypatch.setenv("PIER_PACKS", str(PACKS))
    script = Script.parse([{"shell": "touch /app/done"}, {"finish": "Done."}])

    async def slow(request: Request) -> Turn:
        await asyncio.sleep(6)
        return await script(request)

    async with open_bench(tmp_path / "trials") as bench, Mine(keep_alive=0.5) as gateway:
        gateway.model = slow
        bench.services = replace(bench.services, gateway=gateway)
        choice = AgentConfig(name="codex", model_name="m", override_timeout_sec=240, kwargs={"config_toml": IMPATIENT})
        result = await bench.run(write_task(tmp_path / "task"), choice)
    assert (told(result), calls(result)) == ((None, None), {"answered": 2})
    assert result.rewards == {"reward": 1}
