"""The Docker backend keeps the same promises, with a real engine of the tests' own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import pier
from pier.image.model import Image
from pier.lease import Lease
from pier.sandbox import open_backend
from pier.sandbox.conformance import CHECKS, Check, verify
from pier.sandbox.contract import Backend, SandboxSpec
from tests.busybox import busybox_image
from tests.engine import Engine, engine, missing

pytestmark = [pytest.mark.docker, pytest.mark.skipif(missing() is not None, reason=str(missing()))]


@pytest.fixture(scope="module")
def docker() -> Iterator[Engine]:
    with engine() as running:
        yield running
        assert running.containers() == []


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    return busybox_image(tmp_path_factory.mktemp("image"))


@pytest.fixture
async def backend(docker: Engine, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Backend]:
    monkeypatch.setenv("DOCKER_HOST", docker.url)
    with Lease() as lease:
        async with open_backend("docker", lease) as opened:
            yield opened
        assert lease.held() == []


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
async def test_promise(check: Check, backend: Backend, image: Image, tmp_path: Path) -> None:
    await verify(check, backend, image, tmp_path)


async def test_the_front_door_leads_to_containers_too(
    docker: Engine, monkeypatch: pytest.MonkeyPatch, image: Image
) -> None:
    monkeypatch.setenv("DOCKER_HOST", docker.url)
    async with pier.sandbox(image, backend="docker", workdir="/srv/w", user="1234:1234") as box:
        await box.write_file("sub/a.txt", "text")
        assert (
            await box.exec("id -u; cat sub/a.txt; stat -c ' %u' . sub sub/a.txt")
        ).text == "1234\ntext 1234\n 1234\n 1234\n"
        with pytest.raises(PermissionError):
            await box.write_file("/etc/a.txt", "text")
    with pytest.raises(pier.SandboxError, match="no-such-user"):
        async with pier.sandbox(image, backend="docker", user="no-such-user"):
            pass


async def test_the_machines_disks_are_out_of_reach(backend: Backend, image: Image) -> None:
    device = next(Path("/sys/class/block").glob("*/dev")).read_text().strip().replace(":", " ")
    async with await backend.start(SandboxSpec(image)) as sandbox:
        result = await sandbox.exec(
            f"mknod /tmp/disk b {device} && dd if=/tmp/disk of=/dev/null bs=1 count=1", timeout=60
        )
    assert not result.ok
    assert "not permitted" in result.error_text
