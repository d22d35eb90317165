"""The example tasks run by Harbor itself on a Docker engine and by pier on the same engine and in local sandboxes: the
rewards are the same."""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pytest

from tests import harbor_compose
from tests.busybox import busybox_image
from tests.engine import Engine, engine, missing
from tests.job_tasks import pier

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.skipif(missing() is not None, reason=str(missing()))]

ROOT = Path(__file__).resolve().parents[2]
TASKS = ROOT / "examples" / "tasks"
BASES = ("python:3.12-slim", "ubuntu:24.04")
"""What the tasks' Dockerfiles stand on."""

Rewards = dict[tuple[str, str], dict[str, float] | None]


@pytest.fixture(scope="module")
def docker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine that has one image: busybox, and this machine's bash, tar and Python with their libraries. Harbor needs
    the options of GNU tar to leave files out of an artifact."""
    layer = busybox_image(tmp_path_factory.mktemp("image")).layers[0]
    python = Path("/usr/bin/python3").resolve()
    library = Path(f"/usr/lib/{python.name}")
    if not library.is_dir():
        pytest.skip("this machine has no Python of its own in /usr")
    (layer / "bin/tar").unlink()
    packed = BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(layer, ".")
        programs = ("/bin/bash", "/bin/tar", "/usr/bin/python3")
        for path in sorted({*programs, *(each for program in programs for each in _libraries(program))}):
            archive.add(Path(path).resolve(), path.lstrip("/"))
        archive.add(library, str(library).lstrip("/"), filter=_needed)
    with engine() as running:
        running.docker("import", "--change", "WORKDIR /app", "-", BASES[0], stdin=packed.getvalue())
        for name in BASES[1:]:
            running.docker("tag", BASES[0], name)
        yield running
        assert running.containers() == []


def _libraries(program: str) -> list[str]:
    told = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    return [part for part in told.split() if part.startswith("/")]


def _needed(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    skipped = ("/test", "/__pycache__", "/idlelib", "/lib2to3", "/ensurepip", "/distutils", "/turtledemo", "/config-")
    return None if any(part in entry.name for part in skipped) else entry


@pytest.fixture(scope="module")
def harbor() -> Path:
    done = subprocess.run([ROOT / ".ci" / "peers", "harbor"], capture_output=True, text=True, timeout=900)
    if done.returncode:
        pytest.skip(f"harbor cannot be installed here: {done.stderr.strip()[-200:]}")
    return ROOT / ".cache" / "peers" / "harbor" / "bin" / "harbor"


def rewards(job: Path) -> Rewards:
    """What each agent got for each task of a job, from the files that both programs write."""
    found: Rewards = {}
    for path in sorted(job.glob("*/result.json")):
        result = json.loads(path.read_text())
        verdict = result["verifier_result"]
        found[result["agent_info"]["name"], result["task_name"]] = verdict["rewards"] if verdict else None
    return found


def run_harbor(harbor: Path, place: Path) -> Rewards:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    env |= harbor_compose.install(place / "bin")
    env |= {"HOME": str(place / "home"), harbor_compose.STOP: "0"}
    command = [harbor, "run", "-c", "job.json", "-y", "-q", "-o", "theirs", "--job-name", "t", "--force-build"]
    done = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return rewards(place / "theirs" / "t")


def run_pier(place: Path, name: str, *options: str) -> Rewards:
    pier("run", "-c", "job.json", "--job-name", name, *options, cwd=place)
    return rewards(place / "jobs" / name)


@pytest.mark.timeout(900)
def test_the_same_tasks_get_the_same_rewards(
    docker: Engine, harbor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", docker.url)
    job = {
        "n_concurrent_trials": 4,
        "agents": [{"name": "oracle"}, {"name": "nop"}],
        "datasets": [{"path": str(TASKS)}],
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    theirs = run_harbor(harbor, tmp_path)
    names = [f"pier/{path.name}" for path in TASKS.iterdir() if path.is_dir()]
    assert theirs.keys() == {(agent, name) for agent in ("oracle", "nop") for name in names}
    assert all(theirs["oracle", name] == {"reward": 1.0} != theirs["nop", name] for name in names)
    assert run_pier(tmp_path, "local") == theirs
    assert run_pier(tmp_path, "docker", "--env", "docker", "--force-build") == theirs
