"""Real agents on a server that gives token ids, as vLLM does: their trials become training samples, id by id.

Packs are built by `.ci/packs`, not by the tests; an agent whose pack is not there is skipped with that as the reason.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from pier.gateway.policy import Policy
from pier.gateway.script import Script
from pier.rollout.rollouts import rollouts
from pier.rollout.samples import broken_promises, samples_of
from pier.wire.dialects import DIALECTS
from pier.wire.turn import Request, Sampling, Turn
from tests.agent_rig import FOUR, PACKS, ROOT, need_pack
from tests.contract.test_samples_wire import END, body_of, template
from tests.gateway_fakes import Behaviour, fake_provider
from tests.policies import VOCABULARY, tokens_of

TURNS = [
    {"text": "I will look first.", "shell": "ls /app"},
    {"shell": "pwd"},
    {"write": {"path": "/app/greeting.txt", "content": "Hello, pier!\n"}},
    {"finish": "Done."},
]


def server(script: Script) -> Behaviour:
    """A script behind Chat Completions, streamed or not, with the ids of everything."""

    async def behave(request: web.BaseRequest, raw: bytes) -> web.StreamResponse:
        chat, body = DIALECTS["chat"], json.loads(raw)
        asked = chat.parse_request(body)
        answer: Any = chat.render_response(await script(asked), asked)
        choice = answer["choices"][0]
        ids = [*body_of(choice["message"]), END]
        likely = {"content": [{"token": f"token_id:{token}", "logprob": -token / 1000} for token in ids]}
        answer["prompt_token_ids"] = template(body["messages"], thoughts=False)
        if not body.get("stream"):
            choice |= {"token_ids": ids, "logprobs": likely}
            return web.json_response(answer)
        message = choice.pop("message")
        calls = [{"index": place, **call} for place, call in enumerate(message.get("tool_calls") or ())]
        choice |= {"delta": {**message, "tool_calls": calls}, "token_ids": ids, "logprobs": likely}
        answer["object"] = "chat.completion.chunk"
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: " + json.dumps(answer).encode() + b"\n\ndata: [DONE]\n\n")
        await response.write_eof()
        return response

    return behave


async def pier(home: Path, *words: str) -> str:
    environ = {**os.environ, "PIER_PACKS": str(PACKS), "PIER_HOME": str(home)}
    running = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "pier",
        *words,
        env=environ,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(running.communicate(), 280)
    assert running.returncode == 0, (out + err).decode()
    return out.decode()


@pytest.mark.parametrize("agent", FOUR)
async def test_a_trial_becomes_samples_whatever_the_dialect_of_its_agent(agent: str, tmp_path: Path) -> None:
    need_pack(agent)
    task = str(ROOT / "examples/tasks/hello")
    async with fake_provider(server(Script.parse(TURNS))) as fake:
        (tmp_path / "home").mkdir()
        (tmp_path / "home/providers.toml").write_text(f'[lab]\nurl = "{fake.url}/v1"\ntokens = true\n')
        jobs = ("--jobs-dir", str(tmp_path / "jobs"), "--job-name", "job")
        await pier(tmp_path / "home", "run", "-p", task, "--image", "host", "-a", agent, "-m", "lab/served", *jobs)
    out = tmp_path / "samples.jsonl"
    given = (
        "samples",
        "export",
        str(tmp_path / "jobs/job"),
        "-o",
        str(out),
        "--json",
        "--kind",
        "main",
        "--trainable",
    )
    told = json.loads(await pier(tmp_path / "home", *given))
    assert (told["delivered_fraction"], told["generations_without_tokens"]) == (1.0, 0)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["reward"] for row in rows} == {1.0}
    assert sorted(
        call for row in rows for span in row["spans"] if span["trained"] for call in [span["call"]]
    ) == sorted({call for row in rows for call in row["calls"]})
    trained = sum(sum(row["loss_mask"]) for row in rows)
    assert trained == told["trained_tokens"] == told["sampled_tokens"]
    assert all(row["messages"][-1]["role"] == "assistant" for row in rows)
    (place,) = (tmp_path / "jobs/job").glob("*/agent/recording.jsonl")
    assert list(broken_promises(samples_of(place)[0])) == []
    # What these agents send back is what was sampled, so a trial is one sample.
    assert [len(row["calls"]) for row in rows] == [len(TURNS)], told["splits"]


class ScriptedPolicy:
    """A script as a policy in this process, with the exact ids of everything; each rollout plays it from the start."""

    version = "step-1"
    vocab_size = VOCABULARY

    def for_session(self, labels: Mapping[str, str]) -> Policy:
        script = Script.parse(TURNS)

        async def answer(request: Request) -> Turn:
            turn = await script(request)
            return replace(turn, tokens=tokens_of(request, turn))

        return answer

    def __call__(self, request: Request) -> Any:
        raise AssertionError("each session has its own")


@pytest.mark.parametrize("agent", FOUR)
async def test_a_policy_in_this_process_drives_a_real_agent(
    agent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_pack(agent)
    monkeypatch.setenv("PIER_PACKS", str(PACKS))
    monkeypatch.setenv("PIER_HOME", str(tmp_path / "home"))
    task = ROOT / "examples/tasks/hello"
    stream = rollouts(task, agent=agent, policy=ScriptedPolicy(), image="host", sampling=Sampling(temperature=0.6))
    (rollout,) = [each async for each in stream]
    assert (rollout.reward, rollout.fault, rollout.termination_reason) == (1.0, None, "completed"), rollout.error
    assert list(broken_promises(rollout.samples)) == []
    assert (rollout.versions, rollout.counts.delivered_fraction) == (("step-1",), 1.0)
    main = [sample for sample in rollout.trainable if sample.kind == "main"]
    assert {span.temperature for sample in main for span in sample.spans} == {0.6}
    pairs = [pair for each in main for pair in zip(each.input_ids or (), each.loss_mask or (), strict=True)]
    kept = bytes(token for token, bit in pairs if bit and token < 256)
    assert b"Hello, pier!" in kept and b"I will look first." in kept
