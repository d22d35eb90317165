"""A provider of the agent's own dialect: everything passes as it is, and everything is recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pier.gateway import Gateway
from pier.record import reader
from pier.trajectory.calls import Generation
from tests.gateway_fakes import (
    HELLO,
    PATHS,
    STREAM_PATHS,
    TOOL,
    fake_provider,
    post,
    replies,
    request_body,
    says,
)

DIALECTS = ["chat", "responses", "anthropic", "gemini"]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("stream", [False, True])
async def test_bytes_and_headers_pass_both_ways(dialect: str, stream: bool, tmp_path: Path) -> None:
    async with fake_provider(says(TOOL)) as fake, Gateway() as gateway:
        url = await gateway.serve()
        session = gateway.session(
            "gemini-x" if dialect == "gemini" else "named-by-agent",
            upstream=fake.provider(dialect),
            recording=tmp_path / "calls.jsonl",
        )
        path = (STREAM_PATHS if stream else PATHS)[dialect]
        body = json.dumps(request_body(dialect, "zwölf ☃", stream=stream), ensure_ascii=False, indent=1).encode()
        status, headers, answer = await post(url, path, session.key, body, **{"x-own": "1", "x-stainless-lang": "b"})
        direct = await post(fake.url, path, "k", body)
        assert status == 200
        assert fake.asked[0].body == body
        assert fake.asked[0].headers["x-stainless-lang"] == "b" and "x-own" not in fake.asked[0].headers
        assert session.key not in str(fake.asked[0].headers)
        assert "sk-provider-secret" in str(fake.asked[0].headers)
        assert _timeless(answer) == _timeless(direct[2])
        assert headers["Content-Type"] == direct[1]["Content-Type"]
        await session.close()
        text = (tmp_path / "calls.jsonl").read_text()
        assert session.key not in text
        assert "sk-provider-secret" not in text
        (call,) = reader.read(tmp_path).generations()
        assert (call.body, call.outcome, call.stream) == (body, "ok", stream)
        assert call.headers["x-own"] == "1" and call.attempts[0].dropped == ("x-own",)
        assert call.answer
        assert call.answer.body == answer
        assert call.usage
        assert (call.usage.input_tokens, call.usage.output_tokens) == (20, 9)


def _timeless(answer: bytes) -> bytes:
    import re

    return re.sub(rb'"(created|created_at)": ?[\d.]+|"(id|item_id)": ?"[^"]*"', b"", answer)


async def test_another_name_becomes_the_sessions_model(tmp_path: Path) -> None:
    async with fake_provider(says(HELLO)) as fake, Gateway() as gateway:
        url = await gateway.serve()
        session = gateway.session("real", upstream=fake.provider(), recording=tmp_path / "calls.jsonl")
        await post(url, PATHS["chat"], session.key, request_body("chat"))
        assert fake.asked[0].json == {**request_body("chat"), "model": "real"}
        (call,) = reader.read(tmp_path).generations()
        assert call.model == "named-by-agent"
        assert call.upstream
        assert call.upstream.model == "real"
        assert call.upstream.body == fake.asked[0].body


async def test_cookies_of_a_provider_reach_nobody() -> None:
    async with fake_provider(replies(200, b'{"choices": []}', {"Set-Cookie": "id=1"})) as fake, Gateway() as gateway:
        url = await gateway.serve()
        for _ in range(2):
            session = gateway.session("m", upstream=fake.provider())
            _, headers, _ = await post(url, PATHS["chat"], session.key, request_body("chat"), Cookie="own=1")
            assert "Set-Cookie" not in headers
        assert ["Cookie" in asked.headers for asked in fake.asked] == [False, False]


async def test_odd_paths_and_queries_find_their_way() -> None:
    async with fake_provider(says(HELLO)) as fake, Gateway() as gateway:
        url = await gateway.serve()
        session = gateway.session("a/b c", upstream=fake.provider("anthropic", "gemini"))
        await post(url, "//v1/v1/messages?beta=true", session.key, request_body("anthropic"))
        await post(url, "/v1beta/models/x:generateContent", session.key, request_body("gemini"))
        await post(url, f"/v1/messages?beta=true&key={session.key}&monkey=1", "", request_body("anthropic"))
        assert [asked.path for asked in fake.asked] == [
            "/v1/messages?beta=true",
            "/v1beta/models/a%2Fb%20c:generateContent",
            "/v1/messages?beta=true",
        ]


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_streamed_answer_is_collected_in_every_dialect(dialect: str) -> None:
    found: list[Generation] = []
    async with fake_provider(says(TOOL)) as fake, Gateway() as gateway:
        url = await gateway.serve()
        session = gateway.session("gemini-x", upstream=fake.provider(dialect), on_generation=found.append)
        await post(url, STREAM_PATHS[dialect], session.key, request_body(dialect, stream=True))
        await session.close()
    (generation,) = found
    assert generation.node.turn is not None
    assert [call.name for call in generation.node.turn.calls] == [call.name for call in TOOL.calls]
