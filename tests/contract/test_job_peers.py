"""What pier writes, read by the peers themselves, and what they write, read by pier: Harbor and datacurve's pier."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pier.job.view import JobView
from pier.view.index import Index
from pier.view.library import Library
from pier.view.pages import Pages
from pier.view.render import Links, render
from tests.job_tasks import make_task, pier, trials_of
from tests.parts import need_parts

pytestmark = [pytest.mark.slow, pytest.mark.parts]
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
    read(model("job.lock", "TrialLock"), path / "lock.json")
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


HARBOR_ONLY = """
import json, sys
from pathlib import Path
from harbor.job_diff import load_source_trials
from harbor.models.job.config import SourceJobConfig
from harbor.upload import uploader
job, archive = Path(sys.argv[1]), Path(sys.argv[2])
source = SourceJobConfig(action="regrade", type="local", path=job)
rows = []
for trial in load_source_trials([(source, job)]):
    lock = uploader._read_trial_lock_for_upload(trial.trial_dir)
    uploader._create_trial_archive_file(trial.trial_dir, archive)
    ours = json.loads((trial.trial_dir / "result.json").read_text())
    assert lock == trial.lock
    rows.append({
        "digest": lock.task.digest,
        "mode": lock.verifier.environment_mode,
        "theirs": [trial.result.failure_cause, trial.result.reward_valid],
        "ours": [ours["failure_cause"], ours["reward_valid"]],
    })
print(json.dumps(rows))
"""


def python_of(peer: str) -> Path:
    """The interpreter of a peer's environment."""
    need_parts()
    try:
        subprocess.run([ROOT / ".ci" / "peers", peer], capture_output=True, text=True, timeout=900, check=True)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"{peer} cannot be installed here: {(str(error.stderr or error)).strip()[-200:]}")
    return ROOT / ".cache" / "peers" / peer / "bin" / "python"


