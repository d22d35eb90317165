"""`pier image --env docker` and `pier doctor` as a user types them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from pier.image.model import Image
from pier.lease import Lease
from pier.sandbox import open_backend
from pier.sandbox.contract import SandboxSpec
from tests.busybox import busybox_image
from tests.engine import Engine, engine, missing
from tests.job_tasks import pier

needs_engine = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.fixture(scope="module")
def docker() -> Iterator[Engine]:
    with engine() as running:
        yield running


@pytest.fixture
def image(tmp_path: Path) -> Image:
    return busybox_image(tmp_path)


@pytest.mark.docker
@needs_engine
async def test_only_images_that_pier_brought_are_listed_and_collected(
    docker: Engine, image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", docker.url)
    docker.docker("import", "/dev/stdin", "other/one", stdin=bytes(10240))
    ours = f"pier/{'b' * 32}"
    with Lease() as lease:
        async with open_backend("docker", lease) as backend:
            async with await backend.start(SandboxSpec(image)) as sandbox:
                snapshot = await sandbox.snapshot()
                (listed,) = json.loads(pier("image", "list", "--env", "docker", "--json", cwd=tmp_path).stdout)
                assert (listed["reference"], listed["in_use"]) == (ours, True)
                kept = json.loads(pier("image", "gc", "--env", "docker", "--json", cwd=tmp_path).stdout)
                assert kept["images"] == []
            await backend.remove_snapshot(snapshot)
    assert "would remove 1" in pier("image", "gc", "--env", "docker", "--dry-run", cwd=tmp_path).stdout
    assert "removed 0" in pier("image", "gc", "--env", "docker", "--max-size", "10G", cwd=tmp_path).stdout
    assert ours in pier("image", "list", "--env", "docker", cwd=tmp_path).stdout
    assert "removed 1" in pier("image", "gc", "--env", "docker", cwd=tmp_path).stdout
    assert docker.docker("images", "--format", "{{.Repository}}").split() == ["other/one"]


@pytest.mark.docker
@needs_engine
def test_doctor_names_the_engine(docker: Engine, tmp_path: Path) -> None:
    rows = json.loads(pier("doctor", "--json", cwd=tmp_path, code=None, DOCKER_HOST=docker.url).stdout)["docker"]
    assert [row["ok"] for row in rows] == [True, True]
    assert docker.url in rows[0]["detail"]


@pytest.mark.plain
@pytest.mark.parametrize(
    ("address", "said", "fix"),
    [
        ("unix:///nonexistent/docker.sock", "does not answer", "start the engine"),
        ("tcp://127.0.0.1:1", "must be on this machine", "run pier on the engine's host"),
        ("ssh://nobody@127.0.0.1", "must be on this machine", "run pier on the engine's host"),
    ],
)
def test_doctor_says_what_docker_lacks(address: str, said: str, fix: str, tmp_path: Path, is_root: bool) -> None:
    told = pier("doctor", "--json", cwd=tmp_path, code=None, DOCKER_HOST=address).stdout
    reached, root = json.loads(told)["docker"]
    assert not reached["ok"]
    assert said in reached["detail"]
    assert fix in reached["fix"]
    assert root["ok"] == is_root
    assert is_root or "run pier as root" in root["fix"]


@pytest.mark.plain
def test_an_engine_that_is_not_there_has_no_images(tmp_path: Path) -> None:
    done = pier("image", "list", "--env", "docker", cwd=tmp_path, code=None, DOCKER_HOST=f"unix://{tmp_path}/no.sock")
    assert done.returncode != 0
    assert "does not answer" in done.stderr
    assert "Traceback" not in done.stderr
