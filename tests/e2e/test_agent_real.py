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

from pier.agent.pack import PackStore
from pier.agent.registry import AGENTS, pack_spec

ROOT = Path(__file__).parents[2]
PACKS = Path(os.environ.get("PIER_PACKS") or ROOT / ".cache" / "packs")
SCRIPT = ROOT / "examples" / "scripts" / "bug-fix.yaml"
TURNS = 5
IN_CI = ("claude-code", "codex", "gemini-cli", "opencode", "goose", "pi")
WITH_TITLE = ("opencode",)
"""Agents that ask for a title of the session beside their work."""


def chosen() -> list[str]:
    wanted = os.environ.get("PIER_TEST_AGENTS", "")
    if wanted == "all":
        return [name for name in AGENTS if pack_spec(name) is not None]
    return wanted.split(",") if wanted else list(IN_CI)


def need_pack(name: str) -> None:
    spec = pack_spec(name)
    if spec is None or PackStore(PACKS).find(spec) is None:
        pytest.skip(f"the pack of {name} is not built: .ci/packs {name}")


def run_trial(name: str, jobs: Path, *extra: str) -> dict[str, Any]:
    """Run one trial of the bug-fix task and give its result."""
    command = [sys.executable, "-m", "pier", "run", "-p", str(ROOT / "examples/tasks/bug-fix"), "-a", name]
    command += ["-m", f"script:{SCRIPT}", "--jobs-dir", str(jobs), "--job-name", "job", *extra]
    done = subprocess.run(
        command, env={**os.environ, "PIER_PACKS": str(PACKS)}, capture_output=True, text=True, timeout=600
    )
    results = list(jobs.glob("job/*/result.json"))
    assert results, done.stdout + done.stderr
    return {**json.loads(results[0].read_text()), "directory": results[0].parent}


@pytest.mark.parametrize("name", chosen())
def test_an_agent_fixes_the_bug_without_a_network(name: str, tmp_path: Path) -> None:
    need_pack(name)
    result = run_trial(name, tmp_path / "jobs")
    assert result["exception_info"] is None
    assert result["verifier_result"]["rewards"] == {"reward": 1.0}
    assert result["agent_info"]["name"] == name
    assert result["agent_result"]["n_agent_steps"] == TURNS + (name in WITH_TITLE)
    assert result["agent_result"]["n_input_tokens"] > 0
