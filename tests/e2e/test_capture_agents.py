"""Real Claude Code and Codex that a user runs on this machine: what `pier capture` finds in their logs agrees with what
the gateway saw.

Packs are built by `.ci/packs`, not by the tests; an agent whose pack is not there is skipped with that as the reason.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from pier.gateway import Gateway
from pier.gateway.script import Script
from pier.trajectory import TrajectoryHeader
from pier.trajectory.derive import write_trajectory
from pier.trajectory.model import Trajectory, read
from pier.trajectory.rules import validate_file
from pier.workspace.capture import capture
from tests.agent_rig import on_host

SCRIPT = {
    "turns": [
        {"text": "I will look.", "shell": "printf 'one\\ntwo\\n' > made.txt; cat made.txt"},
        {"text": "Once more.", "shell": "wc -l < made.txt"},
        {"finish": "There are two lines."},
    ]
}
CODEX = """
model = "scripted"
model_provider = "pier"
check_for_update_on_startup = false
[model_providers.pier]
name = "pier"
base_url = "{url}/v1"
env_key = "PIER_MODEL_KEY"
wire_api = "responses"
[analytics]
enabled = false
[features]
plugins = false
apps = false
"""


def _command(agent: str, home: Path, url: str, key: str) -> tuple[list[str], dict[str, str]]:
    """How a user starts the agent on this machine, with its own home."""
    env = {"HOME": str(home), "PATH": os.environ["PATH"], "TERM": "dumb"}
    if agent == "claude-code":
        env |= {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": key, "ANTHROPIC_MODEL": "claude-sonnet-4-5"}
        env |= {"IS_SANDBOX": "1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
        return on_host(agent, "claude", "-p", "Count the lines.", "--dangerously-skip-permissions"), env
    (home / ".codex").mkdir(parents=True)
    (home / ".codex" / "config.toml").write_text(CODEX.format(url=url))
    flags = ["--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check", "Count the lines."]
    return on_host(agent, "codex", "exec", *flags), {**env, "PIER_MODEL_KEY": key}


async def _run(agent: str, home: Path, work: Path, recording: Path) -> None:
    script = recording.with_name("script.json")
    script.write_text(json.dumps(SCRIPT))
    async with Gateway() as gateway:
        session = gateway.session("scripted", upstream=Script.load(script), recording=recording)
        argv, env = _command(agent, home, await gateway.serve(), session.key)
        process = await asyncio.create_subprocess_exec(
            *argv, cwd=work, env=env, stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        said, _ = await asyncio.wait_for(process.communicate(), 120)
        assert process.returncode == 0, said.decode(errors="replace")


def _essence(found: Trajectory) -> list[tuple[Any, ...]]:
    """The parts of the agent's steps that do not depend on who wrote them down."""
    rows = []
    for step in found.agent_steps:
        calls = [(call.function_name, json.dumps(call.arguments, sort_keys=True)) for call in step.tool_calls or ()]
        results = len(step.observation.results) if step.observation else 0
        used = (step.metrics.prompt_tokens, step.metrics.completion_tokens) if step.metrics else None
        rows.append((step.text, calls, results, used))
    return rows


@pytest.mark.parametrize("agent", ["claude-code", "codex"])
async def test_a_captured_session_agrees_with_the_gateway(agent: str, tmp_path: Path) -> None:
    home, work, recording = tmp_path / "home", tmp_path / "work", tmp_path / "recording.jsonl"
    home.mkdir()
    work.mkdir()
    await _run(agent, home, work, recording)
    assert (work / "made.txt").read_text() == "one\ntwo\n"
    found = await asyncio.to_thread(capture, None, environ={"HOME": str(home)}, directory=work)
    file = found.directory / "agent" / "trajectory.json"
    assert found.session.agent == agent and validate_file(file) == []
    captured = read(file)
    write_trajectory(recording, tmp_path / "wire.json", TrajectoryHeader(agent))
    wire = read(tmp_path / "wire.json")
    assert _essence(captured) == _essence(wire)
    assert [step[0] for step in _essence(wire)] == ["I will look.", "Once more.", "There are two lines."]
    totals = [(final.total_prompt_tokens, final.total_completion_tokens) for final in _finals(captured, wire)]
    assert totals[0] == totals[1]
    outputs = "".join(str(step.observation) for step in captured.agent_steps)
    assert "one" in outputs and "two" in outputs


def _finals(*found: Trajectory) -> list[Any]:
    return [trajectory.final_metrics for trajectory in found]
