"""`--install-in-sandbox`: an agent comes from a registry into the sandbox itself, and the network is closed after that.

Everything happens in a network of its own (`tests.world`), where small agents of the tests' own are published.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.agent_servers import NPM, PYPI
from tests.job_tasks import gate_mount, make_task, pier
from tests.world import in_world

AGENTS = """
from pier.agent.contract import PACK_PATH, AgentRun, Launch, PackSpec
from pier.agent.packed import PackedAgent

class Tiny(PackedAgent):
    dialect = "chat"

    def launch(self, run: AgentRun) -> Launch:
        env = {"OPENAI_BASE_URL": f"{run.endpoint.url}/v1", "OPENAI_API_KEY": run.endpoint.key}
        return Launch([*self.argv, run.instruction], env)

class FromNpm(Tiny):
    name = "from-npm"
    pack = PackSpec("npm", "tiny-agent")
    argv = (f"{PACK_PATH}/bin/node", f"{PACK_PATH}/node_modules/tiny-agent/cli.js")

class FromPypi(Tiny):
    name = "from-pypi"
    pack = PackSpec("pypi", "tiny-agent", "1.4.2")
    argv = (f"{PACK_PATH}/python/bin/python3", "-m", "tiny_agent")
"""
RUN = """
import subprocess, sys
done = subprocess.run([sys.executable, "-m", "pier", *sys.argv[1:]], capture_output=True, text=True)
print(done.stdout, done.stderr, traffic.seen())
"""


def run(tmp_path: Path, kind: str, *extra: str, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], Path, str]:
    """One trial in a world with registries: its result, its directory and what was said."""
    check = "test -e done; echo $((! $?)) > /logs/verifier/reward.txt"
    task = make_task(tmp_path / "task", test=check)
    (task / "task.toml").write_text((task / "task.toml").read_text() + 'workdir = "/app"\n')
    (tmp_path / "install_agents.py").write_text(AGENTS)
    (tmp_path / "script.json").write_text(json.dumps([{"text": "All is well."}]))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    command = ["run", "-p", str(task), "-a", f"install_agents:{kind}", "-m", f"script:{tmp_path / 'script.json'}"]
    command += [
        "--image",
        "host",
        "--jobs-dir",
        str(tmp_path / "jobs"),
        "--job-name",
        "j",
        "--install-in-sandbox",
        *extra,
    ]
    done = in_world(RUN, tmp_path, *command, servers="tests.agent_servers:registries")
    results = list(tmp_path.glob("jobs/j/*/result.json"))
    assert results, done.stdout + done.stderr
    return json.loads(results[0].read_text()), results[0].parent, done.stdout


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("FromNpm", {"npm_config_registry": f"http://npm.test:{NPM}"}),
        pytest.param(
            "FromPypi",
            {"PIP_INDEX_URL": f"http://pypi.test:{PYPI}/simple", "PIP_TRUSTED_HOST": "pypi.test"},
            marks=pytest.mark.plain,
        ),
    ],
)
def test_an_agent_is_installed_and_the_network_closed(
    kind: str, settings: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "FromNpm" and shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    extra = [word for key, value in settings.items() for word in ("--ae", f"{key}={value}")]
    result, trial, told = run(tmp_path, kind, *extra, monkeypatch=monkeypatch)
    assert result["exception_info"] is None, told
    assert result["verifier_result"]["rewards"] == {"reward": 1.0}
    assert result["agent_info"]["version"] == "1.4.2"
    said = next((trial / "agent").glob("from-*.txt")).read_text()
    assert "All is well." in said and "closed" in said
    assert (trial / "agent" / "trajectory.json").exists()
    assert result["pier"]["phases"]["setup"] > 0


def test_a_failed_install_is_told_and_not_graded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ["--ae", f"PIP_INDEX_URL=http://pypi.test:{PYPI}/nothing", "--ae", "PIP_TRUSTED_HOST=pypi.test"]
    result, _, _ = run(tmp_path, "FromPypi", *settings, "--max-retries", "0", monkeypatch=monkeypatch)
    error = result["exception_info"]
    assert (error["code"], error["blame"]) == ("agent_install", "infra") and "tiny-agent" in error["exception_message"]
    assert result["verifier_result"] is None


@pytest.mark.plain
def test_installers_see_no_keys_but_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_task(tmp_path / "task")
    (tmp_path / "install_agents.py").write_text(AGENTS)
    (tmp_path / "script.json").write_text(json.dumps([{"text": "All is well."}]))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    gate = tmp_path / "gate"
    gate.mkdir()
    (gate / "npm").write_text("#!/bin/sh\nenv\nexit 1\n")
    (gate / "npm").chmod(0o755)
    given = (f"PATH=/gate:{os.defpath}", "OPENAI_API_KEY=sk-canary", "NPM_TOKEN=npm-canary", "COLOUR=blue")
    command = ["run", "-p", "task", "-a", "install_agents:FromNpm", "-m", f"script:{tmp_path / 'script.json'}"]
    command += ["--job-name", "j", "--max-retries", "0", "--install-in-sandbox", *gate_mount(gate)]
    pier(*command, *(word for each in given for word in ("--ae", each)), cwd=tmp_path, code=1)
    (seen,) = tmp_path.glob("jobs/j/*/agent/install.txt")
    assert "COLOUR=blue" in seen.read_text() and "NPM_TOKEN=" in seen.read_text()
    assert "OPENAI_API_KEY" not in seen.read_text()


def test_agents_from_no_registry_are_refused(tmp_path: Path) -> None:
    make_task(tmp_path / "task")
    refused = pier("run", "-p", "task", "-a", "nop", "--install-in-sandbox", cwd=tmp_path, code=2)
    assert "nothing to install" in refused.stderr
