"""What happens to tasks of several services when a container or the whole runner vanishes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.compose_tasks import compose_task, import_bash_image
from tests.engine import Engine, engine, missing
from tests.job_tasks import PATIENCE, pier, start_pier, trials_of, wait_for

pytestmark = [pytest.mark.docker, pytest.mark.skipif(missing() is not None, reason=str(missing()))]

SERVICES = """\
services:
  main: {image: "{image}", volumes: ["data:/data"], depends_on: [side]}
  side: {image: "{image}", command: [sleep, "4321"], restart: always, volumes: ["data:/data"]}
volumes: {data: }
"""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with engine() as found:
        import_bash_image(found, tmp_path_factory.mktemp("image"))
        yield found


@pytest.fixture
def docker(running: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setenv("DOCKER_HOST", running.url)
    compose_task(tmp_path / "tasks" / "one", SERVICES)
    return running


@contextmanager
def waiter(cwd: Path, *args: str) -> Iterator[subprocess.Popen[str]]:
    """A run whose agent waits for the file /go."""
    agent = ["-a", "command", "--ak", "command=while [ ! -e /go ]; do sleep 0.1; done"]
    found = start_pier("run", "-p", "tasks", *agent, "--env", "docker", *args, cwd=cwd)
    try:
        yield found
    finally:
        found.kill()
        found.communicate(timeout=PATIENCE)


def busy(docker: Engine, what: str) -> str:
    """The container that runs a command, if there is one."""
    return next((found for found in docker.containers() if what in docker.processes(found)), "")


def test_what_a_killed_runner_left_is_swept(docker: Engine, tmp_path: Path) -> None:
    with waiter(tmp_path) as found:
        wait_for(lambda: busy(docker, "! -e /go"), found)
        found.kill()
        found.communicate(timeout=PATIENCE)
    assert docker.docker("volume", "ls", "-q") != ""
    pier("gc", cwd=tmp_path)
    assert docker.containers() == []
    assert docker.docker("volume", "ls", "-q") == ""


def test_a_sidecar_that_is_removed_is_the_infrastructures_fault(docker: Engine, tmp_path: Path) -> None:
    with waiter(tmp_path, "--job-name", "r", "--max-retries", "0") as found:
        main = wait_for(lambda: busy(docker, "! -e /go"), found)
        docker.docker("rm", "-f", wait_for(lambda: busy(docker, "sleep 4321"), found))
        docker.docker("exec", main, "touch", "/go")
        _, told = found.communicate(timeout=PATIENCE)
    (trial,) = trials_of(tmp_path / "jobs" / "r")
    result = json.loads((trial / "result.json").read_text())
    assert result["verifier_result"] is None, told
    errors = json.dumps(result)
    assert "the service 'side' is lost" in errors and '"infra"' in errors
    assert docker.containers() == [] and docker.docker("volume", "ls", "-q") == ""
