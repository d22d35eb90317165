"""Real agents that start sub-agents and compact their history: what is derived from their calls tells it all apart.

Packs are built by `.ci/packs`, not by the tests; an agent whose pack is not there is skipped with that as the reason.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pier.agent.contract import pack_spec
from pier.agent.pack import PackStore
from pier.trajectory.model import Trajectory, read
from pier.trajectory.native.convert import find_sessions, trajectory_of
from pier.trajectory.rules import validate_file

ROOT = Path(__file__).parents[2]
PACKS = Path(os.environ.get("PIER_PACKS") or ROOT / ".cache" / "packs")
GREET = {"write": {"path": "/app/greeting.txt", "content": "Hello, pier!\n"}}
COUNT = "Count the files in /app and report the number."
SUB_AGENT = {
    "turns": [
        {
            "text": "I will ask a helper.",
            "call": {
                "name": "Agent",
                "arguments": {
                    "description": "count files",
                    "prompt": COUNT,
                    "subagent_type": "general-purpose",
                    "run_in_background": False,
                },
            },
        },
        GREET,
        {"finish": "Done."},
    ],
    "lanes": [
        {"when": {"message": COUNT}, "turns": [{"shell": "ls /app | wc -l"}, {"finish": "There are 0 files."}]},
    ],
}
COMPACTION = {
    "turns": [
        {"text": "I will look first.", "shell": "ls /app"},
        {"shell": "pwd", "usage": {"input": 990_000, "output": 100}},
        GREET,
        {"finish": "Done."},
    ],
    "side": "So far the directory was listed, and it is empty. The greeting is still to be written.",
}


def run(agent: str, script: dict[str, Any], folder: Path) -> Trajectory:
    """The trajectory of one trial of the hello task, after both it and the trial were found good."""
    spec = pack_spec(agent)
    if spec is None or PackStore(PACKS).find(spec) is None:
        pytest.skip(f"the pack of {agent} is not built: .ci/packs {agent}")
    (folder / "script.json").write_text(json.dumps(script))
    command = [sys.executable, "-m", "pier", "run", "-p", str(ROOT / "examples/tasks/hello"), "-a", agent]
    command += [
        "--image",
        "host",
        "-m",
        f"script:{folder / 'script.json'}",
        "--jobs-dir",
        str(folder / "jobs"),
        "--job-name",
        "job",
    ]
    environ = {**os.environ, "PIER_PACKS": str(PACKS)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600)
    results = list(folder.glob("jobs/job/*/result.json"))
    assert results, done.stdout + done.stderr
    assert json.loads(results[0].read_text())["verifier_result"]["rewards"] == {"reward": 1.0}
    place = results[0].parent / "agent" / "trajectory.json"
    assert validate_file(place) == []
    return read(place)


def native(agent: str, folder: Path) -> Trajectory:
    """The same trial as the agent's own log tells it."""
    (place,) = folder.glob("jobs/job/*/agent")
    (session,) = find_sessions(place, agent)
    return trajectory_of(session)


def work(trajectory: Trajectory) -> list[tuple[str, list[tuple[str, dict[str, Any]]], int | None]]:
    """What an agent did, step by step: its words, its calls, its tokens."""
    return [
        (
            step.text.strip(),
            [(call.function_name, call.arguments) for call in step.tool_calls or ()],
            step.metrics.prompt_tokens if step.metrics else None,
        )
        for step in trajectory.agent_steps
    ]


def breakdown(trajectory: Trajectory) -> dict[str, int]:
    extra = (trajectory.final_metrics.extra if trajectory.final_metrics else None) or {}
    return {kind: part["calls"] for kind, part in extra["breakdown"].items()}


def test_a_sub_agent_of_claude_code_is_embedded(tmp_path: Path) -> None:
    trajectory = run("claude-code", SUB_AGENT, tmp_path)
    assert breakdown(trajectory) == {"main": 3, "sub_agent": 2}
    inner = (trajectory.subagent_trajectories or [])[0]
    assert inner.steps[-1].message == "There are 0 files."
    observed = trajectory.agent_steps[0].observation
    assert observed is not None
    refs = observed.results[0].subagent_trajectory_ref or []
    assert [ref.trajectory_id for ref in refs] == [inner.trajectory_id]
    own = native("claude-code", tmp_path)
    assert work(own) == work(trajectory)
    assert [work(each) for each in own.subagent_trajectories or []] == [work(inner)]


@pytest.mark.parametrize("agent", ["claude-code", "codex", "kimi"])
def test_work_goes_on_after_a_compaction(agent: str, tmp_path: Path) -> None:
    trajectory = run(agent, COMPACTION, tmp_path)
    counted = breakdown(trajectory)
    assert counted["main"] == 4
    assert counted["side"] >= 1
    assert set(counted) == {"main", "side"}
    extra = (trajectory.final_metrics.extra if trajectory.final_metrics else None) or {}
    assert (extra["summarization_count"], extra["compacted"]) == (1, True)
    assert [step.message for step in trajectory.agent_steps] == ["I will look first.", "", "", "Done."]
    assert all(step.observation for step in trajectory.agent_steps if step.tool_calls)
    assert any((step.extra or {}).get("compaction") for step in trajectory.steps if step.source == "user")
    own = native(agent, tmp_path)
    assert work(own) == work(trajectory)
    assert ((own.final_metrics and own.final_metrics.extra) or {})["summarization_count"] == 1
