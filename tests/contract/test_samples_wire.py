"""Agents of every dialect on a server that gives token ids: what is trained is what was sampled, id by id."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from click.testing import CliRunner

from pier.cli.samples import samples as command
from pier.gateway import Gateway
from pier.rollout.samples import broken_promises, samples_of
from pier.wire.turn import Text, Tokens, ToolCall, Turn
from tests.contract.test_derivation_wire import Agent
from tests.gateway_fakes import Behaviour, fake_provider

ROLES = {"system": 256, "user": 257, "assistant": 258, "tool": 259}
END = 260
ARGUMENTS = ['{"command":   "ls"}', '{ "command": "cat é.txt" }']
"""Spaced as no client would write them again."""


def template(messages: list[dict[str, Any]], *, thoughts: bool) -> list[int]:
    """The ids of a chat, as a server's template makes them: bytes between marks."""
    ids: list[int] = []
    for message in messages:
        ids += [ROLES[message["role"]], *body_of(message, thoughts=thoughts), END]
    return [*ids, ROLES["assistant"]]


def body_of(message: dict[str, Any], *, thoughts: bool = True) -> list[int]:
    content = message.get("content") or ""
    text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
    calls = "".join(f"<{c['function']['name']}>{c['function']['arguments']}" for c in message.get("tool_calls") or ())
    thought = f"<think>{message['thought']}</think>" if thoughts and message.get("thought") else ""
    return list((thought + text + calls).encode())


def server(*, thinks: bool = False) -> Behaviour:
    """A server like vLLM, which calls a tool twice and is done. If it `thinks`, its template drops old thoughts."""
    turn = 0

    async def behave(request: web.BaseRequest, raw: bytes) -> web.StreamResponse:
        nonlocal turn
        body = json.loads(raw)
        assert body["return_token_ids"] is True
        message: dict[str, Any] = {"role": "assistant", "content": None if turn < 2 else "All done."}
        if turn < 2:
            call = {"id": f"call_{turn}", "type": "function"}
            message["tool_calls"] = [{**call, "function": {"name": "bash", "arguments": ARGUMENTS[turn]}}]
        ids = [*body_of({**message, "thought": "hm" if thinks else ""}), END]
        turn += 1
        prompt = template(body["messages"], thoughts=False)
        likely = [{"token": "x", "logprob": -token / 1000} for token in ids]
        head = {"id": "c", "object": "chat.completion", "created": 1, "model": "served", "weight_version": f"v{turn}"}
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        if not body.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": finish}
            choice |= {"token_ids": ids, "logprobs": {"content": likely}}
            return web.json_response({**head, "prompt_token_ids": prompt, "choices": [choice]})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        delta = {**message, "tool_calls": [{"index": 0, **call} for call in message.get("tool_calls") or ()]}
        half = len(ids) // 2
        for number, (piece, values) in enumerate(((ids[:half], likely[:half]), (ids[half:], likely[half:]))):
            choice = {"index": 0, "delta": {} if number else delta, "finish_reason": finish if number else None}
            chunk = {**head, "choices": [{**choice, "token_ids": piece, "logprobs": {"content": values}}]}
            if not number:
                chunk["prompt_token_ids"] = prompt
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    return behave


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "streamed"])
@pytest.mark.parametrize("dialect", ["chat", "responses", "anthropic", "gemini"])
async def test_what_was_sampled_is_what_is_trained(dialect: str, stream: bool, tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    async with fake_provider(server()) as fake, Gateway() as gateway:
        session = gateway.session("m", upstream=fake.provider(), recording=path, tokens=True)
        agent = Agent(dialect, await gateway.serve(), session.key, stream=stream)
        await agent.run("go")
        asked = [each.json["messages"] for each in fake.asked]
    samples, counts = samples_of(path)
    assert list(broken_promises(samples)) == []
    (sample,) = samples
    assert sample.calls == (1, 2, 3)
    assert list(sample.input_ids or ()) == [*template(asked[-1], thoughts=False), *b"All done.", END]
    assert sample.logprobs is not None and sample.loss_mask is not None
    trained = [-round(value * 1000) for value in sample.logprobs if value is not None]
    kept = [i for i, bit in zip(sample.input_ids or (), sample.loss_mask, strict=True) if bit]
    assert trained == kept
    said = [f"<bash>{arguments}".encode() for arguments in ARGUMENTS]
    assert kept == [*said[0], END, *said[1], END, *b"All done.", END]
    assert sample.weights == ("v1", "v2", "v3")
    assert counts.delivered_fraction == 1.0


async def test_a_template_that_drops_thoughts_makes_a_sample_of_every_call(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    async with fake_provider(server(thinks=True)) as fake, Gateway() as gateway:
        session = gateway.session("m", upstream=fake.provider(), recording=path, tokens=True)
        await Agent("chat", await gateway.serve(), session.key, stream=False).run("go")
    samples, counts = samples_of(path)
    assert list(broken_promises(samples)) == []
    assert [(sample.calls, sample.split) for sample in samples] == [
        ((1,), None),
        ((2,), "retokenised"),
        ((3,), "retokenised"),
    ]
    assert counts.splits == {"retokenised": 2}
    assert counts.delivered_fraction == 1.0


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "streamed"])
async def test_a_policys_own_tokens_make_samples(stream: bool, tmp_path: Path) -> None:
    async def policy(request: Any) -> Turn:
        prompt = tuple(range(10 * len(request.messages)))
        if len(request.messages) > 1:
            return Turn((Text("done"),), tokens=Tokens(prompt, (7, 8), (-0.1, -0.2), "w2"))
        call = ToolCall("c1", "bash", "{}")
        return Turn((call,), "tool_use", tokens=Tokens(prompt, tuple(range(10, 15)), (-0.3,) * 5, "w1"))

    path = tmp_path / "calls.jsonl"
    async with Gateway() as gateway:
        session = gateway.session("m", upstream=policy, recording=path)
        await Agent("anthropic", await gateway.serve(), session.key, stream=stream).run("go")
    (sample,) = samples_of(path)[0]
    assert (sample.calls, sample.trained, sample.weights) == ((1, 2), 7, ("w1", "w2"))


