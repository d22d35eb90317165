"""`make demo`: the examples pass with their own solutions, need no key, no pull and no engine, and fail without."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.job_tasks import PATIENCE, pier, rewards_of, trials_of

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "tasks"
NAMES = sorted(path.name for path in EXAMPLES.iterdir() if (path / "task.toml").is_file())


@pytest.mark.plain
def test_every_example_passes_with_its_solution_and_fails_without(tmp_path: Path) -> None:
    pier("run", "-p", str(EXAMPLES), "-a", "oracle", "-n", "4", "--job-name", "oracle", cwd=tmp_path)
    assert rewards_of(tmp_path / "jobs" / "oracle") == [1] * len(NAMES)
    pier("run", "-p", str(EXAMPLES), "-a", "nop", "-n", "4", "--job-name", "nop", cwd=tmp_path, code=None)
    for trial in trials_of(tmp_path / "jobs" / "nop"):
        verdict = json.loads((trial / "result.json").read_text())["verifier_result"]
        assert not verdict or all(value < 1 for value in verdict["rewards"].values()), trial.name


def test_make_demo_is_what_the_readme_says(tmp_path: Path) -> None:
    if shutil.which("make") is None or not (ROOT / ".venv" / "bin" / "pier").exists():
        pytest.skip("make, or the tree's own .venv, is not there")
    said = subprocess.run(["make", "-n", "-o", "venv", "-o", ".venv/.ready", "demo"], cwd=ROOT, capture_output=True,
                          text=True, timeout=PATIENCE)  # fmt: skip
    assert "pier run examples/tasks -a oracle" in said.stdout, said.stderr
    command = next(line for line in said.stdout.splitlines() if "pier run" in line)
    place = {**os.environ, "PATH": f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}"}
    moved = command.replace("pier run", f"pier run -o {tmp_path / 'jobs'}", 1)
    done = subprocess.run(["sh", "-c", moved], cwd=ROOT, env=place, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert f"{len(NAMES)}/{len(NAMES)}" in done.stdout and "1.000" in done.stdout
