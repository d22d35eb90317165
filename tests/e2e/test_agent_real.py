"""Real agents, from packs, in sandboxes without a network: one script drives each of them to fix the bug-fix task.

Packs are built by `.ci/packs`, not by the tests; an agent whose pack is not there is skipped with that as the reason.
`PIER_TEST_AGENTS` picks other agents: `all`, or names with commas.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pier.agent.pack import PackStore
from pier.agent.registry import AGENTS, pack_spec
from pier.trajectory.model import Trajectory
from pier.trajectory.native.convert import READERS, find_sessions, trajectory_of
from pier.trajectory.rules import validate_file
from pier.trajectory.write import read

ROOT = Path(__file__).parents[2]
PACKS = Path(os.environ.get("PIER_PACKS") or ROOT / ".cache" / "packs")
SCRIPT = ROOT / "examples" / "scripts" / "bug-fix.yaml"
TURNS, CALLS = 5, 4
IN_CI = ("claude-code", "codex", "gemini-cli", "opencode", "goose", "qwen-code", "pi")
ENDS_BY_CALL = ("mini-swe-agent", "openhands")
"""Agents that end by calling a tool, so that their last turn has a call too."""


def chosen() -> list[str]:
    wanted = os.environ.get("PIER_TEST_AGENTS", "")
    if wanted == "all":
        return [name for name in AGENTS if pack_spec(name) is not None]
    return wanted.split(",") if wanted else list(IN_CI)


def need_pack(name: str) -> None:
    spec = pack_spec(name)
    if spec is None or PackStore(PACKS).find(spec) is None:
        pytest.skip(f"the pack of {name} is not built: .ci/packs {name}")


def run_trial(name: str, jobs: Path, script: Path, *extra: str) -> dict[str, Any]:
    """Run one trial of the bug-fix task and give its result."""
    command = [sys.executable, "-m", "pier", "run", "-p", str(ROOT / "examples/tasks/bug-fix"), "-a", name]
    command += ["-m", f"script:{script}", "--jobs-dir", str(jobs), "--job-name", "job", *extra]
    done = subprocess.run(
        command, env={**os.environ, "PIER_PACKS": str(PACKS)}, capture_output=True, text=True, timeout=600
    )
    results = list(jobs.glob("job/*/result.json"))
    assert results, done.stdout + done.stderr
    return {**json.loads(results[0].read_text()), "directory": results[0].parent}


def script_for(name: str, directory: Path) -> Path:
    """The script; Aider works in one turn and by edits alone, so it gets the same edits in one."""
    if name != "aider":
        return SCRIPT
    turns = yaml.safe_load(SCRIPT.read_text())["turns"]
    edits = [
        {"edit": {**turn["edit"], "path": turn["edit"]["path"].removeprefix("/app/")}}
        for turn in turns
        if "edit" in turn
    ]
    path = directory / "aider.yaml"
    path.write_text(yaml.safe_dump({"turns": [{"text": "Both files need a change.", "actions": edits}]}))
    return path


@pytest.mark.parametrize("name", chosen())
def test_an_agent_fixes_the_bug_without_a_network(name: str, tmp_path: Path) -> None:
    need_pack(name)
    result = run_trial(name, tmp_path / "jobs", script_for(name, tmp_path))
    assert result["exception_info"] is None
    assert result["verifier_result"]["rewards"] == {"reward": 1.0}
    assert result["agent_info"]["name"] == name
    wire = read(result["directory"] / "agent" / "trajectory.json")
    assert validate_file(result["directory"] / "agent" / "trajectory.json") == []
    if name == "aider":
        return
    assert sum(step.llm_call_count or 0 for step in wire.agent_steps) == TURNS
    assert len(calls_of(wire)) == CALLS + (name in ENDS_BY_CALL)
    if name in READERS:
        (session,) = find_sessions(result["directory"] / "agent", name)
        agree(wire, trajectory_of(session))


def calls_of(trajectory: Trajectory) -> list[tuple[str, dict[str, Any]]]:
    return [(call.function_name, call.arguments) for step in trajectory.agent_steps for call in step.tool_calls or ()]


def agree(wire: Trajectory, native: Trajectory) -> None:
    """What the gateway saw and what the agent wrote down are the same run."""
    assert calls_of(wire) == calls_of(native)
    for one, other in zip(wire.agent_steps, native.agent_steps, strict=True):
        assert one.text.strip() == other.text.strip()
        assert one.metrics is not None and other.metrics is not None
        assert one.metrics.prompt_tokens == other.metrics.prompt_tokens
        assert one.metrics.completion_tokens == other.metrics.completion_tokens
