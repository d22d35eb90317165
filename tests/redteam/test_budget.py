"""Attacks on what a session may use."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from pier.gateway import Gateway
from pier.gateway.budget import Budget
from pier.trajectory.calls import generations_of, key_of
from pier.trajectory.lineage import how_work_ended
from pier.wire.dialects import DIALECTS, Route, recognise
from pier.wire.headers import redacted_path
from pier.wire.translate import translate
from pier.wire.turn import Message, Text
from tests.gateway_fakes import HELLO, PATHS, fake_provider, post, replies, request_body, says
from tests.redteam import route
from tests.redteam.test_memory import record_calls


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


async def gemini_stream(request: web.BaseRequest, _: bytes, *, as_events: bool) -> web.StreamResponse:
    """A stream of Gemini without its usage, as events or, as some servers do whatever they are asked for, an array."""
    parts = {"candidates": [{"content": {"role": "model", "parts": [{"text": "word " * 1000}]}, "index": 0}]}
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream" if as_events else "application/json"})
    await answer.prepare(request)
    lead, end = (b"data: ", b"\n\n") if as_events else (b"[", b",\n")
    await answer.write(lead + json.dumps(parts).encode() + end)
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


@pytest.mark.parametrize("as_events", [True, False], ids=["as_events", "as_array"])
@pytest.mark.parametrize("form", ["?alt=sse", ""], ids=["events", "array"])
async def test_a_stream_of_gemini_that_is_given_up_counts(form: str, as_events: bool) -> None:
    async with (
        fake_provider(partial(gemini_stream, as_events=as_events)) as fake,
        Gateway() as gateway,
        aiohttp.ClientSession() as http,
    ):
        session = gateway.session("m", upstream=fake.provider("gemini"), budget=Budget(output_tokens=1000))
        url, headers = await gateway.serve(session=session), {"x-goog-api-key": session.key}
        body = request_body("gemini", "ask", stream=True)
        url = f"{url}/v1beta/models/m:streamGenerateContent{form}"
        asked = asyncio.ensure_future(http.post(url, json=body, headers=headers))
        await asyncio.sleep(0.3)
        asked.cancel()
        if asked.done() and not asked.cancelled():
            asked.result().close()
        while not session.counts.ends.get("cancelled"):
            await asyncio.sleep(0.01)
        async with http.post(url, json=body, headers=headers) as answer:
            assert answer.status == 400 and "tokens of this session are used" in await answer.text()
        await session.close()


def _function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {}}}


def _of_gemini(number: int) -> dict[str, Any]:
    calls = [{"functionCall": {"name": "f", "id": str(index)}} for index in range(number)]
    answers = [{"functionResponse": {"name": name, "id": "none"}} for name in ("f", "g") for _ in range(number)]
    return {"contents": [{"role": "model", "parts": calls}, {"role": "user", "parts": answers}]}


BODIES: dict[str, tuple[str, Callable[[int], dict[str, Any]]]] = {
    "tools of one name": ("chat", lambda n: {"model": "m", "messages": [], "tools": [_function("f")] * n}),
    "results in a row": (
        "chat",
        lambda n: {"model": "m", "messages": [{"role": "tool", "tool_call_id": "c", "content": "x"}] * n},
    ),
    "items in a row": ("responses", lambda n: {"model": "m", "input": [{"type": "reasoning", "summary": []}] * n}),
    "answers to other calls": ("gemini", _of_gemini),
}


@route(
    "host",
    "an agent sends very many tools of one name, results in a row or answers to unknown calls",
    "reading and translating them takes linear time",
)
@pytest.mark.parametrize("name", BODIES)
def test_a_request_is_translated_in_linear_time(name: str) -> None:
    dialect, make = BODIES[name]

    def seconds(number: int) -> float:
        body, began = make(number), time.process_time()
        request = DIALECTS[dialect].parse_request(body, Route(dialect, "generate", "m"))
        for target in DIALECTS:
            assert translate(request, target, "m").body
        return time.process_time() - began

    assert seconds(20_000) < 15 * seconds(4_000) + 0.5


ADDRESSES = ["/models/", "?", "://:", ":", "/rollout/", "/v1", "&a"]


@route(
    "host",
    "an agent asks for addresses of 64 kB that are slow to match",
    "each is recognised and recorded in a few milliseconds",
)
def test_an_address_is_read_in_linear_time() -> None:
    for piece in ADDRESSES:
        for start in ("/", "://"):
            address, began = f"{start}{piece * (65_000 // len(piece))}", time.process_time()
            recognise("POST", address)
            redacted_path(address)
            assert time.process_time() - began < 0.5, piece


def two_words(number: int) -> Iterator[bytes]:
    for index in range(number):
        yield json.dumps({"model": "m", "messages": [{"role": "user", "content": f"talk {index}"}] * 2}).encode()


def same_start(number: int) -> Iterator[bytes]:
    for index in range(number):
        said = [{"role": "user", "content": text} for text in ("hi", f"talk {index}")]
        yield json.dumps({"model": "m", "messages": said}).encode()


@route(
    "host",
    "an agent begins thousands of conversations, or opens a reminder very often and never closes it",
    "its calls are sorted in linear time",
)
@pytest.mark.parametrize("bodies", [two_words, same_start])
def test_calls_are_sorted_in_linear_time(bodies: Callable[[int], Iterator[bytes]], tmp_path: Path) -> None:
    def seconds(number: int) -> float:
        path = tmp_path / f"{number}.jsonl"
        record_calls(path, bodies(number))
        began = time.process_time()
        assert how_work_ended(generations_of(path))
        return time.process_time() - began

    assert seconds(4_000) < 12 * seconds(800) + 1


def test_reminders_are_removed_in_linear_time() -> None:
    opened, began = "<system-reminder>" * 200_000, time.process_time()
    assert key_of(Message("user", (Text(f"a {opened} b"),))) != key_of(Message("user", (Text("a b"),)))
    assert time.process_time() - began < 5
    closed = "a <system-reminder> <system-reminder> x </system-reminder> b </system-reminder> c"
    assert key_of(Message("user", (Text(closed),))) == key_of(Message("user", (Text("a b </system-reminder> c"),)))
