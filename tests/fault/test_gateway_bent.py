"""Bodies, answers and events with one value that has no business there, each in turn: read, or refused in words."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from pier.gateway import Gateway
from pier.record import About, reader
from pier.trajectory.derive import write_trajectory
from pier.wire.dialects import DIALECTS, BadRequest, BadResponse, recognise
from pier.wire.turn import (
    Media,
    Message,
    Reasoning,
    Request,
    ResponseFormat,
    Sampling,
    Text,
    Tool,
    ToolCall,
    ToolChoice,
    ToolResult,
    Turn,
    TurnBuilder,
    Usage,
    stream_turn,
)
from tests.gateway_fakes import PATHS, STREAM_PATHS, Behaviour, fake_provider, replies, streams

NAMES = ["chat", "responses", "anthropic", "gemini"]

ODD: list[Any] = [
    None, 0, -1, 1e30, True, "", "x", "\ud800", [], [1], [None], [[]], ["a"], [{}], {}, {"a": 1}, {"type": "x"},
    [{"type": 5}],
]  # fmt: skip
REQUEST = Request(
    "m",
    (
        Message("user", (Text("hi"), Media("image/png", "aGk="), Media("image/png", url="https://x.test/y.png"))),
        Message("assistant", (Reasoning("hm", "sig", "anthropic"), Text("ok"), ToolCall("call_1", "add", '{"a": 1}'))),
        Message("user", (ToolResult("call_1", (Text("3"), Media("image/png", "aGk=")), is_error=True),)),
        Message("user", (Text("go"),)),
    ),
    system=("be good", "and kind"),
    tools=(Tool("add", "adds", {"type": "object", "properties": {"a": {"type": "integer"}}}, strict=True),),
    tool_choice=ToolChoice("tool", "add"),
    parallel_tools=False,
    sampling=Sampling(100, 0.5, 0.9, 5, ("stop",), 7, effort="low"),
    response_format=ResponseFormat({"type": "object"}, "r", True),
)
TURN = Turn(
    (Reasoning("hm", "sig", "anthropic"), Text("Hello"), ToolCall("call_1", "add", '{"a": 1}')),
    "tool_use",
    Usage(10, 5, 3, 2, 1),
    id="t1",
    model="m",
)


def bent(value: Any, depth: int = 99) -> Iterator[Any]:
    """A value with each of its parts, down to `depth`, left out or replaced by everything odd."""
    yield from ODD
    if depth and isinstance(value, dict):
        for key in value:
            yield {name: other for name, other in value.items() if name != key}
            yield from ({**value, key: other} for other in bent(value[key], depth - 1))
    elif depth and isinstance(value, list):
        for at, item in enumerate(value):
            yield from ([*value[:at], other, *value[at + 1 :]] for other in bent(item, depth - 1))


def events_of(dialect: str) -> list[bytes]:
    renderer = DIALECTS[dialect].stream_renderer(REQUEST)
    data = b"".join(renderer.render(delta) for delta in stream_turn(TURN, 3))
    return [event for event in data.split(b"\n\n") if event.strip()]


def bent_streams(dialect: str, depth: int = 99) -> Iterator[bytes]:
    """A whole stream with one event after the other bent."""
    events = events_of(dialect)
    for at, event in enumerate(events):
        head, found, data = event.partition(b"data: {")
        if found:
            for value in bent(json.loads(b"{" + data), depth):
                yield b"\n\n".join(
                    [*events[:at], head + b"data: " + json.dumps(value).encode(), *events[at + 1 :], b""]
                )


@pytest.mark.parametrize("name", NAMES)
def test_a_request_is_read_and_said_elsewhere_or_refused(name: str) -> None:
    refused = read = 0
    route = recognise("POST", PATHS[name])
    for body in bent(DIALECTS[name].render_request(REQUEST)):
        if not isinstance(body, dict):
            continue
        try:
            request = DIALECTS[name].parse_request(body, route)
        except BadRequest as error:
            refused += bool(str(error))
            continue
        read += 1
        for other in DIALECTS.values():
            try:
                json.dumps(other.render_request(request))
            except BadRequest as error:
                assert "cannot express the request" in str(error)
            json.dumps(other.render_response(TURN, request))
            assert b"".join(map(other.stream_renderer(request).render, stream_turn(TURN)))
    assert refused > 100 and read > 100


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_is_read_and_said_elsewhere_or_refused(name: str) -> None:
    refused = read = 0
    for body in bent(DIALECTS[name].render_response(TURN, REQUEST)):
        if not isinstance(body, dict):
            continue
        try:
            turn = DIALECTS[name].parse_response(body)
        except BadResponse as error:
            refused += bool(str(error))
            continue
        read += 1
        for other in DIALECTS.values():
            json.dumps(other.render_response(turn, REQUEST))
    assert refused > 50 and read > 50


@pytest.mark.parametrize("name", NAMES)
def test_a_stream_is_read_and_said_elsewhere_or_ends_in_an_error(name: str) -> None:
    failed = read = 0
    for data in bent_streams(name):
        parser = DIALECTS[name].stream_parser()
        deltas = [*parser.feed(data), *parser.close()]
        builder = TurnBuilder().extend(deltas)
        if builder.error is None:
            builder.turn()
            read += 1
        else:
            failed += 1
        for other in DIALECTS.values():
            renderer = other.stream_renderer(REQUEST)
            for delta in deltas:
                renderer.render(delta)
    assert failed > 50 and read > 50


@pytest.mark.parametrize(
    ("client", "upstream"), [("anthropic", "anthropic"), ("responses", "chat"), ("chat", "gemini")]
)
async def test_agents_that_send_anything_get_an_answer_of_their_dialect(
    client: str, upstream: str, tmp_path: Path
) -> None:
    bodies = list(bent(DIALECTS[client].render_request(REQUEST), 3))

    async def answer(request: web.BaseRequest, raw: bytes) -> web.StreamResponse:
        body = DIALECTS[upstream].render_response(TURN, REQUEST)
        return await replies(200, json.dumps(body).encode())(request, raw)

    async with fake_provider(answer) as fake, Gateway() as gateway, aiohttp.ClientSession() as http:
        url = await gateway.serve()
        session = gateway.session(
            "m", upstream=fake.provider(upstream), closed_book=True, recording=tmp_path / "calls.jsonl"
        )
        seen: dict[int, int] = {}
        for body in bodies:
            headers = {"Authorization": f"Bearer {session.key}", "Content-Type": "application/json"}
            async with http.post(url + PATHS[client], data=json.dumps(body).encode(), headers=headers) as response:
                raw = await response.read()
            seen[response.status] = seen.get(response.status, 0) + 1
            assert response.status in (200, 400, 502), (response.status, raw[:300], body)
            if response.status != 200:
                assert DIALECTS[client].parse_error(response.status, json.loads(raw))[0], raw[:300]
        await session.close()
    assert seen[200] > 20 and seen.get(502, 0) == 0
    assert client == upstream or seen[400] > 20
    assert len(reader.read(tmp_path).calls) >= seen[200]
    write_trajectory(tmp_path, tmp_path / "trajectory.json", About("a"))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("client", "upstream"), [("chat", "chat"), ("anthropic", "anthropic"), ("gemini", "responses")]
)
async def test_providers_that_send_anything_are_relayed_or_blamed(
    client: str, upstream: str, stream: bool, tmp_path: Path
) -> None:
    behaviours: list[Behaviour]
    if stream:
        behaviours = [streams(data) for data in bent_streams(upstream, 1)]
    else:
        answers = bent(DIALECTS[upstream].render_response(TURN, REQUEST), 3)
        behaviours = [replies(200, json.dumps(body).encode()) for body in answers]
    path = (STREAM_PATHS if stream else PATHS)[client]
    body = DIALECTS[client].render_request(REQUEST)
    if client != "gemini":
        body["stream"] = stream
    async with fake_provider() as fake, Gateway() as gateway, aiohttp.ClientSession() as http:
        url = await gateway.serve()
        fake.then.extend(behaviours)
        session = gateway.session("m", upstream=fake.provider(upstream), recording=tmp_path / "calls.jsonl")
        headers = {"Authorization": f"Bearer {session.key}", "Content-Type": "application/json"}
        for number, _ in enumerate(behaviours, 1):
            async with (
                asyncio.timeout(60),
                http.post(url + path, data=json.dumps(body).encode(), headers=headers) as response,
            ):
                raw = await response.read()
            assert response.status in (200, 502), (response.status, raw[:300])
            assert len(fake.asked) == number, "asked twice"
        await session.close()
    calls = reader.read(tmp_path).generations()
    assert len(calls) == len(behaviours)
    assert {call.outcome for call in calls} <= {"ok", "error", "failed"}, {call.outcome for call in calls}
    write_trajectory(tmp_path, tmp_path / "trajectory.json", About("a"))


def test_a_stream_as_an_array_is_read_once_however_it_is_cut() -> None:
    texts = ['x\\"{}[]\n\u00e9\N{PILE OF POO}' * number for number in range(20)]
    items = [{"candidates": [{"content": {"parts": [{"text": text}]}}], "b": [{"c": {}}]} for text in texts]
    raw = json.dumps(items, ensure_ascii=False, indent=1).encode()
    for size in (1, 2, 3, 7, 1000, len(raw)):
        parser = DIALECTS["gemini"].stream_parser()
        deltas = [delta for at in range(0, len(raw), size) for delta in parser.feed(raw[at : at + size])]
        assert TurnBuilder().extend([*deltas, *parser.close()]).turn().text == "".join(texts)

    def seconds(*pieces: bytes) -> float:
        parser, began = DIALECTS["gemini"].stream_parser(), time.process_time()
        for piece in pieces:
            parser.feed(piece)
        parser.close()
        return time.process_time() - began

    small, large = seconds(b"[" + b"{}," * 20_000), seconds(b"[" + b"{}," * 400_000)
    assert large < 80 * small, "linear in the items"
    small, large = (seconds(b'[{"a": "', *[b"x" * 1000] * count) for count in (2_000, 40_000))
    assert large < 80 * small, "linear in the pieces of an item"
