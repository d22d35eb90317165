"""Real agents when the model fails, when its budget ends and when it never answers. Packs as in `test_agent_real`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pier.agent import deadline
from pier.agent.contract import AGENT_LOGS, PACK_PATH, AgentRun
from pier.agent.pack import PackStore
from pier.agent.registry import find_agent
from pier.endpoint import GATEWAY_PORT
from pier.gateway.answering import Policy
from pier.gateway.budget import Budget
from pier.gateway.script import Script
from pier.gateway.server import Gateway
from pier.gateway.session import Session
from pier.image.model import HOST, Image
from pier.lease import Lease
from pier.sandbox.contract import Mount, Sandbox, SandboxSpec
from pier.sandbox.local import LocalBackend

PACKS = Path(os.environ.get("PIER_PACKS") or Path(__file__).parents[2] / ".cache" / "packs")
AGENTS = ("claude-code", "codex", "gemini-cli", "opencode")


@asynccontextmanager
async def stage(name: str, model: Policy, budget: Budget) -> AsyncIterator[tuple[Sandbox, Session]]:
    """A sandbox with the agent's pack, and a model."""
    spec = find_agent(name).pack
    pack = PackStore(PACKS).find(spec) if spec else None
    if pack is None:
        pytest.skip(f"the pack of {name} is not built: .ci/packs {name}")
    with Lease() as lease:
        async with LocalBackend(lease) as backend, Gateway() as gateway:
            mounts = (Mount(PACK_PATH, pack.path),)
            async with await backend.start(SandboxSpec(Image(HOST, HOST), mounts=mounts)) as sandbox:
                await sandbox.write_file("/work-here/note.txt", b"hello\n")
                await sandbox.write_file(f"{AGENT_LOGS}/.keep", b"")
                session = gateway.session("scripted", upstream=model, budget=budget)
                await sandbox.listen(GATEWAY_PORT, gateway.protocol_factory(session))
                yield sandbox, session


def told(session: Session, seconds: float) -> AgentRun:
    return AgentRun("Read note.txt and tell what it says.", "/work-here", session.endpoint(), seconds=seconds)


async def running(sandbox: Sandbox) -> int:
    """How many processes of the pack are alive."""
    command = f"for p in /proc/[0-9]*; do readlink $p/exe; done 2>/dev/null | grep -c '^{PACK_PATH}/bin' || true"
    return int((await sandbox.exec(command, timeout=60)).text)


@pytest.mark.parametrize("name", AGENTS)
async def test_a_failed_call_is_made_again_and_a_spent_budget_ends_the_agent(name: str) -> None:
    turns = [{"error": {"status": 500}}, *({"shell": f"echo turn {n} >> turns.txt"} for n in range(1, 20))]
    async with stage(name, Script.parse(turns), Budget(turns=3)) as (sandbox, session):
        result = await find_agent(name)().run(sandbox, told(session, 300))
        assert not result.timed_out
        assert session.meter.turns == 3 and session.ended
        lines = (await sandbox.read_file("/work-here/turns.txt")).decode().split("\n")
        assert lines[0] == "turn 1" and len(lines) <= 4
        assert await running(sandbox) == 0


@pytest.mark.parametrize("name", AGENTS[:2])
async def test_a_model_that_never_answers_ends_at_the_deadline(name: str) -> None:
    async with stage(name, Script.parse([{"text": "late", "delay": 3600}]), Budget()) as (sandbox, session):
        result = await find_agent(name)().run(sandbox, told(session, 6))
        assert result.timed_out
        assert await running(sandbox) == 0


@pytest.mark.parametrize("name", AGENTS[:2])
async def test_an_agent_ends_by_itself_when_it_is_asked_to(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline, "GRACE", 110.0)
    monkeypatch.setattr(deadline, "SHARE", 1.0)
    async with stage(name, Script.parse([{"text": "late", "delay": 3600}]), Budget()) as (sandbox, session):
        result = await find_agent(name)().run(sandbox, told(session, 120))
        assert result.timed_out and result.exit_code != 137
        assert await running(sandbox) == 0


@pytest.mark.parametrize("name", AGENTS[:2])
async def test_a_cancelled_agent_is_gone(name: str) -> None:
    called = asyncio.Event()

    async def hold(request: Any) -> Any:
        called.set()
        await asyncio.sleep(3600)

    async with stage(name, hold, Budget()) as (sandbox, session):
        task = asyncio.create_task(find_agent(name)().run(sandbox, told(session, 600)))
        await asyncio.wait_for(called.wait(), 120)
        assert await running(sandbox) > 0
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await running(sandbox) == 0
