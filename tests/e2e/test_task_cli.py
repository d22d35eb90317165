"""`pier task` and `pier trial` as a person types them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trial_runs import PASS, TOML, write_task


def pier(*args: object, code: int = 0, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pier", *map(str, args)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=os.environ,
        timeout=600,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.plain
def test_a_new_task_is_proved(tmp_path: Path) -> None:
    said = pier("task", "init", "mine", cwd=tmp_path)
    assert "pier task check --run --image host mine" in said
    said = pier("task", "check", "--run", "--image", "host", "-k", "2", "-o", tmp_path / "runs", "mine", cwd=tmp_path)
    assert 'ok      local/mine oracle: {"reward": 1.0}, {"reward": 1.0}' in said
    assert "ok      local/mine nop" in said
    shown = pier("trial", "show", tmp_path / "runs/1-mine/oracle-2")
    assert "reward   1.0" in shown
    result = json.loads(pier("trial", "show", "--json", tmp_path / "runs/1-mine/nop-1"))
    assert result["verifier_result"]["rewards"] == {"reward": 0.0}
    assert "not empty" in pier("task", "init", "mine", cwd=tmp_path, code=2)


def test_tasks_that_prove_nothing_fail(tmp_path: Path) -> None:
    flaky = "#!/bin/bash\necho $((RANDOM % 1000000)).$RANDOM > /logs/verifier/reward.txt\n"
    write_task(tmp_path / "set/flaky", test=flaky, environment__Dockerfile="FROM x")
    free = "#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n"
    write_task(tmp_path / "set/free", test=free, environment__Dockerfile="FROM x")
    write_task(tmp_path / "set/hard", solve="true", environment__Dockerfile="FROM x")
    said = pier("task", "check", "--run", "--image", "host", "-k", "3", "--json", tmp_path / "set", code=1)
    runs = {(row["task"], row["agent"]): row for row in json.loads(said)["runs"]}
    assert runs["flaky", "oracle"]["flaky"] and not runs["flaky", "oracle"]["ok"]
    assert runs["free", "oracle"]["ok"] and not runs["free", "nop"]["ok"]
    assert not runs["hard", "oracle"]["ok"] and runs["hard", "nop"]["ok"]


def test_check_without_running(tmp_path: Path) -> None:
    write_task(tmp_path / "good", environment__Dockerfile="FROM x")
    assert "errors: 0, warnings: 0" in pier("task", "check", tmp_path / "good")
    write_task(tmp_path / "typo", toml=TOML + "memmory_mb = 5\n", environment__Dockerfile="FROM x")
    assert "did you mean environment.memory_mb?" in pier("task", "check", tmp_path / "typo")
    pier("task", "check", "--strict", tmp_path / "typo", code=1)
    write_task(tmp_path / "bad", test=PASS.replace("reward.txt", "rewards.txt"))
    assert "rewards.txt" in pier("task", "check", tmp_path / "bad", code=1)
    write_task(tmp_path / "a", toml=TOML + 'docker_image = "host"\n')
    write_task(tmp_path / "b", environment__Dockerfile="FROM x\nFROM --platform=linux/amd64 host AS h\n")
    write_task(tmp_path / "c", environment__Dockerfile="FROM x\n", tests__Dockerfile="FROM host\n")
    for name in "abc":
        assert "run it with --image host" in pier("task", "check", tmp_path / name, code=1)
    assert "no such task" in pier("task", "check", tmp_path / "none", code=2)


CLONE = """\
FROM host
WORKDIR /app
RUN git init -q && git config user.name a && git config user.email a@b && echo bug > code.py && git add . \\
    && git commit -qm base && echo good > code.py && git commit -qam 'Fix the bug' && git reset -q --hard HEAD~1
