"""A recording may end anywhere, and hold calls of any shape: what is derived is valid, or nothing."""

from __future__ import annotations

import json
from pathlib import Path

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pier.gateway import Gateway
from pier.gateway.script import Script
from pier.trajectory import TrajectoryHeader
from pier.trajectory.derive import Derivation, write_trajectory
from pier.trajectory.rules import validate_file

TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"properties": {"command": {"type": "string"}}}}}
TURNS = [
    {"text": "a \ud83d", "shell": "ls"},
    {"shell": "pwd", "reasoning": "\ude00"},
    {"error": {"status": 500}},
    {"finish": "done"},
]


@pytest.fixture
async def recording(tmp_path: Path) -> Path:
    """A session of a small streamed chat agent, with a failure in it and calls that make no sense."""
    path = tmp_path / "calls.jsonl"
    async with Gateway() as gateway:
        session = gateway.session("m", upstream=Script.parse(TURNS), recording=path)
        url = await gateway.serve()
        headers = {"authorization": f"Bearer {session.key}"}
        async with aiohttp.ClientSession(headers=headers) as http:
            messages: list[dict] = [{"role": "user", "content": "go \ud83d on"}]
            for number in range(4):
                body = {"model": "m", "messages": messages, "tools": [TOOL], "stream": True}
                async with http.post(f"{url}/v1/chat/completions", json=body) as answer:
                    await answer.read()
                call = {"id": f"c{number}", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
                messages += [
                    {"role": "assistant", "content": "a", "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": f"c{number}", "content": "out"},
                ]
            for odd in ({}, {"model": 7}, {"model": "m", "messages": []}, {"model": "m", "messages": [{"role": "x"}]}):
                async with http.post(f"{url}/v1/chat/completions", json=odd) as answer:
                    await answer.read()
            async with http.post(f"{url}/v1/messages", data=b"no json") as answer:
                await answer.read()
    return path


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1))
def test_a_recording_cut_anywhere_gives_a_valid_trajectory_or_none(recording: Path, share: float) -> None:
    whole = recording.read_bytes()
    cut = recording.parent / "cut.jsonl"
    cut.write_bytes(whole[: int(len(whole) * share)])
    target = recording.parent / "trajectory.json"
    target.unlink(missing_ok=True)
    summary = write_trajectory(cut, target, TrajectoryHeader("a", session="s"))
    assert target.exists() == (summary.path is not None)
    if summary.path:
        assert validate_file(target) == []


def test_following_a_recording_line_by_line_ends_where_reading_it_at_once_does(recording: Path) -> None:
    growing, target = recording.parent / "growing.jsonl", recording.parent / "t.json"
    growing.write_bytes(b"")
    follower = Derivation(growing, target, TrajectoryHeader("a", "1", "m", "s"))
    with growing.open("ab") as stream:
        for line in recording.read_bytes().splitlines(keepends=True):
            stream.write(line)
            stream.flush()
            summary = follower.update()
            if summary.path:
                assert validate_file(target) == []
    at_once = recording.parent / "once.json"
    whole = write_trajectory(recording, at_once, TrajectoryHeader("a", "1", "m", "s"))
    assert json.loads(target.read_text()) == json.loads(at_once.read_text())
    assert summary.calls == whole.calls
    assert whole.agent_steps == 3
