"""Every agent dialect with every kind of model: unary and streamed, with tools, over real sockets."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pier.errors import ProviderError
from pier.gateway import Gateway
from pier.record import reader
from pier.wire.dialects import DIALECTS
from pier.wire.turn import Delta, Request, Turn, TurnBuilder, stream_turn
from tests.gateway_fakes import HELLO, PATHS, STREAM_PATHS, TOOL, fake_provider, post, request_body, says

NAMES = ["chat", "responses", "anthropic", "gemini"]


def read_answer(dialect: str, stream: bool, raw: bytes) -> Turn:
    if not stream:
        return DIALECTS[dialect].parse_response(json.loads(raw))
    parser = DIALECTS[dialect].stream_parser()
    builder = TurnBuilder().extend([*parser.feed(raw), *parser.close()])
    assert builder.error is None
    return builder.turn()


@pytest.mark.parametrize("client", NAMES)
@pytest.mark.parametrize("upstream", NAMES)
@pytest.mark.parametrize("stream", [False, True])
async def test_every_pair(client: str, upstream: str, stream: bool, tmp_path: Path) -> None:
    async with fake_provider() as fake, Gateway() as gateway:
        url = await gateway.serve()
        session = gateway.session("m", upstream=fake.provider(upstream), recording=tmp_path / "calls.jsonl")
        path = (STREAM_PATHS if stream else PATHS)[client]
        for turn in (HELLO, TOOL):
            fake.then.append(says(turn))
            status, _, raw = await post(url, path, session.key, request_body(client, stream=stream))
            assert status == 200
            answer = read_answer(client, stream, raw)
            assert answer.text == turn.text
            assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == [
                (call.name, json.loads(call.arguments)) for call in turn.calls
            ]
            assert (answer.stop, answer.usage.output_tokens) == (turn.stop, turn.usage.output_tokens)
        calls = reader.read(tmp_path).generations()
        assert [call.outcome for call in calls] == ["ok", "ok"]
        assert [call.usage.input_tokens for call in calls if call.usage] == [11, 20]
        for call in calls:
            assert call.answer
            assert call.upstream
            assert call.upstream.answer
            assert (call.dialect, call.upstream.dialect) == (client, upstream)
            assert read_answer(upstream, stream, call.upstream.answer.body).text in (HELLO.text, "")


@pytest.mark.parametrize("client", NAMES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["turn", "text", "deltas"])
async def test_policies(client: str, stream: bool, kind: str, tmp_path: Path) -> None:
    seen: list[Request] = []

    async def turn(request: Request) -> Turn | str:
        seen.append(request)
        return HELLO if kind == "turn" else HELLO.text

    async def deltas(request: Request) -> AsyncIterator[Delta]:
        seen.append(request)
        for delta in stream_turn(HELLO):
            yield delta

    async with Gateway() as gateway:
        url = await gateway.serve()
        policy = deltas if kind == "deltas" else turn
        session = gateway.session("own", upstream=policy, recording=tmp_path / "calls.jsonl")
        path = (STREAM_PATHS if stream else PATHS)[client]
        status, _, raw = await post(url, path, session.key, request_body(client, "what?", stream=stream))
        assert (status, read_answer(client, stream, raw).text) == (200, HELLO.text)
        assert seen[0].messages[0].text == "what?"
        (call,) = reader.read(tmp_path).generations()
        assert call.answer
        assert (call.outcome, call.answer.body, call.attempts) == ("ok", raw, [])


@pytest.mark.parametrize("client", NAMES)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_failing_policy_is_an_error_of_the_dialect(client: str, stream: bool) -> None:
    async def policy(request: Request) -> Turn:
        raise ProviderError("out of order")

    async with Gateway() as gateway:
        url = await gateway.serve()
        session = gateway.session("own", upstream=policy)
        path = (STREAM_PATHS if stream else PATHS)[client]
        status, headers, raw = await post(url, path, session.key, request_body(client, stream=stream))
        assert (status, headers["Content-Type"].split(";")[0]) == (502, "application/json")
        assert "out of order" in DIALECTS[client].parse_error(502, json.loads(raw))[0]
        assert session.meter.turns == 0


@pytest.mark.parametrize("client", NAMES)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_replay_answers_again_and_shows_what_differs(client: str, stream: bool, tmp_path: Path) -> None:
    async with fake_provider() as fake, Gateway() as gateway:
        url = await gateway.serve()
        path = (STREAM_PATHS if stream else PATHS)[client]
        upstream = "anthropic" if client == "chat" else "chat"
        session = gateway.session("m", upstream=fake.provider(upstream), recording=tmp_path / "a" / "calls.jsonl")
        first = [await post(url, path, session.key, request_body(client, text, stream=stream)) for text in ("a", "b")]
        await session.close()
        asked = len(fake.asked)
        again = gateway.session(f"replay:{tmp_path / 'a'}", recording=tmp_path / "b" / "calls.jsonl")
        second = [await post(url, path, again.key, request_body(client, text, stream=stream)) for text in ("a", "b")]
        assert [raw for _, _, raw in second] == [raw for _, _, raw in first]
        assert len(fake.asked) == asked
        status, _, raw = await post(url, path, again.key, request_body(client, "c", stream=stream))
        assert (status, b"used up" in raw) == (400, True)
        third = gateway.session(f"replay:{tmp_path / 'b'}")
        status, _, raw = await post(url, path, third.key, request_body(client, "other", stream=stream))
        assert status == 400
        assert b'was \\"a\\", is \\"other\\"' in raw


@pytest.mark.parametrize("client", NAMES)
@pytest.mark.parametrize("stream", [False, True])
async def test_half_a_character_passes(client: str, stream: bool, tmp_path: Path) -> None:
    from dataclasses import replace

    from pier.wire.turn import Text

    half = "cut \ud83d here"
    async with fake_provider(says(replace(HELLO, parts=(Text(half),)))) as fake, Gateway() as gateway:
        url = await gateway.serve()
        path = (STREAM_PATHS if stream else PATHS)[client]
        for upstream in NAMES:
            session = gateway.session(
                "m", upstream=fake.provider(upstream), closed_book=True, recording=tmp_path / f"{upstream}.jsonl"
            )
            status, _, raw = await post(url, path, session.key, request_body(client, half, stream=stream))
            assert (status, read_answer(client, stream, raw).text) == (200, half)
            assert b"\\ud83d" in fake.asked[-1].body
            (call,) = reader.read(tmp_path / f"{upstream}.jsonl").generations()
            assert call.outcome == "ok"
