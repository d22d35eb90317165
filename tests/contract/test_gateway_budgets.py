"""Turns with calls in parallel: a turn that is only reserved decides nothing until it is spent or given back."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from pier.gateway import Budget, Gateway, Meter
from pier.gateway.session import Session
from pier.record import reader
from pier.wire.dialects import DIALECTS
from pier.wire.turn import Delta, ModelFailed, Request, Turn, TurnBuilder, stream_turn
from tests.gateway_fakes import (
    HELLO,
    PATHS,
    STREAM_PATHS,
    FakeProvider,
    fake_provider,
    post,
    replies,
    request_body,
    says,
)

NAMES = ["chat", "responses", "anthropic", "gemini"]
FAILS = replies(400, b'{"error":{"message":"no"}}')


@dataclass
class Rig:
    """One provider whose first call hangs until `go` is set, and then does what the test says."""

    gateway: Gateway
    url: str
    fake: FakeProvider
    go: asyncio.Event = field(default_factory=asyncio.Event)

    def ask(self, session: Session, client: str = "chat", stream: bool = False) -> asyncio.Task[tuple[int, bytes]]:
        async def asking() -> tuple[int, bytes]:
            path = (STREAM_PATHS if stream else PATHS)[client]
            status, _, raw = await post(self.url, path, session.key, request_body(client, stream=stream))
            return status, raw

        return asyncio.create_task(asking())

    async def first(self, session: Session, then: Any) -> asyncio.Task[tuple[int, bytes]]:
        """A call that has reserved its turn and waits at the provider; `then` comes of it."""

        async def held(request: Any, raw: bytes) -> Any:
            await self.go.wait()
            return await then(request, raw)

        self.fake.then.append(held)
        call = self.ask(session)
        await until(lambda: bool(self.fake.asked))
        return call


async def until(true: Any) -> None:
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def rig(**facts: Any) -> AsyncIterator[Rig]:
    async with fake_provider(says(HELLO)) as fake, Gateway(**facts) as gateway:
        yield Rig(gateway, await gateway.serve(), fake)


def waits(*meters: Meter) -> bool:
    return any(meter._watching for meter in meters)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["the upstream fails", "the agent leaves", "the answer comes"])
async def test_a_call_waits_for_the_outcome_of_the_last_turn(shared: bool, stream: bool, how: str) -> None:
    async with rig() as case:
        pool = Meter(Budget(turns=1), owner="job") if shared else None
        budget = None if shared else Budget(turns=1)
        sessions = [
            case.gateway.session("m", upstream=case.fake.provider(), budget=budget, pool=pool) for _ in range(2)
        ]
        one, two = sessions if shared else (sessions[0], sessions[0])
        meter = pool or one.meter
        first = await case.first(one, says(HELLO) if how == "the answer comes" else FAILS)
        second = case.ask(two, stream=stream)
        await until(lambda: waits(meter))
        assert not two.ended and meter.turns == 0 and not second.done()
        if how == "the agent leaves":
            first.cancel()
        else:
            case.go.set()
        status, raw = await second
        if how == "the answer comes":
            assert (await first)[0] == 200 and status == 400
            assert b"1 of 1 turns" in raw
        else:
            assert status == 200 and b"Hello" in raw
        assert (meter.turns, meter.held) == (1, 0)
        assert (await case.ask(two))[0] == 400
        assert two.ended and two.pool_ended == shared


@pytest.mark.parametrize("client", NAMES)
@pytest.mark.parametrize("spent", [False, True])
async def test_a_stream_that_waits_for_a_turn_is_kept_alive(client: str, spent: bool, tmp_path: Path) -> None:
    async with rig(keep_alive=0.05) as case:
        session = case.gateway.session(
            "m", upstream=case.fake.provider("chat"), budget=Budget(turns=1), recording=tmp_path / "calls.jsonl"
        )
        first = await case.first(session, says(HELLO) if spent else FAILS)
        headers = {"Authorization": f"Bearer {session.key}"}
        body = request_body(client, stream=True)
        async with (
            aiohttp.ClientSession() as http,
            http.post(case.url + STREAM_PATHS[client], json=body, headers=headers) as response,
        ):
            raw = b""
            for _ in range(3):
                raw += await asyncio.wait_for(response.content.readany(), 60)
            case.go.set()
            raw += await response.read()
        await first
        parser = DIALECTS[client].stream_parser()
        built = TurnBuilder().extend([*parser.feed(raw), *parser.close()])
        if spent:
            assert built.error and "1 of 1 turns" in built.error.message
        else:
            assert built.error is None and built.turn().text == HELLO.text
        ends = {call.number: call.outcome for call in reader.read(tmp_path).generations()}
        assert ends == ({1: "ok", 2: "refused"} if spent else {1: "error", 2: "ok"})


@pytest.mark.parametrize("how", ["stopped", "closed", "time", "left"])
async def test_what_ends_a_call_that_waits_for_a_turn(how: str, tmp_path: Path) -> None:
    async with rig() as case:
        pool = Meter(Budget(turns=1), owner="job")
        one = case.gateway.session("m", upstream=case.fake.provider(), pool=pool)
        path = tmp_path / "calls.jsonl"
        budget = Budget(wall_time=0.3) if how == "time" else None
        two = case.gateway.session("m", upstream=case.fake.provider(), pool=pool, recording=path, budget=budget)
        first = await case.first(one, says(HELLO))
        second = case.ask(two)
        await until(lambda: waits(pool))
        expected = "refused"
        if how == "stopped":
            two.stop("enough")
            assert b"enough" in (await second)[1]
        elif how == "time":
            status, raw = await second
            assert status == 400 and b"0.3 seconds of this session are over" in raw
        else:
            expected = "cancelled"
            if how == "left":
                second.cancel()
            else:
                await two.close()
            await asyncio.wait({second}, timeout=60)
        await until(lambda: any(call.ended is not None for call in reader.read(path).generations()))
        assert [call.outcome for call in reader.read(path).generations()] == [expected]
        assert (pool.turns, pool.held) == (0, 1)
        case.go.set()
        assert (await first)[0] == 200
        assert (pool.turns, pool.held) == (1, 0)
        assert len(case.fake.asked) == 1


async def test_n_turns_are_n_generations_whatever_fails_between() -> None:
    """Agents that leave, providers that refuse, calls that come at once: as many generations as allowed, no fewer."""
    chance, begun = random.Random(5), 0

    async def moody(request: Any, raw: bytes) -> Any:
        nonlocal begun
        await asyncio.sleep(chance.random() * 0.02)
        if chance.random() < 0.5:
            return await FAILS(request, raw)
        begun += 1
        return await says(HELLO)(request, raw)

    async with fake_provider(moody) as fake, Gateway() as gateway:
        url = await gateway.serve()
        pool = Meter(Budget(turns=20), owner="job")
        sessions = [gateway.session("m", upstream=fake.provider(), pool=pool) for _ in range(4)]

        async def agent(session: Session) -> None:
            while True:
                stream = chance.random() < 0.5
                call = post(url, PATHS["chat"], session.key, request_body("chat", stream=stream))
                _, _, raw = await call
                if b"no further turn" in raw:
                    return

        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            for _ in range(3):
                for session in sessions:
                    group.create_task(agent(session))
        assert begun == pool.turns == 20
        assert pool.held == 0 and all(session.pool_ended for session in sessions)


async def test_a_stream_that_fails_before_it_begins_costs_no_turn() -> None:
    """A policy's as little as a provider's."""
    failures = 1

    async def policy(request: Request) -> AsyncIterator[Delta]:
        nonlocal failures
        if failures:
            failures -= 1
            raise ModelFailed("not now", status=503)
        for delta in stream_turn(HELLO):
            yield delta

    async with Gateway() as gateway:
        url = await gateway.serve()
        session = gateway.session("m", upstream=policy, budget=Budget(turns=1))
        body = request_body("chat", stream=True)
        statuses = [(await post(url, PATHS["chat"], session.key, body))[0] for _ in range(3)]
        assert statuses == [503, 200, 400]


async def test_a_failure_that_is_replayed_costs_no_turn(tmp_path: Path) -> None:
    async with rig() as case:
        path = tmp_path / "calls.jsonl"
        case.fake.then = [FAILS]
        session = case.gateway.session("m", upstream=case.fake.provider(), recording=path)
        statuses = [(await case.ask(session))[0] for _ in range(2)]
        await session.close()
        again = case.gateway.session(f"replay:{path}", budget=Budget(turns=1))
        assert [(await case.ask(again))[0] for _ in range(2)] == statuses == [400, 200]
        assert (again.meter.turns, again.ended) == (1, None)


@pytest.mark.parametrize("client", NAMES)
async def test_a_stream_that_is_slowed_down_is_kept_alive_within_its_time(client: str) -> None:
    async def hello(request: Request) -> Turn:
        return HELLO

    async with Gateway(keep_alive=0.05) as gateway:
        url = await gateway.serve()
        budget = Budget(requests_per_minute=1, wall_time=2)
        session = gateway.session("m", upstream=hello, budget=budget)
        path, body = STREAM_PATHS[client], request_body(client, stream=True)
        assert (await post(url, path, session.key, body))[0] == 200
        status, _, raw = await asyncio.wait_for(post(url, path, session.key, body), 50)
        parser = DIALECTS[client].stream_parser()
        built = TurnBuilder().extend([*parser.feed(raw), *parser.close()])
        assert status == 200 and built.error and "2 seconds of this session are over" in built.error.message
        status, _, raw = await asyncio.wait_for(post(url, path, session.key, body), 20)
        assert status == 400, "what has no turn left waits for no minute"
        assert "2 seconds" in DIALECTS[client].parse_error(400, json.loads(raw))[0]
