"""`--direct` with real agents: they call a provider of their own through an allowlist, and their logs tell the rest.

Everything happens in a network of its own (`tests.world`), where a provider follows a script.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pier.trajectory import model as trajectories
from tests.agent_rig import PACKS, need_pack
from tests.agent_servers import KEY_FILE, PROVIDER
from tests.job_tasks import make_task, pier
from tests.world import in_world

URL = f"http://provider.test:{PROVIDER}"
OWN = 'model_provider = "own"\n[model_providers.own]\nname = "own"\nwire_api = "responses"\nenv_key = "OWN_KEY"\n'
MODEL = {"opencode": "own/own-model"}
PROVIDERS = {
    "own": {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{URL}/v1", "apiKey": "{env:OWN_KEY}"},
        "models": {"own-model": {"tool_call": True}},
    }
}
WAYS = {
    "claude-code": ["--ae", f"ANTHROPIC_BASE_URL={URL}", "--ae", "ANTHROPIC_API_KEY=${OWN_KEY}"],
    "codex": ["--ae", "OWN_KEY=${OWN_KEY}", "--ak", f'config_toml={OWN}base_url = "{URL}/v1"\n'],
    "gemini-cli": ["--ae", f"GOOGLE_GEMINI_BASE_URL={URL}", "--ae", "GEMINI_API_KEY=${OWN_KEY}"],
    "opencode": ["--ae", "OWN_KEY=${OWN_KEY}", "--ak", f"opencode_config={json.dumps({'provider': PROVIDERS})}"],
}
"""How each agent is told of its own provider: by variables, or in its configuration."""
RUN = """
import os, subprocess, sys
environ = {**os.environ, "OWN_KEY": open(os.environ["PIER_TEST_KEY_FILE"]).read()}
done = subprocess.run([sys.executable, "-m", "pier", *sys.argv[1:]], env=environ, capture_output=True, text=True)
print(done.stdout, done.stderr, traffic.seen())
"""


@pytest.mark.parametrize("name", WAYS)
def test_an_agent_calls_its_own_provider(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_pack(name)
    task = make_task(tmp_path / "task", test="test -e done.txt; echo $((! $?)) > /logs/verifier/reward.txt")
    (task / "task.toml").write_text((task / "task.toml").read_text() + 'workdir = "/app"\n')
    monkeypatch.setenv("PIER_PACKS", str(PACKS))
    monkeypatch.setenv(KEY_FILE, str(tmp_path / "key"))
    command = [
        "run",
        "-p",
        str(task),
        "--image",
        "host",
        "-a",
        name,
        "-m",
        MODEL.get(name, "own-model"),
        "--direct",
        *WAYS[name],
    ]
    command += ["--jobs-dir", str(tmp_path / "jobs"), "--job-name", "j"]
    done = in_world(RUN, tmp_path, *command, servers="tests.agent_servers:provider")
    results = list(tmp_path.glob("jobs/j/*/result.json"))
    assert results, done.stdout + done.stderr
    trial, result = results[0].parent, json.loads(results[0].read_text())
    assert result["verifier_result"]["rewards"] == {"reward": 1.0}, done.stdout
    assert result["exception_info"] is None
    assert not (trial / "agent" / "recording.jsonl").exists()
    steps = [step for step in trajectories.read(trial / "agent" / "trajectory.json").steps if step.source == "agent"]
    assert len(steps) == 2 and len(steps[0].tool_calls or ()) == 1 and "It is done." in steps[1].text
    assert result["agent_result"]["n_input_tokens"] > 0
    key = (tmp_path / "key").read_text()
    kept = [path for path in trial.rglob("*") if path.is_file() and key.encode() in path.read_bytes()]
    assert kept == []


@pytest.mark.parametrize("name", ["pi", "aider", "kimi", "cline", "copilot", "nop", "oracle"])
def test_agents_that_cannot_are_refused(name: str, tmp_path: Path) -> None:
    make_task(tmp_path / "task")
    refused = pier("run", "-p", "task", "-a", name, "-m", "m", "--direct", cwd=tmp_path, code=2)
    assert f"the agent {name} cannot be run with --direct" in refused.stderr
