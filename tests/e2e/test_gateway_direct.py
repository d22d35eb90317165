"""`pier run --direct`: no gateway stands before the model, and the agent's own log makes the trajectory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pier.trajectory import model as trajectories
from tests.job_tasks import make_task, pier, rewards_of, trials_of

AGENT = """
from pier.agent.command import CommandAgent

class Logging(CommandAgent):
    name = "claude-code"
    dialect = "anthropic"
    options = ("command", "model")
"""
ROWS = [
    {"type": "user", "uuid": "u", "sessionId": "s", "version": "2.0", "timestamp": "2024-01-01T00:00:00.000Z",
     "message": {"role": "user", "content": "Do it."}},
    {"type": "assistant", "uuid": "a", "parentUuid": "u", "sessionId": "s", "version": "2.0",
     "timestamp": "2024-01-01T00:00:01.000Z",
     "message": {"id": "m", "role": "assistant", "model": "claude-x", "stop_reason": "end_turn",
                 "content": [{"type": "text", "text": "It is done."}],
                 "usage": {"input_tokens": 7, "output_tokens": 3}}},
]  # fmt: skip


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    make_task(tmp_path / "tasks" / "one")
    (tmp_path / "own_agent.py").write_text(AGENT)
    log = "\n".join(json.dumps(row) for row in ROWS)
    line = (
        f"mkdir -p /logs/agent/projects/p && printf '%s\\n' '{log}' > /logs/agent/projects/p/s.jsonl"
        ' && test -z "$ANTHROPIC_BASE_URL" && test "$OWN_KEY" = canary-of-mine && echo hi > /tmp/answer'
    )
    return ["run", "-p", "tasks", "-a", "own_agent:Logging", "--ak", f"command={line}", "--job-name", "j",
            "--ae", "OWN_KEY=${OWN_KEY}"]  # fmt: skip


def _variables(tmp_path: Path) -> dict[str, Any]:
    return {"PYTHONPATH": str(tmp_path), "OWN_KEY": "canary-of-mine"}


@pytest.mark.plain
@pytest.mark.parametrize("model", [[], ["-m", "claude-x"]])
def test_the_agents_own_log_makes_the_trajectory(tmp_path: Path, command: list[str], model: list[str]) -> None:
    pier(*command, *model, "--direct", cwd=tmp_path, **_variables(tmp_path))
    job = tmp_path / "jobs" / "j"
    assert rewards_of(job) == [1]
    (trial,) = trials_of(job)
    assert not (trial / "agent" / "recording.jsonl").exists()
    steps = trajectories.read(trial / "agent" / "trajectory.json").steps
    assert [(step.source, step.message) for step in steps] == [("user", "Do it."), ("agent", "It is done.")]
    used = json.loads((trial / "result.json").read_text())["agent_result"]
    assert (used["n_input_tokens"], used["n_output_tokens"]) == (7, 3)


@pytest.mark.plain
def test_what_direct_cannot_do_is_refused(tmp_path: Path, command: list[str]) -> None:
    for limit in ("--max-turns", "--job-max-turns"):
        refused = pier(*command, "--direct", limit, "1", cwd=tmp_path, code=2, **_variables(tmp_path))
        assert "budget" in refused.stderr
    assert "-m MODEL" in pier(*command, cwd=tmp_path, code=2, **_variables(tmp_path)).stderr


@pytest.mark.plain
def test_a_link_out_of_the_logs_is_not_followed(tmp_path: Path, command: list[str]) -> None:
    at = next(index for index, word in enumerate(command) if word.startswith("command="))
    make = "mkdir -p /logs/agent/projects/p && ln -s /etc/passwd /logs/agent/projects/p/s.jsonl; echo hi > /tmp/answer"
    changed = [*command[:at], f"command={make}", *command[at + 1 :]]
    pier(*changed, "--direct", cwd=tmp_path, **_variables(tmp_path))
    (trial,) = trials_of(tmp_path / "jobs" / "j")
    assert not (trial / "agent" / "trajectory.json").exists()
