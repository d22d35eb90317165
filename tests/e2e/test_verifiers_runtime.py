"""verifiers 0.4, unmodified, in a virtual environment of its own: its runtime contract and its agents in pier's
sandboxes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".cache" / "peers" / "verifiers" / "bin" / "python"


def test_its_agents_run_in_sandboxes_of_pier(pier_home: Path) -> None:
    if not (PYTHON.parents[1] / ".ready").is_file():
        pytest.skip("verifiers 0.4 is not installed: .ci/peers verifiers")
    peer = ROOT / "tests" / "verifiers_peer"
    path = f"{ROOT / 'src'}:{peer}"
    variables = {**os.environ, "PIER_HOME": str(pier_home), "PYTHONPATH": path, "NO_KEY": "x"}
    command = [str(PYTHON), str(peer / "in_pier.py")]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["run"] == [3, ["one", "two", "/app"]] and found["read"] == ["data", "data"]
    assert (found["missing"], found["large"]) == ("SandboxError", "SandboxError")
    assert (found["live"], found["killed"], found["log"], found["alive"]) == ("ping\n", 137, "up\n", True)
    assert found["reaches"] == 0 and "Error" in found["out"], "the host's server is reached, and nothing else"
    assert (found["errors"], found["reward"]) == ([], 1.0)
