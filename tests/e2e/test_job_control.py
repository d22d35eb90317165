"""Looking on, stopping and removing jobs that run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pier.job.view import JobView, TrialView
from tests.job_tasks import gate_mount, gated_task, make_task, pier, start_pier, trials_of, wait_for

pytestmark = pytest.mark.plain


def test_logs_follow_a_job_until_it_is_stopped_and_rm_refuses_it_until_then(tmp_path: Path) -> None:
    make_task(tmp_path / "tasks" / "a-quick")
    gated_task(tmp_path / "tasks" / "b-slow", tmp_path / "gate", "agent")
    job = tmp_path / "jobs" / "j"
    run = ("run", "-p", "tasks", "-n", "1", "--job-name", "j", *gate_mount(tmp_path / "gate"))
    with start_pier(*run, cwd=tmp_path) as runner:
        wait_for(lambda: list((tmp_path / "gate").glob("agent.*")), runner)
        view = JobView.open(job)
        assert view.owner and view.owner.pid == runner.pid and view.owner.here
        assert [row.state for row in view.trials] == ["done", "running"]
        slow = view.trials[1].name
        assert TrialView.open(job / slow).state == "running"
        refused = pier("job", "rm", "jobs/j", cwd=tmp_path, code=2).stderr
        assert f"process {runner.pid} " in refused and "pier job stop jobs/j" in refused and job.is_dir()
        with (
            start_pier("job", "logs", "-f", "jobs/j", cwd=tmp_path) as log,
            start_pier("job", "logs", "-f", "jobs/j", slow, "--json", cwd=tmp_path) as trial_log,
        ):
            assert log.stdout and trial_log.stdout
            assert "runs 2 of 2 trials" in log.stdout.readline()
            assert json.loads(trial_log.stdout.readline())["text"] == "phase prepare"
            stopped = json.loads(pier("job", "stop", "jobs/j", "--json", cwd=tmp_path).stdout)
            assert stopped == [{"directory": "jobs/j", "was_running": True}]
            assert log.stdout.read().rstrip().endswith("interrupted") and log.wait() == 0
            assert trial_log.wait() == 0
        assert runner.wait() == 130
    assert JobView.open(job).state == "interrupted"
    assert "not running" in pier("job", "stop", "jobs/j", cwd=tmp_path).stdout
    assert pier("job", "logs", "jobs/j", cwd=tmp_path).stdout.count("\n") == 3
    (tmp_path / "gate" / "go").touch()
    pier("job", "resume", "jobs/j", "-q", cwd=tmp_path)
    assert JobView.open(job).totals.mean.value == 1


def test_rm_removes_a_job_and_nothing_that_it_links_to(tmp_path: Path) -> None:
    gated_task(tmp_path / "tasks" / "slow", tmp_path / "gate", "agent")
    job = tmp_path / "jobs" / "j"
    run = ("run", "-p", "tasks", "--job-name", "j", *gate_mount(tmp_path / "gate"))
    with start_pier(*run, cwd=tmp_path) as runner:
        wait_for(lambda: list((tmp_path / "gate").glob("agent.*")), runner)
        (trials_of(job)[0] / "link").symlink_to(tmp_path / "tasks")
        half = tmp_path / "jobs" / ".x.0.removed"
        half.mkdir()
        assert pier("job", "rm", "--stop", "jobs/j", cwd=tmp_path).stdout == "removed jobs/j\n"
        assert runner.wait() == 130
    assert os.listdir(tmp_path / "jobs") == []
    assert "tasks is not a job" in pier("job", "rm", "tasks", cwd=tmp_path, code=2).stderr
    assert "jobs/j: no such directory" in pier("job", "rm", "jobs/j", cwd=tmp_path, code=2).stderr
    assert (tmp_path / "tasks" / "slow" / "task.toml").is_file()
