"""Faults of an engine and of its containers: who waits is told in bounded time, others go on, and nothing stays."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pier.errors import PolicyError, SandboxError
from pier.image.model import Image
from pier.lease import Lease
from pier.network.policy import NONE
from pier.sandbox import open_backend
from pier.sandbox.contract import SandboxSpec
from tests.busybox import busybox_image
from tests.engine import Engine, engine, missing
from tests.job_tasks import PATIENCE, gate_mount, make_task, pier, rewards_of, start_pier, trials_of, wait_for

pytestmark = [pytest.mark.docker, pytest.mark.skipif(missing() is not None, reason=str(missing()))]

IMAGE = "test/bash"
WAIT = """\
grep -o 'containers/[0-9a-f]*' /proc/self/mountinfo | head -n 1 > /tmp/id && mv /tmp/id /gate/{name}
while [ ! -e /gate/go ]; do sleep 0.05; done
echo hi > /tmp/answer"""


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    """Busybox and this machine's bash with its libraries."""
    image = busybox_image(tmp_path_factory.mktemp("image"))
    told = subprocess.run(["ldd", "/bin/bash"], capture_output=True, text=True, check=True).stdout
    for path in ["/bin/bash", *(part for part in told.split() if part.startswith("/"))]:
        target = image.layers[0] / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            shutil.copy(Path(path).resolve(), target)
    return image


@pytest.fixture(scope="module")
def docker(image: Image) -> Iterator[Engine]:
    with engine() as running:
        packed = subprocess.run(["tar", "-C", image.layers[0], "-c", "."], capture_output=True, check=True).stdout
        running.docker("import", "-", IMAGE, stdin=packed)
        yield running
        assert running.containers() == []


