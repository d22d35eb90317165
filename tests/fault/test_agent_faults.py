"""Real agents when their model gives no answer, breaks off, or may not be asked any more, and when they are killed.

Packs as in `test_agent_real`. How a trial ended is told from the wire, so each of these has words of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from pier.agent import contract
from pier.agent.contract import PACK_PATH, AgentRun, find_agent
from pier.gateway.budget import Retry
from pier.gateway.providers import Provider
from pier.gateway.script import Script
from pier.gateway.server import Gateway
from pier.gateway.session import Policy, Session
from pier.sandbox.contract import Process, Result, Sandbox
from pier.trial.config import AgentConfig
from pier.trial.result import TrialResult
from pier.wire.turn import Delta, PartDelta, PartStart, Request, StreamError, Text, TurnStart
from tests.agent_rig import DESK, FOUR, PACKS, need_pack, stage
from tests.fault.test_gateway_upstreams import events
from tests.gateway_fakes import Behaviour, fake_provider, replies, streams
from tests.trial_runs import open_bench, write_task

pytestmark = pytest.mark.parts
KILL = f"for p in /proc/[0-9]*; do readlink $p/exe | grep -q ^{PACK_PATH}/bin/ && kill -9 ${{p#/proc/}}; done"
GO_ON = [{"shell": f"echo turn {n} >> /app/turns"} for n in range(1, 30)]


class Mine(Gateway):
    """A gateway behind which one model of the test's own answers everything."""

    model: Policy

    def session(self, model: str | None = None, **terms: Any) -> Session:
        return super().session("scripted", **{**terms, "upstream": self.model})


async def trial(name: str, model: Policy, root: Path, *, seconds: float = 240, **choice: Any) -> TrialResult:
    """A trial of an agent on a model."""
    need_pack(name)
    gateway = Mine()
    gateway.model = model
    async with open_bench(root / "trials") as bench, gateway:
        bench.services = replace(bench.services, gateway=gateway)
        task = write_task(root / "task")
        return await bench.run(task, AgentConfig(name=name, model_name="m", override_timeout_sec=seconds, **choice))


def end_soon_after(patch: pytest.MonkeyPatch, reached: Callable[[], bool], seconds: float = 3) -> None:
    """Let the deadlines of agents pass `seconds` after a condition is reached, whatever they are."""
    until_deadline = contract._until_deadline

    async def until_soon(process: Process, waiting: asyncio.Future[Result], _: float | None, soft_stop: int) -> Result:
        while not (reached() or waiting.done()):
            await asyncio.sleep(0.05)
        return await until_deadline(process, waiting, seconds, soft_stop)

    patch.setattr(contract, "_until_deadline", until_soon)


async def break_off(request: Request) -> AsyncIterator[Delta]:
    """A provider that fails in the middle of its answer."""
    yield TurnStart("t", request.model)
    yield PartStart(0, Text(""))
    yield PartDelta(0, "I will")
    yield StreamError("the provider broke off", status=502)


@pytest.fixture(autouse=True)
def packs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIER_PACKS", str(PACKS))


def told(result: TrialResult) -> tuple[str | None, str | None]:
    error = result.exception_info
    return (error.code, error.blame) if error else (None, None)


def calls(result: TrialResult) -> dict[str, int]:
    assert result.agent_result is not None and result.agent_result.metadata is not None
    return result.agent_result.metadata["model_calls"]


@pytest.mark.parametrize("name", FOUR)
async def test_a_model_that_never_answers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asyncio.Event()
    end_soon_after(monkeypatch, asked.is_set)

    async def silent(request: Request) -> str:
        asked.set()
        await asyncio.sleep(3600)
        return ""

    result = await trial(name, silent, tmp_path)
    assert asked.is_set()
    assert told(result) == ("provider_no_answer", "provider")
    assert set(calls(result)) == {"cancelled"}


@pytest.mark.parametrize("name", FOUR)
async def test_an_answer_that_breaks_off_is_asked_for_again(name: str, tmp_path: Path) -> None:
    script = Script.parse([{"shell": "touch /app/done"}, {"finish": "Done."}])
    broken = 0

    def model(request: Request) -> Any:
        nonlocal broken
        if request.tools and broken == 0:
            broken += 1
            return break_off(request)
        return script(request)

    result = await trial(name, model, tmp_path)
    assert broken == 1
    assert told(result) == (None, None) and result.rewards == {"reward": 1}
    assert calls(result)["provider_error"] == 1 and calls(result)["answered"] >= 2


@pytest.mark.parametrize("name", FOUR)
async def test_a_provider_that_always_breaks_off(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Request] = []
    end_soon_after(monkeypatch, lambda: len(asked) > 1)

    def model(request: Request) -> AsyncIterator[Delta]:
        asked.append(request)
        return break_off(request)

    result = await trial(name, model, tmp_path)
    assert told(result) == ("provider_error", "provider")
    assert result.exception_info is not None and result.exception_info.retryable
    assert calls(result).get("answered") is None


