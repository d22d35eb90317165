"""Attacks on what a session may use."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from pier.gateway import Gateway
from pier.gateway.budget import Budget
from tests.gateway_fakes import HELLO, PATHS, fake_provider, post, replies, request_body, says
from tests.redteam import route


def chunk(delta: dict[str, Any], **more: Any) -> bytes:
    value = {
        "id": "c",
        "object": "chat.completion.chunk",
        "model": "m",
        "choices": [{"index": 0, "delta": delta}],
        **more,
    }
    return b"data: " + json.dumps(value).encode() + b"\n\n"


async def slow_usage(request: web.BaseRequest, _: bytes) -> web.StreamResponse:
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await answer.prepare(request)
    await answer.write(chunk({"role": "assistant", "content": "word " * 1000}))
    await asyncio.sleep(600)
    return answer


async def silent(request: web.BaseRequest, _: bytes) -> web.StreamResponse:
    await asyncio.sleep(600)
    raise AssertionError


@route(
    "host",
    "an agent leaves each answer before its usage comes, to go on past a limit of tokens or money",
    "what it asked for and read is estimated, and counts",
)
@pytest.mark.parametrize(
    ("budget", "behaviour", "calls"),
    [
        (Budget(output_tokens=3000), slow_usage, 3),
        (Budget(input_tokens=2500), slow_usage, 3),
        (Budget(total_tokens=2000), silent, 2),
    ],
    ids=["output", "input", "unanswered"],
)
async def test_calls_that_are_given_up_count(budget: Budget, behaviour: Any, calls: int) -> None:
    async with fake_provider(behaviour) as fake, Gateway() as gateway, aiohttp.ClientSession() as http:
        session = gateway.session("m", upstream=fake.provider("chat"), budget=budget)
        url, headers = await gateway.serve(session=session), {"Authorization": f"Bearer {session.key}"}
        body = request_body("chat", "ask " * 1000, stream=behaviour is slow_usage)
        for _ in range(calls):
            begun = len(fake.asked)
            asked = asyncio.ensure_future(http.post(url + PATHS["chat"], json=body, headers=headers))
            while len(fake.asked) == begun:
                assert not asked.done() or asked.result().status == 200
                await asyncio.sleep(0.01)
            if behaviour is slow_usage:
                answer = await asked
                assert answer.status == 200
                await answer.content.readuntil(b"\n\n")
                answer.close()
            asked.cancel()
            while session.counts.ends.get("cancelled", 0) <= begun:
                await asyncio.sleep(0.01)
        async with http.post(url + PATHS["chat"], json=body, headers=headers) as answer:
            assert answer.status == 400 and "tokens of this session are used" in await answer.text()
        assert (session.meter.input_tokens, session.meter.output_tokens) == (0, 0), "no guess is reported"
        await session.close()


@route(
    "verdicts",
    "an agent provokes rate limits with long pauses, in many calls at once",
    "only its own session waits; all do once most sessions meet the limit",
)
@pytest.mark.parametrize("concurrency", [None, 2])
async def test_a_provoked_rate_limit_holds_its_own_session(concurrency: int | None) -> None:
    later = replies(429, b'{"error": {"message": "too many tokens"}}', {"Retry-After": "100"})

    async def huge_is_limited(request: web.BaseRequest, raw: bytes) -> web.StreamResponse:
        return await (later if b"huge" in raw else says(HELLO))(request, raw)

    async with fake_provider(huge_is_limited) as fake, Gateway() as gateway, asyncio.timeout(30):
        provider, url = fake.provider("chat", concurrency=concurrency), await gateway.serve()
        hostile, *others = (gateway.session("m", upstream=provider) for _ in range(4))
        for session in others:
            assert (await post(url, PATHS["chat"], session.key, request_body("chat")))[0] == 200
        body = request_body("chat", "huge")
        held = [asyncio.create_task(post(url, PATHS["chat"], hostile.key, body)) for _ in range(4)]
        while len(fake.asked) < 5:
            await asyncio.sleep(0.01)
        for session in others:
            assert (await post(url, PATHS["chat"], session.key, request_body("chat")))[0] == 200
        assert not any(each.done() for each in held), "its own calls wait"
        for each in held:
            each.cancel()
        await asyncio.gather(*held, return_exceptions=True)