async def test_the_command_lists_and_writes_samples(tmp_path: Path) -> None:
    path = tmp_path / "job" / "trial" / "agent" / "recording.jsonl"
    async with fake_provider(server()) as fake, Gateway() as gateway:
        session = gateway.session("m", upstream=fake.provider(), recording=path, tokens=True)
        await Agent("anthropic", await gateway.serve(), session.key, stream=True).run("go")
    result = {
        "trial_name": "trial",
        "task_name": "t",
        "verifier_result": {"rewards": {"reward": 1.0}},
        "agent_info": {},
    }
    (tmp_path / "job/trial/result.json").write_text(json.dumps(result))
    runner = CliRunner()
    listed = runner.invoke(command, ["export", str(tmp_path / "job")], catch_exceptions=False)
    assert "trial#1" in listed.output and "delivered fraction" in listed.output
    for form in ("pier", "sft"):
        out = tmp_path / f"{form}.jsonl"
        given = ["export", str(tmp_path / "job"), "-o", str(out), "--format", form, "--json", "--trainable"]
        told = json.loads(runner.invoke(command, given, catch_exceptions=False).output)
        assert (told["written"], told["trainable"], told["file"]) == (1, 1, str(out))
        (row,) = [json.loads(line) for line in out.read_text().splitlines()]
        assert row["messages"][-1]["role"] == "assistant"
    whole = json.loads((tmp_path / "pier.jsonl").read_text())
    assert (whole["id"], whole["reward"], whole["exact"], whole["kind"]) == ("trial#1", 1.0, True, "main")
    assert len(whole["input_ids"]) == len(whole["loss_mask"]) == len(whole["logprobs"])
    assert whole["messages"][-1] == {"role": "assistant", "content": "All done."}


async def test_calls_that_were_cut_off_are_counted_and_never_trained(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    async with fake_provider(server()) as fake, Gateway() as gateway:
        session = gateway.session("m", upstream=fake.provider(), recording=path, tokens=True)
        await Agent("chat", await gateway.serve(), session.key, stream=True).run("go")
    lines = path.read_bytes().splitlines(keepends=True)
    last = max(index for index, line in enumerate(lines) if b'"t":"chunk"' in line and b"[DONE]" in line)
    path.write_bytes(
        b"".join(line for line in lines[:last] if b'finish_reason": "stop' not in line.replace(b"\\", b""))
    )
    samples, counts = samples_of(path)
    assert [sample.calls for sample in samples] == [(1, 2)]
    assert (counts.generations, counts.unanswered) == (3, 1)
