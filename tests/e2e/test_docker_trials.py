"""`pier run --env docker` as a user types it, with a real engine, and what happens when the engine's things vanish."""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import pytest

from tests.busybox import busybox_image
from tests.engine import Engine, engine, missing
from tests.job_tasks import PATIENCE, make_task, pier, rewards_of, start_pier, trials_of, wait_for
from tests.ways import free_port, make_certificates, tls_options

pytestmark = [pytest.mark.docker, pytest.mark.skipif(missing() is not None, reason=str(missing()))]

IMAGE = "test/bash"
ASKS = """\
#!/bin/sh
wget -q -O /tmp/answer --header "Content-Type: application/json" --header "Authorization: Bearer $PIER_API_KEY" \\
  --post-data '{"model": "m", "messages": [{"role": "user", "content": "hello"}]}' "$OPENAI_BASE_URL/chat/completions"
"""


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """The directory of the engine's certificates, and the port where it asks for them."""
    return make_certificates(tmp_path_factory.mktemp("tls") / "certificates"), free_port()


@pytest.fixture(scope="module")
def docker(secure: tuple[Path, int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine that has one image: busybox and this machine's bash with its libraries."""
    layer = busybox_image(tmp_path_factory.mktemp("image")).layers[0]
    told = subprocess.run(["ldd", "/bin/bash"], capture_output=True, text=True, check=True).stdout
    for path in ["/bin/bash", *(part for part in told.split() if part.startswith("/"))]:
        target = layer / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            shutil.copy(Path(path).resolve(), target)
    packed = BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(layer, ".")
    with engine(*tls_options(*secure)) as running:
        running.docker("import", "--change", "ENV GREETING=hello", "-", IMAGE, stdin=packed.getvalue())
        yield running
        assert running.containers() == []


@pytest.fixture
def job(docker: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DOCKER_HOST", docker.url)
    make_task(tmp_path / "tasks" / "one")
    return tmp_path


def test_trials_in_containers_have_the_same_rewards(job: Path) -> None:
    pier(
        "run", "-p", "tasks", "-a", "oracle", "-k", "2", "--env", "docker", "--image", IMAGE, "--job-name", "j", cwd=job
    )
    assert rewards_of(job / "jobs" / "j") == [1, 1]
    pier("run", "-p", "tasks", "-a", "nop", "--env", "docker", "--image", IMAGE, "--job-name", "n", cwd=job)
    assert rewards_of(job / "jobs" / "n") == [0]


def test_a_dockerfile_is_built_once_and_brought_to_the_engine(job: Path, docker: Engine) -> None:
    task = job / "tasks" / "one"
    (task / "environment").mkdir(exist_ok=True)
    (task / "environment" / "Dockerfile").write_text(f"FROM {IMAGE}\nENV COLOUR=blue\nRUN echo made > /made\n")
    pier("run", "-p", "tasks", "-a", "oracle", "-k", "2", "--env", "docker", "--job-name", "b", cwd=job)
    assert rewards_of(job / "jobs" / "b") == [1, 1]
    assert any(row.startswith("pier/") for row in docker.docker("images", "--format", "{{.Repository}}").split())


def test_a_far_engine_gets_the_agent_and_its_model_calls_come_back(
    job: Path, secure: tuple[Path, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
    monkeypatch.setenv("DOCKER_CERT_PATH", str(secure[0]))
    (job / "agent" / "bin").mkdir(parents=True)
    (job / "agent" / "bin" / "asks").write_text(ASKS)
    (job / "agent" / "bin" / "asks").chmod(0o755)
    (job / "model.yaml").write_text("turns:\n  - text: hi\n")
    agent = ["-a", "command", "--ak", "command=asks", "--ak", f"mount={job / 'agent'}", "-m", "script:model.yaml"]
    there = ["--env", "docker", "--ek", f"host=tcp://127.0.0.1:{secure[1]}", "--image", IMAGE]
    pier("run", "-p", "tasks", *agent, *there, "-k", "2", "--job-name", "far", cwd=job, DOCKER_HOST="")
    assert rewards_of(job / "jobs" / "far") == [1, 1]


def test_a_container_that_is_removed_during_a_trial_is_the_infrastructures_fault(job: Path, docker: Engine) -> None:
    with sleeper(job, "--job-name", "r", "--max-retries", "0") as running:
        docker.docker("rm", "-f", wait_for(lambda: busy_container(docker), running))
        _, told = running.communicate(timeout=PATIENCE)
    assert running.returncode == 1, told
    (trial,) = trials_of(job / "jobs" / "r")
    result = json.loads((trial / "result.json").read_text())
    assert result["verifier_result"] is None
    assert result["exception_info"] is not None


def test_what_a_killed_runner_left_is_swept(job: Path, docker: Engine) -> None:
    with sleeper(job, "--job-name", "k") as running:
        wait_for(lambda: busy_container(docker), running)
        running.kill()
        running.communicate(timeout=PATIENCE)
    assert len(docker.containers()) == 1
    pier("gc", cwd=job)
    assert docker.containers() == []


def test_an_engine_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    make_task(tmp_path / "tasks" / "one")
    done = pier("run", "-p", "tasks", "-a", "oracle", "--env", "docker", "--image", IMAGE, cwd=tmp_path, code=None)
    assert done.returncode in (1, 2)
    assert "does not answer" in done.stderr + done.stdout
    assert "none.sock" in done.stderr + done.stdout


@contextmanager
def sleeper(cwd: Path, *args: str) -> Iterator[subprocess.Popen[str]]:
    """A run whose agent sleeps until somebody ends it."""
    agent = ["-a", "command", "--ak", "command=sleep 600"]
    running = start_pier("run", "-p", "tasks", *agent, "--env", "docker", "--image", IMAGE, *args, cwd=cwd)
    try:
        yield running
    finally:
        running.kill()
        running.communicate(timeout=PATIENCE)


def busy_container(docker: Engine) -> str:
    """The container whose agent runs, if there is one."""
    return next((found for found in docker.containers() if "sleep 600" in docker.processes(found)), "")