@pytest.fixture(autouse=True)
def address(docker: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", docker.url)


async def test_who_waits_for_a_paused_container_is_told(docker: Engine, image: Image, tmp_path: Path) -> None:
    with Lease() as lease:
        async with open_backend("docker", lease) as backend, asyncio.timeout(PATIENCE / 2):
            sandbox, sibling = [await backend.start(SandboxSpec(image)) for _ in range(2)]
            await sandbox.write_file("/tmp/large", bytes(1 << 20))
            sleeping = asyncio.ensure_future(sandbox.exec(["sleep", "600"]))
            await asyncio.to_thread(docker.pause, f"pier-{sandbox.id}")
            told = await asyncio.gather(
                sleeping,
                sandbox.exec(["true"]),
                sandbox.kill_all(),
                sandbox.read_file("/tmp/large"),
                sandbox.download("/tmp", tmp_path / "copy"),
                sandbox.upload(Path("/usr/bin/env"), "/tmp/env"),
                return_exceptions=True,
            )
            assert [error.blame for error in told if isinstance(error, SandboxError)] == ["infra"] * len(told), told
            assert "paused" in str(told[0])
            assert (await sibling.exec("echo fine")).text == "fine\n"
            await sandbox.stop()
            await sibling.stop()
        assert lease.held() == []
    assert docker.containers() == []


async def test_a_paused_container_is_stopped_at_once(docker: Engine, image: Image) -> None:
    with Lease() as lease:
        async with open_backend("docker", lease) as backend, asyncio.timeout(PATIENCE / 2):
            sandbox = await backend.start(SandboxSpec(image))
            await asyncio.to_thread(docker.pause, f"pier-{sandbox.id}")
            await sandbox.stop()
        assert lease.held() == []
    assert docker.containers() == []


SIGNAL_ALL_LATER = "later=$(seq $(($$ + 2)) $(($$ + 200))); while :; do kill -{} $later; done"


@pytest.mark.parametrize("sent", ["STOP", "KILL"])
async def test_what_stops_or_kills_all_others_cannot_make_anybody_wait(docker: Engine, image: Image, sent: str) -> None:
    """Whoever does something in the container for pier is among its processes, where root may signal them."""
    signalling = ["sh", "-c", SIGNAL_ALL_LATER.format(sent)]
    with Lease() as lease:
        async with open_backend("docker", lease) as backend, await backend.start(SandboxSpec(image)) as sandbox:
            hostile = await sandbox.spawn(signalling, on_output=lambda *_: None)
            for _ in range(5):
                with contextlib.suppress(SandboxError):
                    await asyncio.wait_for(sandbox.exec("true", timeout=0.2), 60)
                with contextlib.suppress(SandboxError):
                    await asyncio.wait_for(sandbox.read_file("/etc/passwd"), 60)
                with contextlib.suppress(PolicyError):
                    await asyncio.wait_for(sandbox.set_network(NONE), 60)
            assert await asyncio.wait_for(sandbox.kill_all(), 60)
            assert (await hostile.wait()).exit_code == 137
            assert (await sandbox.exec("echo alive", timeout=60)).text == "alive\n"
            await sandbox.set_network(NONE)


def test_a_pause_fails_one_trial_and_no_other(docker: Engine, tmp_path: Path) -> None:
    with gated_run(tmp_path, "one", "two") as running:
        first = wait_for(lambda: container_of(tmp_path, "one"), running)
        docker.pause(first)
        (tmp_path / "gate" / "go").touch()
        _, told = running.communicate(timeout=PATIENCE)
    assert running.returncode == 1, told
    faults = {trial.name.partition("__")[0]: fault_of(trial) for trial in trials_of(tmp_path / "jobs" / "j")}
    assert faults["two"] == {}
    assert faults["one"]["blame"] == "infra"
    assert docker.containers() == []


def test_what_a_killed_runner_left_paused_is_swept(docker: Engine, tmp_path: Path) -> None:
    with gated_run(tmp_path, "one") as running:
        docker.pause(wait_for(lambda: container_of(tmp_path, "one"), running))
        running.kill()
        running.communicate(timeout=PATIENCE)
    assert len(docker.containers()) == 1
    pier("gc", cwd=tmp_path)
    assert docker.containers() == []


def test_an_engine_that_dies_and_comes_back(docker: Engine, tmp_path: Path) -> None:
    with gated_run(tmp_path, "one", "two") as running:
        for name in ("one", "two"):
            wait_for(lambda name=name: container_of(tmp_path, name), running)
        docker.kill()
        docker.start()
        _, told = running.communicate(timeout=PATIENCE)
    assert running.returncode == 1, told
    assert [fault_of(trial)["blame"] for trial in trials_of(tmp_path / "jobs" / "j")] == ["infra", "infra"]
    pier("gc", cwd=tmp_path)
    assert docker.containers() == []
    (tmp_path / "gate" / "go").touch()
    pier("run", *run_options(tmp_path, "again"), cwd=tmp_path)
    assert rewards_of(tmp_path / "jobs" / "again") == [1, 1]


def test_trials_whose_helper_is_lost_are_tried_again_with_another(
    docker: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIER_DOCKER_HELPER", "1")
    with gated_run(tmp_path, "one", "two", "zero", retries=2) as running:
        wait_for(lambda: all(container_of(tmp_path, name) for name in ("one", "two")), running)
        (helper,) = docker.helpers()
        docker.docker("rm", "-f", helper)
        (tmp_path / "gate" / "go").touch()
        _, told = running.communicate(timeout=PATIENCE)
    assert running.returncode == 0, told
    assert rewards_of(tmp_path / "jobs" / "j") == [1, 1, 1]
    assert docker.containers() == [] and helper not in docker.helpers()
    docker.wait_for_no_helper()


@contextmanager
def gated_run(directory: Path, *names: str, retries: int = 0) -> Iterator[subprocess.Popen[str]]:
    """A run with one trial for each name, which makes a file of that name in `gate` and waits for `go`."""
    (directory / "gate").mkdir()
    for name in names:
        make_task(directory / "tasks" / name, solve=WAIT.format(name=name))
    running = start_pier("run", *run_options(directory, "j", retries), cwd=directory)
    try:
        yield running
    finally:
        running.kill()
        running.communicate(timeout=PATIENCE)


def run_options(directory: Path, name: str, retries: int = 0) -> list[str]:
    where = ["--env", "docker", "--image", IMAGE, *gate_mount(directory / "gate")]
    return ["-p", "tasks", "-a", "oracle", "-n", "2", "--max-retries", str(retries), "--job-name", name, *where]


def container_of(directory: Path, name: str) -> str:
    """The container whose solution has come to the gate, if it has: the engine's own mounts tell its id."""
    path = directory / "gate" / name
    return path.read_text().strip().rpartition("/")[2] if path.exists() else ""


def fault_of(trial: Path) -> dict[str, Any]:
    """What went wrong in a trial; empty if nothing did."""
    return json.loads((trial / "result.json").read_text())["exception_info"] or {}