@pytest.mark.parametrize("name", FOUR)
async def test_a_budget_that_is_spent(name: str, tmp_path: Path) -> None:
    turns = [{"error": {"status": 500}}, *GO_ON]
    result = await trial(name, Script.parse(turns), tmp_path, budget={"turns": 3})
    assert result.agent_result is not None and result.agent_result.metadata is not None
    assert "turns" in result.agent_result.metadata["ended"]
    assert told(result) in ((None, None), ("agent_exit", "agent")), "never the provider's fault"
    assert calls(result)["provider_error"] == 1 and calls(result)["answered"] == 3
    assert result.rewards == {"reward": 0}


@pytest.mark.parametrize("name", FOUR)
async def test_an_agent_that_is_killed(name: str, tmp_path: Path) -> None:
    result = await trial(name, Script.parse([{"shell": "touch /app/done"}, {"shell": KILL}, *GO_ON]), tmp_path)
    assert told(result) == ("agent_exit", "agent")
    assert result.exception_info is not None and "137" in result.exception_info.exception_message
    assert set(calls(result)) == {"answered"} and result.rewards == {"reward": 1}


def run_of(session: Session, seconds: float) -> AgentRun:
    return AgentRun("Read note.txt and tell what it says.", DESK, session.endpoint(), seconds=seconds)


async def running(sandbox: Sandbox) -> int:
    """How many processes of the pack are alive."""
    command = f"for p in /proc/[0-9]*; do readlink $p/exe; done 2>/dev/null | grep -c '^{PACK_PATH}/bin' || true"
    return int((await sandbox.exec(command, timeout=60)).text)


@pytest.mark.parametrize("name", FOUR[:2])
async def test_an_agent_ends_by_itself_when_it_is_asked_to(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "GRACE", 110.0)
    monkeypatch.setattr(contract, "SHARE", 1.0)
    asked = asyncio.Event()
    end_soon_after(monkeypatch, asked.is_set, seconds=111)

    async def late(request: Request) -> str:
        asked.set()
        await asyncio.sleep(3600)
        return ""

    async with stage(name, late) as (sandbox, session):
        result = await find_agent(name)().run(sandbox, run_of(session, 120))
        assert result.timed_out and result.exit_code != 137
        assert await running(sandbox) == 0


@pytest.mark.parametrize("name", FOUR)
async def test_a_cancelled_agent_is_gone(name: str) -> None:
    called = asyncio.Event()

    async def hold(request: Any) -> Any:
        called.set()
        await asyncio.sleep(3600)

    async with stage(name, hold) as (sandbox, session):
        task = asyncio.create_task(find_agent(name)().run(sandbox, run_of(session, 600)))
        await asyncio.wait_for(called.wait(), 120)
        assert await running(sandbox) > 0
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await running(sandbox) == 0


def broken_stream() -> Behaviour:
    """The beginning of an answer in the dialect of the request, and no more of it."""

    async def behave(request: web.BaseRequest, raw: bytes) -> web.StreamResponse:
        dialect = "responses" if "responses" in request.path else "anthropic"
        return await streams(*events(dialect)[:4], cut=True)(request, raw)

    return behave


REFUSED = b'{"type":"error","error":{"type":"authentication_error","message":"invalid key"}}'
FAILING: dict[str, Behaviour] = {
    "401": replies(401, REFUSED),
    "503": replies(503, b'{"error":{"message":"no healthy upstream"}}'),
    "a stream that is cut off": broken_stream(),
}


class Served(Gateway):
    """A gateway behind which one provider serves every model."""

    provider: Provider

    def session(self, model: str | None = None, **terms: Any) -> Session:
        return super().session("m", **{**terms, "upstream": self.provider})


@pytest.mark.parametrize("fault", FAILING)
@pytest.mark.parametrize("name", FOUR[:2])
async def test_a_provider_that_fails_leaves_no_reward(
    name: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_pack(name)
    retry = Retry(attempts=2, first=0.01, longest=0.02)
    async with open_bench(tmp_path / "trials") as bench, fake_provider(FAILING[fault]) as fake:
        async with Served(retry=retry) as gateway:
            gateway.provider = fake.provider("anthropic" if name == "claude-code" else "responses")
            bench.services = replace(bench.services, gateway=gateway)
            good = "#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n"
            task = write_task(tmp_path / "task", test=good)
            end_soon_after(monkeypatch, lambda: len(fake.asked) > 3)
            result = await bench.run(task, AgentConfig(name=name, model_name="m", override_timeout_sec=240))
    assert told(result) == ("provider_error", "provider") and result.rewards is None
    assert fake.asked and calls(result).get("answered") is None
