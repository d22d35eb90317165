"""A closed book in every dialect: what reaches beyond the model never leaves, and each cut is in the recording."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pier.gateway import Gateway
from pier.record import reader
from tests.gateway_fakes import PATHS, STREAM_PATHS, fake_provider, post, request_body

SCHEMA = {"type": "object", "properties": {}}
ASKED: dict[str, dict[str, Any]] = {
    "chat": {
        "tools": [{"type": "function", "function": {"name": "mine", "parameters": SCHEMA}}, {"type": "web_search"}],
        "web_search_options": {},
    },
    "responses": {
        "tools": [
            {"type": "function", "name": "mine", "parameters": SCHEMA},
            {"type": "web_search"},
            {"type": "mcp", "server_url": "https://elsewhere.test", "server_label": "s"},
        ]
    },
    "anthropic": {
        "tools": [
            {"name": "mine", "input_schema": SCHEMA},
            {"type": "web_search_20250305", "name": "web_search"},
            {"type": "web_fetch_20250910", "name": "web_fetch"},
        ],
        "mcp_servers": [{"type": "url", "url": "https://elsewhere.test", "name": "s"}],
    },
    "gemini": {
        "tools": [{"functionDeclarations": [{"name": "mine"}]}, {"googleSearch": {}}, {"urlContext": {}}],
    },
}
GONE = (b"web_search", b"web_fetch", b"googleSearch", b"google_search", b"urlContext", b"elsewhere.test")


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "streamed"])
@pytest.mark.parametrize("upstream", ["same", "other"])
@pytest.mark.parametrize("dialect", sorted(ASKED))
async def test_each_cut_is_recorded(dialect: str, upstream: str, stream: bool, tmp_path: Path) -> None:
    speaks = dialect if upstream == "same" else ("anthropic" if dialect != "anthropic" else "chat")
    async with fake_provider() as fake, Gateway() as gateway:
        url = await gateway.serve()
        path = (STREAM_PATHS if stream else PATHS)[dialect]
        session = gateway.session(
            "m", upstream=fake.provider(speaks), closed_book=True, recording=tmp_path / "calls.jsonl"
        )
        status, _, raw = await post(url, path, session.key, {**request_body(dialect, stream=stream), **ASKED[dialect]})
        assert status == 200, raw
        await session.close()
        (asked,) = fake.asked
    assert b"mine" in asked.body
    assert [word for word in GONE if word in asked.body] == []
    (call,) = reader.read(tmp_path / "calls.jsonl").generations()
    assert call.request["tools"] == ASKED[dialect]["tools"], "what the agent asked is kept as it asked it"
    assert call.upstream is not None and call.upstream.body == asked.body
    cut = [edit for edit in call.edits if edit["action"] == "removed"]
    lost = len(ASKED[dialect]) + len(ASKED[dialect]["tools"]) - 2
    assert len(cut) >= lost, json.dumps(call.edits)
    assert all(edit["what"] and edit["why"] for edit in call.edits)


@pytest.mark.parametrize("path", ["/v1/messages/count_tokens", "/v1beta/models/m:countTokens"])
async def test_counting_tokens_reaches_nowhere_either(path: str) -> None:
    """A provider that counts what an address leads to would have to go there."""
    away: dict[str, Any] = {
        "/v1/messages/count_tokens": {
            "model": "m",
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image", "source": {"type": "url", "url": "http://elsewhere.test"}}],
                }
            ],
        },
        "/v1beta/models/m:countTokens": {
            "generateContentRequest": {"contents": [{"parts": [{"fileData": {"fileUri": "http://elsewhere.test"}}]}]}
        },
    }
    near: dict[str, Any] = {
        "/v1/messages/count_tokens": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
        "/v1beta/models/m:countTokens": {"contents": [{"parts": [{"text": "hi"}]}]},
    }
    async with fake_provider() as fake, Gateway() as gateway:
        url = await gateway.serve()
        session = gateway.session("m", upstream=fake.provider("anthropic", "gemini"), closed_book=True)
        status, _, raw = await post(url, path, session.key, away[path])
        assert status == 200 and json.loads(raw) and not fake.asked
        status, _, raw = await post(url, path, session.key, near[path])
        assert status == 200 and b"4321" in raw and len(fake.asked) == 1


async def test_a_body_that_says_something_twice_is_refused() -> None:
    """What one reader takes for the first, another takes for the last."""
    body = b'{"model":"m","tools":[{"type":"web_search"}],"messages":[{"role":"user","content":"hi"}],"tools":[]}'
    async with fake_provider() as fake, Gateway() as gateway:
        url = await gateway.serve()
        session = gateway.session("m", upstream=fake.provider(), closed_book=True)
        status, _, raw = await post(url, PATHS["chat"], session.key, body)
        assert status == 400 and b"duplicate key" in raw and not fake.asked
