"""Real agents, from packs, in sandboxes without a network: one script drives each of them to fix the bug-fix task.

Packs are built by `.ci/packs`, not by the tests; an agent whose pack is not there is skipped with that as the reason.
`PIER_TEST_AGENTS` picks some agents by their names, with commas.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pier.agent.contract import AGENTS, find_agent
from pier.record import reader
from pier.trajectory.model import Trajectory, read
from pier.trajectory.native.convert import READERS, find_sessions, trajectory_of
from pier.trajectory.rules import validate_file
from pier.wire.dialects import DIALECTS
from pier.wire.headers import passed_headers
from tests.agent_rig import FOUR, PACKS, ROOT, need_pack
from tests.busybox import add_program, add_python, busybox_image
from tests.engine import Engine, engine, missing

SCRIPT = ROOT / "examples" / "scripts" / "bug-fix.yaml"
TASK = ROOT / "examples" / "tasks" / "bug-fix"
HARBOR = ROOT / ".cache" / "peers" / "harbor" / "bin" / "python"
TERMINUS = "terminus-2"
EXAMPLE = "continue_cli:Continue"
"""The agent of the guide on adding one."""
sys.path.append(str(ROOT / "examples" / "agents"))
CALLS = 4
ENDS_BY_CALL = ("mini-swe-agent", "openhands", EXAMPLE)
"""Agents that end by calling a tool, so that their last turn has a call too."""
INPUT, OUTPUT = 1000, 10
"""The tokens of each turn; turn `n` uses `n` times as many, so that no turn can pass for another."""

VALIDATE = """
import sys
from pathlib import Path
from harbor.utils.trajectory_validator import TrajectoryValidator
for path in sys.argv[1:]:
    validator = TrajectoryValidator()
    validator.validate(Path(path))
    print(path, validator.get_errors())
"""

written: list[Path] = []
"""The trajectories of this module's trials."""


def chosen() -> list[str]:
    wanted = os.environ.get("PIER_TEST_AGENTS", "")
    return wanted.split(",") if wanted else [*(name for name in AGENTS if find_agent(name).dialect), EXAMPLE]


def need_agent(name: str) -> None:
    if name != TERMINUS:
        need_pack(name)
    elif not HARBOR.exists():
        pytest.skip("harbor is not installed: .ci/peers harbor")
    elif shutil.which("tmux") is None:
        pytest.skip("tmux is not installed, and Terminus types into it")


def run_trial(name: str, jobs: Path, script: Path, *extra: str, task: Path = TASK) -> dict[str, Any]:
    """Run one trial and give its result."""
    python = str(HARBOR) if name == TERMINUS else sys.executable
    command = [python, "-m", "pier", "run", "-p", str(task), "-a", name]
    command += [] if "--env" in extra else ["--image", "host"]
    command += ["-m", f"script:{script}", "--jobs-dir", str(jobs), "--job-name", "job", *extra]
    path = ROOT / ("src" if name == TERMINUS else "examples/agents")
    environ = {**os.environ, "PIER_PACKS": str(PACKS), "PYTHONPATH": str(path)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600)
    results = list(jobs.glob("job/*/result.json"))
    assert results, done.stdout + done.stderr
    return {**json.loads(results[0].read_text()), "directory": results[0].parent}


def script_for(name: str, directory: Path) -> tuple[Path, int]:
    """The script with a number of tokens for each turn, and its number of turns. Aider works in one turn and by edits
    alone, so it gets the same edits in one; its tokens are those of the text."""
    turns = yaml.safe_load(SCRIPT.read_text())["turns"]
    if name == "aider":
        edits = [turn["edit"] for turn in turns if "edit" in turn]
        actions = [{"edit": {**edit, "path": edit["path"].removeprefix("/app/")}} for edit in edits]
        turns = [{"text": "Both files need a change.", "actions": actions}]
    for n, turn in enumerate(turns, 1):
        turn["usage"] = {"input": n * INPUT, "output": n * OUTPUT}
    path = directory / "script.yaml"
    path.write_text(yaml.safe_dump({"turns": turns}))
    return path, len(turns)


