"""Tokens are counted whether or not the agent asks for the count, and the agent sees only what it asked for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pier.gateway import Directory, Gateway
from pier.record import reader
from tests.gateway_fakes import HELLO, PATHS, TOOL, fake_provider, post, says

ASKED = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("more", [{}, {"stream_options": None}, {"stream_options": {"include_usage": False}}])
async def test_a_stream_without_usage_is_counted_all_the_same(tmp_path: Path, more: dict[str, object]) -> None:
    async with fake_provider(says(TOOL)) as fake, Gateway() as gateway:
        url = await gateway.serve()
        session = gateway.session("m", upstream=fake.provider(), recording=tmp_path / "calls.jsonl")
        status, _, answer = await post(url, PATHS["chat"], session.key, {**ASKED, **more})
        assert status == 200 and b'"usage"' not in answer and answer.endswith(b"data: [DONE]\n\n")
        assert fake.asked[0].json["stream_options"]["include_usage"] is True
        await session.close()
        (call,) = reader.read(tmp_path).generations()
        assert call.usage and (call.usage.input_tokens, call.usage.output_tokens) == (20, 9)
        assert json.loads(call.body) == {**ASKED, **more}
        assert call.answer and call.answer.body == answer
        assert (session.meter.input_tokens, session.meter.output_tokens) == (20, 9)


async def test_an_agent_that_asks_gets_the_count(tmp_path: Path) -> None:
    async with fake_provider(says(HELLO)) as fake, Gateway() as gateway:
        url = await gateway.serve()
        session = gateway.session("m", upstream=fake.provider())
        _, _, answer = await post(url, PATHS["chat"], session.key, {**ASKED, "stream_options": {"include_usage": True}})
        assert b'"usage"' in answer


async def test_a_provider_that_cannot_count_is_left_alone(tmp_path: Path) -> None:
    async with fake_provider(says(HELLO)) as fake, Gateway() as gateway:
        url = await gateway.serve()
        session = gateway.session("m", upstream=replace(fake.provider(), usage=False))
        await post(url, PATHS["chat"], session.key, ASKED)
        assert fake.asked[0].json == ASKED


def test_the_file_of_providers_can_turn_it_off(tmp_path: Path) -> None:
    file = tmp_path / "providers.toml"
    file.write_text('[old]\nurl = "http://127.0.0.1:9"\nusage = false\n[new]\nurl = "http://127.0.0.1:9"\n')
    found = Directory.load({}, file)
    assert (found.get("old").usage, found.get("new").usage) == (False, True)
