"""A trajectory is there while the agent still runs, and is left behind by a runner that is killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pier.trajectory import model as trajectories
from tests.job_tasks import make_task, pier, rewards_of, start_pier, wait_for

CALL = """
import json, os, pathlib, time, urllib.request
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
messages = [{"role": "user", "content": "say it"}]
for _ in range(2):
    body = {"model": os.environ["PIER_MODEL"], "messages": messages}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        message = json.load(answer)["choices"][0]["message"]
    messages += [message, {"role": "user", "content": "and again"}]
    while not pathlib.Path("/gate/go").exists():
        time.sleep(0.05)
pathlib.Path("/tmp/answer").write_text("hi")
"""


@pytest.mark.plain
def test_a_runner_that_is_killed_leaves_a_trajectory(tmp_path: Path) -> None:
    make_task(tmp_path / "tasks" / "one")
    gate = tmp_path / "gate"
    gate.mkdir()
    (gate / "agent.py").write_text(CALL)
    (tmp_path / "model.yaml").write_text("turns:\n  - text: the first\n  - text: the second\n")
    mounts = [{"type": "bind", "source": str(gate), "target": "/gate", "read_only": True}]
    command = ["run", "-p", "tasks", "-a", "command", "--ak", "command=python3 - < /gate/agent.py",
               "-m", "script:model.yaml", "--mounts", json.dumps(mounts), "--job-name", "j"]  # fmt: skip
    job = tmp_path / "jobs" / "j"
    with start_pier(*command, cwd=tmp_path) as child:
        (path,) = wait_for(lambda: list(job.glob("*/agent/trajectory.json")), child)
        child.kill()
        child.communicate(timeout=60)
    steps = trajectories.read(path).steps
    assert [step.source for step in steps] == ["user", "agent"] and steps[1].message == "the first"
    assert not (path.parent.parent / "result.json").exists()

    (gate / "go").touch()
    pier(*command, cwd=tmp_path)
    assert rewards_of(job) == [1]
    (whole,) = job.glob("*/agent/trajectory.json")
    assert [step.message for step in trajectories.read(whole).steps if step.source == "agent"] == [
        "the first",
        "the second",
    ]
    (kept,) = job.glob(".retries/*/agent/trajectory.json")
    assert len(trajectories.read(kept).steps) == 2
