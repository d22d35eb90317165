"""podman instead of Docker, by its compatible socket: entered by pier itself and by a helper."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from pier.image.model import Image
from pier.lease import Lease
from pier.sandbox import open_backend
from pier.sandbox.conformance import CHECKS, Check, verify
from pier.sandbox.contract import Backend
from tests.busybox import busybox_image
from tests.job_tasks import PATIENCE, pier, wait_for
from tests.podman import Podman, podman, podman_missing
from tests.serving import ask, serving

SELECTED = (
    "exit_codes", "timeout_kills_daemons", "upload_tree", "served_from_outside", "none_refuses_at_once",
    "allowlist_refuses_at_once", "kill_all", "memory_limit_is_reported", "snapshot", "stop_while_busy",
)  # fmt: skip

pytestmark = [
    pytest.mark.docker,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(podman_missing() is not None, reason=str(podman_missing())),
]


@pytest.fixture(scope="module")
def engine() -> Iterator[Podman]:
    with podman() as running:
        yield running
        wait_for(lambda: running.run("ps", "-aq") == "")


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    return busybox_image(tmp_path_factory.mktemp("image"))


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["", "1"], ids=["own", "helper"])
async def backend(
    request: pytest.FixtureRequest, engine: Podman, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Backend]:
    home = tmp_path_factory.mktemp("root")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIER_HOME", str(home))
        patch.setenv("DOCKER_HOST", engine.url)
        patch.setenv("PIER_DOCKER_HELPER", request.param)
        with Lease(home / "leases") as lease:
            async with open_backend("docker", lease) as opened:
                await opened.capabilities()
                yield opened
            assert lease.held() == []


async def test_the_engine_sees_this_machine_s_files(backend: Backend) -> None:
    assert (await backend.capabilities()).bind_mounts


async def test_one_helper_serves_processes_that_start_at_once(
    engine: Podman, image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", engine.url)
    monkeypatch.setenv("PIER_DOCKER_HELPER", "1")
    with serving(image) as one, serving(image) as two:
        assert [ask(running, "echo fine") for running in (one, two)] == ["fine\n"] * 2
        (helper,) = [name for name in engine.run("ps", "--format", "{{.Names}}").split() if "helper" in name]
        one.kill()
        wait_for(lambda: len(engine.run("ps", "-q").split()) == 2)
        assert ask(two, "echo fine") == "fine\n"
        engine.run("rm", "-f", helper)
        assert ask(two, "echo fine") == ""
        assert two.wait(PATIENCE) == 1
    pier("gc", cwd=engine.directory)


@pytest.mark.parametrize("check", [check for check in CHECKS if check.name in SELECTED], ids=lambda check: check.name)
async def test_promise(check: Check, backend: Backend, image: Image, tmp_path: Path) -> None:
    await verify(check, backend, image, tmp_path)