@pytest.mark.parametrize("name", chosen())
def test_an_agent_fixes_the_bug_without_a_network(name: str, tmp_path: Path) -> None:
    need_agent(name)
    script, turns = script_for(name, tmp_path)
    check(name, run_trial(name, tmp_path / "jobs", script), turns)


def check(name: str, result: dict[str, Any], turns: int) -> None:
    """The bug is fixed, and the trajectory tells all of it: turns, tokens and calls, as the agent's own log does."""
    assert result["exception_info"] is None
    assert result["verifier_result"]["rewards"] == {"reward": 1.0}
    assert result["agent_info"]["name"] == find_agent(name).name and result["agent_info"]["version"]
    place = result["directory"] / "agent" / "trajectory.json"
    assert validate_file(place) == []
    for call in reader.read(place.parent).calls:
        _, dropped = passed_headers(DIALECTS[call.dialect], call.headers.items())
        assert set(dropped) <= {"accept-language", "sec-fetch-mode"}, "a provider gets what the agent means to send"
    written.append(place)
    wire = read(place)
    numbers = [*range(1, turns + 1), *([turns] if name == TERMINUS else [])]
    assert sum(step.llm_call_count or 0 for step in wire.agent_steps) == len(numbers)
    used = [step.metrics for step in wire.agent_steps if step.metrics]
    if name != "aider":
        assert [metrics.prompt_tokens for metrics in used] == [n * INPUT for n in numbers]
        assert [metrics.completion_tokens for metrics in used] == [n * OUTPUT for n in numbers]
    calls = 0 if name in ("aider", TERMINUS) else CALLS + (name in ENDS_BY_CALL)
    assert len(calls_of(wire)) == calls
    if name in READERS:
        (session,) = find_sessions(result["directory"] / "agent", name)
        agree(wire, trajectory_of(session))


def calls_of(trajectory: Trajectory) -> list[tuple[str, dict[str, Any]]]:
    return [(call.function_name, call.arguments) for step in trajectory.agent_steps for call in step.tool_calls or ()]


def agree(wire: Trajectory, native: Trajectory) -> None:
    """What the gateway saw and what the agent wrote down are the same run."""
    assert calls_of(wire) == calls_of(native)
    for one, other in zip(wire.agent_steps, native.agent_steps, strict=True):
        assert one.text.strip() == other.text.strip()
        assert one.metrics is not None and other.metrics is not None
        assert one.metrics.prompt_tokens == other.metrics.prompt_tokens
        assert one.metrics.completion_tokens == other.metrics.completion_tokens


@pytest.fixture(scope="module")
def docker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine with one image: busybox, and this machine's bash and Python with what they need."""
    layer = busybox_image(tmp_path_factory.mktemp("image")).layers[0]
    add_program(layer, "/bin/bash")
    add_python(layer)
    packed = subprocess.run(["tar", "-C", layer, "-c", "."], capture_output=True, check=True).stdout
    with engine() as running:
        running.docker("import", "-", "test/python", stdin=packed)
        yield running
        assert running.containers() == []


@pytest.mark.docker
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize("name", FOUR)
def test_an_agent_fixes_the_bug_in_a_container_without_a_network(
    name: str, docker: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_agent(name)
    monkeypatch.setenv("DOCKER_HOST", docker.url)
    task = tmp_path / "bug-fix"
    shutil.copytree(TASK, task)
    (task / "environment" / "Dockerfile").write_text("FROM test/python\nWORKDIR /app\nCOPY . /app/\n")
    script, turns = script_for(name, tmp_path)
    check(name, run_trial(name, tmp_path / "jobs", script, "--env", "docker", task=task), turns)


@pytest.fixture(scope="module", autouse=True)
def harbor_takes_every_trajectory() -> Iterator[None]:
    """At the end, Harbor's own models read every trajectory that the tests of this file wrote."""
    yield
    if written and HARBOR.exists():
        done = subprocess.run([HARBOR, "-c", VALIDATE, *written], capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert len(lines) == len(written) and [line for line in lines if not line.endswith(" []")] == []


def test_harbor_is_here_to_read_trajectories() -> None:
    if not HARBOR.exists():
        pytest.skip("harbor is not installed, so it reads no trajectory of this file: .ci/peers harbor")
    subprocess.run([HARBOR, "-c", VALIDATE], check=True, timeout=600)
