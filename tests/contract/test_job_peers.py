"""What pier writes, read by the packages of the peers themselves: Harbor and datacurve's pier."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.job_tasks import make_task, pier, trials_of

ROOT = Path(__file__).parents[2]
PACKAGES = {"harbor": "harbor", "datacurve-pier": "pier"}

READ = """
import importlib, json, sys
from pathlib import Path
package, job = sys.argv[1], Path(sys.argv[2])

def model(module, name):
    return getattr(importlib.import_module(f"{package}.models.{module}"), name)

def read(kind, path):
    return kind.model_validate_json(path.read_text())

config = read(model("job.config", "JobConfig"), job / "config.json")
result = read(model("job.result", "JobResult"), job / "result.json")
lock = read(model("job.lock", "JobLock"), job / "lock.json")
trials = []
for path in sorted(p.parent for p in job.glob("*/result.json")):
    read(model("trial.config", "TrialConfig"), path / "config.json")
    trial = read(model("trial.result", "TrialResult"), path / "result.json")
    rewards = trial.verifier_result.rewards if trial.verifier_result else None
    failure = trial.exception_info.exception_type if trial.exception_info else None
    trials.append([trial.trial_name, rewards, failure])
from starlette.testclient import TestClient
viewer = TestClient(importlib.import_module(f"{package}.viewer.server").create_app(job.parent))
print(json.dumps({
    "agents": [agent.name for agent in config.agents],
    "locked": [trial.task.digest for trial in lock.trials],
    "completed": result.stats.n_completed_trials,
    "trials": trials,
    "jobs": viewer.get("/api/jobs").json()["items"],
    "shown": viewer.get(f"/api/jobs/{job.name}/trials").json()["items"],
}))
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("peers")
    make_task(base / "tasks" / "good")
    make_task(base / "tasks" / "silent", test="true")
    home = str(base / "home")
    pier("run", "-p", "tasks", "-a", "oracle", "-k", "2", "--job-name", "j", cwd=base, code=1, PIER_HOME=home)
    return base / "jobs" / "j"


@pytest.mark.parametrize("peer", PACKAGES)
def test_a_job_is_read_by_the_models_and_the_viewer_of(peer: str, job: Path) -> None:
    try:
        subprocess.run([ROOT / ".ci" / "peers", peer], capture_output=True, text=True, timeout=900, check=True)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"{peer} cannot be installed here: {(str(error.stderr or error)).strip()[-200:]}")
    python = ROOT / ".cache" / "peers" / peer / "bin" / "python"
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [python, "-c", READ, PACKAGES[peer], str(job)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    read = json.loads(done.stdout)
    names = [trial.name for trial in trials_of(job)]
    assert read["agents"] == ["oracle"] and read["completed"] == 4 and len(read["locked"]) == 4
    assert [(row["name"], row["n_completed_trials"]) for row in read["jobs"]] == [("j", 4)]
    assert sorted(row["name"] for row in read["shown"]) == names
    assert [trial[0] for trial in read["trials"]] == names
    assert [trial[1] for trial in read["trials"]] == [{"reward": 1}] * 2 + [None] * 2
    assert [trial[2] for trial in read["trials"]] == [None] * 2 + ["RewardFileNotFoundError"] * 2
