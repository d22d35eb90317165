"""The official libraries as agents: every library with every kind of upstream, plain, streamed and with tools."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pier.gateway import Budget, Gateway
from pier.record import reader
from pier.rollout.samples import broken_promises, samples_of
from pier.wire.turn import Message, Request, Text, ToolResult, Turn, Usage
from tests.gateway_fakes import HELLO, TOOL, fake_provider, thinks
from tests.policies import END, spelled, tokens_of

CLIENTS = Path(__file__).parents[2] / ".cache" / "clients"
HERE = Path(__file__).parent
SUM = Turn((Text("It is 3."),), "end", Usage(30, 5), id="turn_3", model="served")
CALLS = [{"call": {"name": "add", "arguments": {"a": 1, "b": 2}}, "usage": {"input": 20, "output": 9}},
         {"text": SUM.text, "usage": {"input": 30, "output": 5}}]  # fmt: skip
SCRIPT = {
    "turns": [{"text": HELLO.text, "usage": {"input": 11, "output": 7}}],
    "lanes": [{"when": {"tool": "add"}, "turns": CALLS * 2}],
}
SAMPLED = {(*spelled(Message("assistant", turn.parts)), END) for turn in (HELLO, TOOL, SUM)}
"""The ids of all that the policy says, its tool arguments as it spaced them."""
needs_clients = pytest.mark.skipif(
    not (CLIENTS / "installed").exists(), reason="the official clients are not installed: run .ci/clients"
)


def think(request: Request) -> Turn:
    """Says hello; calls the tool if there is one; says the sum once it has the tool's result."""
    if any(isinstance(part, ToolResult) for part in request.messages[-1].parts):
        return SUM
    return TOOL if request.tools else HELLO


async def policy(request: Request) -> Turn:
    turn = think(request)
    return replace(turn, tokens=tokens_of(request, turn))


def check_exact(recording: Path, calls: int) -> None:
    """All that a policy sampled is trained, each token once and as it was sampled."""
    samples, counts = samples_of(recording)
    assert list(broken_promises(samples)) == []
    assert (counts.generations, counts.delivered_fraction, counts.without_tokens) == (calls, 1.0, 0)
    for sample in samples:
        span, turn = sample.spans[-1], sample.turns[-1]
        assert turn.tokens is not None and sample.input_ids is not None
        assert sample.input_ids[span.start : span.end] == turn.tokens.completion_ids
        assert turn.tokens.completion_ids in SAMPLED


async def run_client(command: list[str], job: dict[str, Any], cwd: Path | None = None) -> Any:
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, cwd=cwd
    )
    out, err = await asyncio.wait_for(process.communicate(json.dumps(job).encode()), 240)
    assert process.returncode == 0, err.decode()[-3000:]
    return json.loads(out)


@needs_clients
@pytest.mark.parametrize("library", ["chat", "responses", "anthropic", "gemini"])
async def test_a_python_client_with_every_upstream(library: str, tmp_path: Path) -> None:
    async with fake_provider(thinks(think)) as fake, Gateway() as gateway:
        url = await gateway.serve()
        kinds = ["chat", "responses", "anthropic", "gemini", "policy"]
        made = {
            kind: gateway.session(
                "m", upstream=policy if kind == "policy" else fake.provider(kind), recording=tmp_path / f"{kind}.jsonl"
            )
            for kind in kinds
        }
        (tmp_path / "script.json").write_text(json.dumps(SCRIPT))
        made["script"] = gateway.session(f"script:{tmp_path / 'script.json'}", recording=tmp_path / "script.jsonl")
        short = gateway.session("m", upstream=policy, budget=Budget(turns=1), recording=tmp_path / "short.jsonl")
        sessions = [{"url": url, "key": session.key, "model": "m"} for session in made.values()]
        job = {"library": library, "sessions": sessions, "short": {"url": url, "key": short.key}}
        command = [str(CLIENTS / "bin" / "python"), str(HERE / "gateway_clients.py")]
        found = await run_client(command, job)
        call = [["add", {"a": 1, "b": 2}]]
        expected = [[HELLO.text, [], [11, 7]], ["", call, [20, 9]], [SUM.text, [], [30, 5]]]
        for kind, answers in zip(made, found["answers"], strict=True):
            assert answers == expected * 2, kind
            calls = reader.read(tmp_path / f"{kind}.jsonl").generations()
            assert [call.outcome for call in calls] == ["ok"] * 6
            assert not any(attempt.dropped for call in calls for attempt in call.attempts)
        check_exact(tmp_path / "policy.jsonl", 6)
        assert "1 of 1 turns" in found["refused"]
        outcomes = [call.outcome for call in reader.read(tmp_path / "short.jsonl").generations()]
        assert outcomes == ["ok", "refused"], "the library must not retry"
        for session in made.values():
            await session.close()
        again = gateway.session(f"replay:{tmp_path / 'anthropic.jsonl'}")
        job = {"library": library, "sessions": [{"url": url, "key": again.key, "model": "m"}]}
        assert (await run_client(command, job))["answers"] == [expected * 2]


@needs_clients
@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
async def test_the_node_clients_with_every_upstream(tmp_path: Path) -> None:
    command, libraries = ["node", str(HERE / "gateway_clients.mjs")], ("chat", "responses", "anthropic", "gemini")
    expected = {name: [HELLO.text, HELLO.text, "add"] for name in libraries}
    (tmp_path / "script.json").write_text(
        json.dumps({**SCRIPT, "lanes": [{"when": {"tool": "add"}, "turns": CALLS[:1]}]})
    )
    async with fake_provider(thinks(think)) as fake, Gateway() as gateway:
        url = await gateway.serve()
        upstreams = [fake.provider(kind) for kind in libraries]
        made = [
            gateway.session("m", upstream=upstream, recording=tmp_path / f"{upstream.dialects[0]}.jsonl")
            for upstream in upstreams
        ]
        made.append(gateway.session("m", upstream=policy, recording=tmp_path / "policy.jsonl"))
        made.append(gateway.session(f"script:{tmp_path / 'script.json'}", recording=tmp_path / "calls.jsonl"))
        job = {"sessions": [{"url": url, "key": session.key, "model": "m"} for session in made]}
        assert await run_client(command, job, cwd=CLIENTS) == [expected] * 6
        calls = [call for kind in libraries for call in reader.read(tmp_path / f"{kind}.jsonl").generations()]
        dropped = {name for call in calls for attempt in call.attempts for name in attempt.dropped}
        assert dropped <= {"accept-language", "sec-fetch-mode"}
        await made[-2].close()
        check_exact(tmp_path / "policy.jsonl", 12)
        again = gateway.session(f"replay:{tmp_path / 'calls.jsonl'}")
        job = {"sessions": [{"url": url, "key": again.key, "model": "m"}]}
        assert await run_client(command, job, cwd=CLIENTS) == [expected]
