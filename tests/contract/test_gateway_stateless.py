"""Nothing of a conversation is kept at a provider, and each call is one turn: what cannot be recorded is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pier.gateway import Gateway
from pier.record import reader
from pier.trajectory import TrajectoryHeader
from pier.trajectory.derive import write_trajectory
from tests.gateway_fakes import PATHS, STREAM_PATHS, fake_provider, post, replies, request_body

UNRECORDABLE: list[tuple[str, dict[str, Any], str]] = [
    ("chat", {"n": 2}, "n"),
    ("gemini", {"generationConfig": {"candidateCount": 3}}, "candidateCount"),
    ("gemini", {"generationConfig": {"candidate_count": 3}}, "candidate_count"),
    ("gemini", {"generation_config": {"candidateCount": 3}}, "candidateCount"),
    ("gemini", {"cachedContent": "cachedContents/x"}, "cachedContent"),
    ("responses", {"previous_response_id": "resp_1"}, "previous_response_id"),
    ("responses", {"conversation": "conv_1"}, "conversation"),
    ("responses", {"prompt": {"id": "pmpt_1"}}, "prompt"),
    ("responses", {"background": True}, "background"),
]


@pytest.mark.parametrize("closed", [False, True], ids=["open", "closed book"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("same", [True, False], ids=["relayed", "translated"])
@pytest.mark.parametrize(("dialect", "more", "name"), UNRECORDABLE)
async def test_what_cannot_be_recorded_is_refused(
    dialect: str, more: dict[str, Any], name: str, same: bool, stream: bool, closed: bool, tmp_path: Path
) -> None:
    async with fake_provider() as fake, Gateway() as gateway:
        url = await gateway.serve()
        upstream = fake.provider(dialect if same else "anthropic")
        session = gateway.session("m", upstream=upstream, closed_book=closed, recording=tmp_path / "calls.jsonl")
        path = (STREAM_PATHS if stream else PATHS)[dialect]
        status, _, raw = await post(url, path, session.key, {**request_body(dialect, stream=stream), **more})
        assert status == 400 and name in json.loads(raw)["error"]["message"] and fake.asked == []
        await session.close()
    (call,) = reader.read(tmp_path).generations()
    assert (call.outcome, call.fault) == ("error", "agent")


@pytest.mark.parametrize(
    ("dialect", "more"), [("chat", {"n": 1}), ("gemini", {"generationConfig": {"candidateCount": 1}})]
)
async def test_one_answer_may_be_asked_for(dialect: str, more: dict[str, Any], tmp_path: Path) -> None:
    async with fake_provider() as fake, Gateway() as gateway:
        url = await gateway.serve()
        session = gateway.session("m", upstream=fake.provider(dialect), recording=tmp_path / "calls.jsonl")
        status, _, _ = await post(url, PATHS[dialect], session.key, {**request_body(dialect), **more})
        assert status == 200 and len(fake.asked) == 1
        await session.close()
    assert write_trajectory(tmp_path, tmp_path / "trajectory.json", TrajectoryHeader("a")).agent_steps == 1


THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "sealed"}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "add", "arguments": "{}"}


def answer(*output: dict[str, Any]) -> bytes:
    return json.dumps({"id": "resp_1", "status": "completed", "model": "m", "output": output}).encode()


@pytest.mark.parametrize("client", ["chat", "anthropic", "gemini"])
@pytest.mark.parametrize("model", ["gpt-5.1-codex", "o4-mini", "openai/gpt-5"])
async def test_translation_to_responses_stores_nothing_and_sends_reasoning_back(client: str, model: str) -> None:
    async with fake_provider(replies(200, answer(THOUGHT, CALL))) as fake, Gateway() as gateway:
        url = await gateway.serve()
        session = gateway.session(model, upstream=fake.provider("responses"))
        await post(url, PATHS[client], session.key, request_body(client))
        await post(url, PATHS[client], session.key, history(client))
        first, second = (asked.json for asked in fake.asked)
    assert (first["store"], first["include"]) == (False, ["reasoning.encrypted_content"])
    assert (second["store"], second["include"]) == (False, ["reasoning.encrypted_content"])
    kinds = [item["type"] for item in second["input"]]
    assert kinds == ["message", "reasoning", "function_call", "function_call_output"]
    assert second["input"][1]["encrypted_content"] == "sealed"


def history(client: str) -> dict[str, Any]:
    """The conversation after the call `add`, as a client writes it that knows nothing of reasoning."""
    body = request_body(client)
    if client == "gemini":
        call = {"functionCall": {"id": "call_1", "name": "add", "args": {}}}
        result = {"functionResponse": {"id": "call_1", "name": "add", "response": {"output": "3"}}}
        more = [{"role": "model", "parts": [call]}, {"role": "user", "parts": [result]}]
        return {**body, "contents": body["contents"] + more}
    if client == "anthropic":
        use = {"type": "tool_use", "id": "call_1", "name": "add", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "call_1", "content": "3"}
        more = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    else:
        call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
        more = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "call_1", "content": "3"}]
    return {**body, "messages": body["messages"] + more}


@pytest.mark.parametrize("model", ["gpt-4o", "gpt-5-chat-latest", "mine"])
async def test_a_model_that_does_not_reason_is_not_asked_to_encrypt(model: str) -> None:
    async with fake_provider(replies(200, answer({**THOUGHT, "encrypted_content": None}, CALL))) as fake:
        async with Gateway() as gateway:
            url = await gateway.serve()
            session = gateway.session(model, upstream=fake.provider("responses"))
            await post(url, PATHS["chat"], session.key, request_body("chat"))
            await post(url, PATHS["chat"], session.key, history("chat"))
        first, second = (asked.json for asked in fake.asked)
        assert first["store"] is False and "include" not in first
        kinds = [item["type"] for item in second["input"]]
        assert kinds == ["message", "function_call", "function_call_output"], "an id alone means nothing there"


async def test_a_relayed_request_keeps_its_own_settings() -> None:
    async with fake_provider() as fake, Gateway() as gateway:
        url = await gateway.serve()
        session = gateway.session("m", upstream=fake.provider("responses"))
        await post(url, PATHS["responses"], session.key, {**request_body("responses"), "store": True})
        assert fake.asked[0].json["store"] is True and "include" not in fake.asked[0].json