"""


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_later_commits_of_a_tasks_repository_are_told(tmp_path: Path) -> None:
    write_task(tmp_path / "leaky", environment__Dockerfile="FROM x")
    build(tmp_path / "images", "leaky", CLONE)
    said = pier("task", "check", "--run", "--image", "leaky", tmp_path / "leaky")
    assert "/app/.git: holds commits that are not ancestors of HEAD (0 in branches and tags, 1 in" in said
    assert "Fix the bug" in said
    strict = json.loads(
        pier("task", "check", "--run", "--image", "leaky", "--strict", "--json", tmp_path / "leaky", code=1)
    )
    assert not strict["ok"] and all(row["ok"] for row in strict["runs"])
    assert [row["level"] for row in strict["problems"]] == ["warning"]
    anew = " && rm -rf .git && git init -q && git add -A && git -c user.name=a -c user.email=a@b commit -qm base\n"
    build(tmp_path / "images", "sound", CLONE.rstrip() + anew)
    assert "ancestors" not in pier("task", "check", "--run", "--image", "sound", "--strict", tmp_path / "leaky")


def build(context: Path, name: str, dockerfile: str) -> None:
    """Build an image into pier's own store, as a user does."""
    context.mkdir(exist_ok=True)
    (context / "Dockerfile").write_text(dockerfile)
    pier("image", "build", context, "--tag", name)


SERVICES = """\
services:
  main: {image: x, environment: {KEY: "${KEY:?}"}, cpus: "${COUNT}", ports: ["80:80"]}
  side: {image: x}
"""


def test_check_reads_compose_files(tmp_path: Path) -> None:
    toml = TOML + 'env = {KEY = "${A_KEY_THAT_NOBODY_HAS}", COUNT = "${A_COUNT_THAT_NOBODY_HAS}"}\n'
    asked = "[[verifier.collect]]\nservice = 'side'\ncommand = 'true'\n"
    named = {"environment__docker-compose.yaml": SERVICES, "environment__Dockerfile": "FROM x\n"}
    write_task(tmp_path / "good", toml=toml + asked, **named)
    said = pier("task", "check", tmp_path / "good")
    assert "errors: 0" in said and "services.main.ports: not published" in said
    write_task(tmp_path / "hook", toml=toml + asked.replace("side", "nobody"), **named)
    assert "task.toml: verifier.collect: unknown service 'nobody'" in pier("task", "check", tmp_path / "hook", code=1)
    named["environment__docker-compose.yaml"] = SERVICES + "  far: {image: x, privileged: true, cap_add: [ALL]}\n"
    write_task(tmp_path / "bad", toml=toml, **named)
    rows = json.loads(pier("task", "check", "--json", tmp_path / "bad", code=1))["problems"]
    (row,) = (row for row in rows if row["level"] == "error")
    assert row["where"].endswith("environment/docker-compose.yaml: services.far.privileged")
    assert row["message"] == "is not supported, and neither are its neighbours cap_add"


def test_list_and_show(tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        write_task(tmp_path / "set" / name)
    rows = [json.loads(line) for line in pier("task", "list", "--json", tmp_path / "set").splitlines()]
    assert [row["name"] for row in rows] == ["one", "three", "two"]
    assert pier("task", "list", "-x", "t*", tmp_path / "set").startswith("one  sha256:")
    assert "Do it." in pier("task", "show", tmp_path / "set/one")
    assert (
        json.loads(pier("task", "show", "--json", tmp_path / "set/one"))["config"]["environment"]["workdir"] == "/app"
    )
    assert "holds 3 tasks" in pier("task", "show", tmp_path / "set", code=2)
    assert "did not finish" in pier("trial", "show", tmp_path, code=2)


def test_many_findings_are_grouped_by_rule(tmp_path: Path) -> None:
    for number in range(45):
        write_task(tmp_path / "set" / f"t{number}", solve="", test="", **{"tests__test.sh": PASS})
        (tmp_path / "set" / f"t{number}" / "solution" / "solve.sh").unlink()
    said = pier("task", "check", tmp_path / "set", code=1)
    assert "warning: no-solution: 45" in said and "... and 42 more" in said
    assert len(said.splitlines()) < 20
    assert len(pier("task", "check", "--all", tmp_path / "set", code=1).splitlines()) > 45
    rows = json.loads(pier("task", "check", "--json", tmp_path / "set", code=1))["problems"]
    assert sum(row["rule"] == "no-solution" for row in rows) == 45
