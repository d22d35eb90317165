"""The published page on `CliAgentEnv`: its code blocks run with the import line changed and nothing else, on the
local backend and on a Docker engine, with OpenAI's own client inside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine import engine, missing
from tests.python_image import NAMES, import_layer, pack_layer, python_layer
from tests.rollout_pages import AGENT, BASIC, HOOKS, IMAGES, UPLOAD

REST = """
def load_environment():
    dataset = vf.Environment.make_dataset([{"question": "Task 1", "task": "first"}])
    return %s(run_command=%r, dataset=dataset, rubric=vf.Rubric(lambda **kw: 1.0))
"""


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("python")
    return pack_layer(python_layer(place, {"app/agent.py": AGENT}), place / "python.tar")


@pytest.fixture(scope="module", params=["local", "docker"])
def machine(request: pytest.FixtureRequest, archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The variables and the backend of a machine that has the page's images."""
    home = tmp_path_factory.mktemp("home") / "pier"
    variables = {**os.environ, "PIER_HOME": str(home)}
    if request.param == "local":
        import_layer(archive, home)
        yield "local", variables
        return
    if (why := missing()) is not None:
        pytest.skip(why)
    with engine() as docker:
        docker.docker("import", "--change", "ENV PATH=/usr/local/bin:/usr/bin:/bin", str(archive), NAMES[0])
        for name in NAMES[1:]:
            docker.docker("tag", NAMES[0], name)
        yield "docker", {**variables, "DOCKER_HOST": docker.url}


def roll_out(machine: Any, directory: Path, code: str, *more: str) -> list[dict[str, Any]]:
    """What `pier rollout` gives for an environment; its model says one word."""
    backend, variables = machine
    (directory / "page_env.py").write_text(code)
    (directory / "model.yaml").write_text("turns:\n  - text: reversed\n")
    (directory / "agent_code").mkdir(exist_ok=True)
    (directory / "agent_code" / "main.py").write_text(AGENT)
    (directory / "agent_code" / "requirements.txt").write_text("# nothing else\n")
    command = [sys.executable, "-m", "pier", "rollout", "page_env", "-m", "script:model.yaml", "-e", backend, "--json"]
    command += ["--state-columns", "agent_stdout,agent_stderr,rollout_id,agent_exit_code", *more]
    done = subprocess.run(command, cwd=directory, env=variables, capture_output=True, text=True, timeout=280)
    assert done.stdout, done.stderr
    rows = json.loads(done.stdout)["outputs"]
    assert not [row["error"] for row in rows if row["error"]], rows
    return rows


def test_the_basic_agent(machine: Any, tmp_path: Path) -> None:
    rows = roll_out(machine, tmp_path, BASIC)
    assert [row["reward"] for row in rows] == [1.0, 1.0]
    assert [row["prompt"][0]["content"] for row in rows] == [
        "Write a function to reverse a string",
        "Debug this code: print('hello'",
    ]
    assert [row["agent_stdout"] for row in rows] == ["reversed\n"] * 2
    assert [row["stop_condition"] for row in rows] == ["agent_completed"] * 2


def test_uploaded_assets_and_images_by_task(machine: Any, tmp_path: Path) -> None:
    (row,) = roll_out(machine, tmp_path, UPLOAD)
    assert row["reward"] == 1.0 and row["agent_stdout"] == "reversed\n"
    assert [row["reward"] for row in roll_out(machine, tmp_path, IMAGES)] == [1.0, 1.0]


def test_the_hooks(machine: Any, tmp_path: Path) -> None:
    code = HOOKS + REST % ("CustomEnv", "echo $CUSTOM_VAR $TASK_ID $OPENAI_MODEL; python /app/agent.py")
    (row,) = roll_out(machine, tmp_path, code)
    assert row["agent_stdout"] == "value first script:model.yaml\nreversed\n"
    code = HOOKS + REST % ("ArtifactEnv", "python /app/agent.py > /app/output.json")
    (row,) = roll_out(machine, tmp_path, code, "--state-columns", "agent_output")
    assert row["agent_output"] == "reversed\n"
