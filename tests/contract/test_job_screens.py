"""What a person reads of a job of good, bad and broken trials: each screen says what happened and what to type next."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.job_tasks import make_task, pier, trials_of


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tasks = tmp_path / "tasks"
    (tmp_path / "docker").mkdir()
    known = {"auths": {"127.0.0.1:1": {"auth": "dTpw"}}}  # a registry that the user has credentials for may be anywhere
    (tmp_path / "docker" / "config.json").write_text(json.dumps(known))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    make_task(tasks / "passing")
    make_task(tasks / "failing", solve="true")
    make_task(tasks / "crashing-verifier", test="echo boom; exit 3")
    table = make_task(tasks / "no-image") / "task.toml"
    table.write_text(table.read_text() + '[verifier.environment]\ndocker_image = "127.0.0.1:1/none:1"\n')
    pier("run", "-p", str(tasks), "-a", "oracle", "-k", "2", "--job-name", "mixed", cwd=tmp_path, code=1)
    return tmp_path / "jobs" / "mixed"


def test_every_screen_can_be_read(job: Path, tmp_path: Path) -> None:
    def shown(*args: str) -> list[str]:
        return pier(*args, cwd=tmp_path).stdout.splitlines()

    report = shown("job", "show", "jobs/mixed")
    assert report[1].split()[:4] == ["oracle", "-", "tasks", "4/8"]
    (image,) = [line for line in report if "ImageError" in line]
    assert image.startswith("2 × ImageError (blame: infra), e.g. no-image__") and "tried: pier's store (" in image
    assert report[-1] == "next:  pier job retry jobs/mixed --only infra"
    rows = shown("job", "show", "jobs/mixed", "--trials")[:8]
    places = {line.index(line.split()[1]) for line in rows}
    assert len(places) == 1, rows
    assert shown("job", "list")[1].split()[:4] == ["mixed", "done", "8/8", "4"]
    assert json.loads("\n".join(shown("job", "show", "jobs/mixed", "--json")))["n_total_trials"] == 8
    named = {trial.name.partition("__")[0]: f"jobs/mixed/{trial.name}" for trial in trials_of(job)}
    assert "reward   1.0" in shown("trial", "show", named["passing"])
    failing = shown("trial", "show", named["failing"])
    assert "reward   0.0" in failing and f"  try    less {named['failing']}/verifier/test-stdout.txt" in failing
    missing = shown("trial", "show", named["no-image"])
    start = next(number for number, line in enumerate(missing) if line.endswith("tried:"))
    assert [line.split()[:2] for line in missing[start + 1 : start + 4]] == [
        ["-", "pier's"],
        ["-", "Docker"],
        ["-", "registry:"],
    ]
    assert json.loads("\n".join(shown("trial", "show", named["failing"], "--json")))["task_name"] == "failing"


def test_a_wrong_directory_is_told_with_the_right_command(job: Path, tmp_path: Path) -> None:
    trial = f"jobs/mixed/{trials_of(job)[0].name}"
    for args, words, hint in (
        (("job", "show", "jobs/other"), "jobs/other: no such directory", "pier job list"),
        (("job", "resume", trial), f"{trial} is a trial, not a job", f"pier trial show {trial}"),
        (("trial", "show", "jobs/mixed"), "jobs/mixed is a job, not a trial", "pier job show jobs/mixed --trials"),
    ):
        told = pier(*args, cwd=tmp_path, code=2).stderr
        assert words in told and f"hint: {hint}" in told
