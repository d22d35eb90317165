"""What a command loads: each module costs every user some of its start, so what a command does not need stays away."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.job_tasks import make_task

HEAVY = {"pydantic", "asyncio", "rich", "aiohttp", "yaml", "jinja2", "aiodocker", "genai_prices", "importlib.metadata"}
"""What takes longer to load than `pier --help` takes to answer."""
NOT_FOR_A_RUN = {
    "rich", "aiohttp", "yaml", "jinja2", "aiodocker", "genai_prices", "sqlite3",
    "pier.gateway", "pier.sandbox.docker", "pier.sandbox.compose.read", "pier.image.dockerfile", "pier.trajectory",
}  # fmt: skip
"""What a run of the oracle without a model, on the local backend and without a terminal, has no use for."""


def loaded(*arguments: str) -> set[str]:
    """The modules that a command loads, with the packages that they are in."""
    command = [sys.executable, "-X", "importtime", "-m", "pier", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=dict(os.environ))
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return {row.rpartition("|")[2].strip() for row in rows}


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_loads_next_to_nothing(option: str) -> None:
    assert loaded(option) & HEAVY == set()


def test_a_run_loads_what_it_needs(tmp_path: Path) -> None:
    task = make_task(tmp_path / "hello")
    found = loaded("run", "-p", str(task), "--image", "host", "-a", "oracle", "--jobs-dir", str(tmp_path / "jobs"))
    assert "pier.job.runner" in found and found & NOT_FOR_A_RUN == set()