def run_peer(python: Path, script: str, *arguments: str) -> Any:
    """What a script prints as JSON in a peer's environment."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([python, "-c", script, *arguments], capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_harbor_takes_trials_as_sources_and_for_upload(job: Path, tmp_path: Path) -> None:
    read = run_peer(python_of("harbor"), HARBOR_ONLY, str(job), str(tmp_path / "archive.tar.gz"))
    assert [row["theirs"] for row in read] == [row["ours"] for row in read]
    assert [row["ours"] for row in read] == [[None, True]] * 2 + [["verifier_failed", False]] * 2
    assert [row["mode"] for row in read] == ["shared"] * 4
    locked = json.loads((job / "lock.json").read_text())["trials"]
    assert sorted(row["digest"] for row in read) == sorted(row["task"]["digest"] for row in locked)


def test_harbors_lint_accepts_what_we_ship(tmp_path: Path) -> None:
    harbor = python_of("harbor").with_name("harbor")
    pier("task", "init", "new", cwd=tmp_path)
    tasks = [*sorted((ROOT / "examples" / "tasks").iterdir()), tmp_path / "new"]
    done = subprocess.run([harbor, "lint", "--json", *tasks], capture_output=True, text=True, timeout=300)
    found = {(row["rule"], Path(row["path"]).parent.name) for row in json.loads(done.stdout)}
    assert found == {("shared-verifier", "health-check")}, "one example shows the shared mode"


@pytest.mark.parametrize("peer", PACKAGES)
def test_a_job_is_read_by_the_models_and_the_viewer_of(peer: str, job: Path) -> None:
    read = run_peer(python_of(peer), READ, PACKAGES[peer], str(job))
    names = [trial.name for trial in trials_of(job)]
    assert read["agents"] == ["oracle"] and read["completed"] == 4 and len(read["locked"]) == 4
    assert [(row["name"], row["n_completed_trials"]) for row in read["jobs"]] == [("j", 4)]
    assert sorted(row["name"] for row in read["shown"]) == names
    assert [trial[0] for trial in read["trials"]] == names
    assert [trial[1] for trial in read["trials"]] == [{"reward": 1}] * 2 + [None] * 2
    assert [trial[2] for trial in read["trials"]] == [None] * 2 + ["RewardFileNotFoundError"] * 2


@pytest.mark.parametrize("peer", PACKAGES)
def test_a_job_that_was_run_by_a_peer_is_read(peer: str, tmp_path: Path) -> None:
    """Whole, then with a trial that never ended, a torn result, and no word of the job's end."""
    for name, more in {"good": {}, "bad": {"solve": "true"}, "silent": {"test": "true"}}.items():
        task = make_task(tmp_path / "tasks" / name, **more)
        (task / "environment" / "Dockerfile").write_text("FROM scratch\n")
        (task / "task.toml").write_text('schema_version = "1.1"\n')
    program = python_of(peer).with_name(PACKAGES[peer])
    flags = ["-a", "oracle", "-k", "2", "--job-name", "j"]
    env = {**os.environ, "PEER": PACKAGES[peer], "PYTHONPATH": str(ROOT), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    command = [
        program,
        "run",
        "-p",
        "tasks",
        *flags,
        "--environment-import-path",
        "tests.peer_environment:HostEnvironment",
    ]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    job = tmp_path / "jobs" / "j"
    view = JobView.open(job)
    assert (view.state, view.is_ours, view.n_trials, view.problems) == ("done", False, 6, ())
    rewards = {row.task: row.outcome.rewards for row in view.trials if row.outcome}
    assert rewards == {"good": {"reward": 1}, "bad": {"reward": 0}, "silent": None}
    theirs = json.loads((job / "result.json").read_text())["stats"]
    assert [group.key for group in view.groups] == list(theirs["evals"]) == ["oracle__tasks"]
    assert (view.totals.done, view.totals.errors) == (theirs["n_completed_trials"], {"task": 2})
    assert (view.totals.mean.value, view.groups[0].summary.pass_at_k) == (0.5, {1: 0.5, 2: 0.5})
    first, second, *_ = (job / row.name for row in view.trials)
    trial = view.trial(first.name)
    assert list(trial.phases) == ["environment_setup", "agent_setup", "agent_execution", "verifier"]
    assert first / "trial.log" in trial.files.logs and first / "artifacts" in trial.files.artifacts
    assert "4/6" in pier("job", "show", "jobs/j", cwd=tmp_path).stdout
    assert_viewer_shows(tmp_path / "jobs")
    (first / "result.json").unlink()
    (second / "result.json").write_bytes((second / "result.json").read_bytes()[:100])
    (job / "result.json").unlink()
    torn = JobView.open(job)
    assert torn.state == "unfinished" and [row.state for row in torn.trials[:3]] == ["unfinished", "broken", "done"]
    assert {row.task for row in torn.trials} == {"good", "bad", "silent"} and torn.n_trials == 6


def assert_viewer_shows(jobs: Path) -> None:
    """Every page of the viewer shows the job as it is."""
    library = Library.open(jobs)
    index = Index.open(library)
    index.refresh()
    pages = Pages(library, index)
    (listed,) = pages.get("/", {}).data["jobs"]
    assert (listed["name"], listed["mean"], listed["n_trials"], listed["errors"]) == ("j", 0.5, 6, {"task": 2})
    rows = pages.get("/jobs/j", {"view": "trials"}).data["trials"]
    standings = {"good": "passed", "bad": "failed", "silent": "error"}
    assert {row["task"]: row["standing"] for row in rows} == standings
    for row in rows[:3]:
        page = pages.get(f"/jobs/j/{row['name']}", {})
        assert "oracle" in page.data["content"]["missing"] and page.data["head"]["phases"]
        for tab in page.data["tabs"]:
            assert render(pages.get(f"/jobs/j/{row['name']}/{tab}", {}), Links())
    index.close()
