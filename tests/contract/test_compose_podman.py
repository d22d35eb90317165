"""Tasks of several services where the engine is a podman that speaks Docker's API."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pier.image.model import Image
from pier.lease import Lease
from pier.network.policy import NetworkPolicy
from pier.sandbox import SandboxSpec, open_backend
from tests.compose_tasks import bash_image, running_services
from tests.podman import Podman, podman, podman_missing

pytestmark = [
    pytest.mark.docker,
    pytest.mark.skipif(podman_missing() is not None, reason=str(podman_missing())),
]

SERVICES = """\
services:
  main: {image: x, depends_on: {side: {condition: service_healthy}}}
  side:
    image: x
    command: [sh, -c, 'echo "pid $$$$"; echo served > /tmp/page; exec httpd -f -p 80 -h /tmp']
    volumes: ["data:/data", "./files:/files:ro"]
    tmpfs: "/fast:size=1m"
    healthcheck: {test: wget -qO- http://side/page, interval: 100ms, retries: 100}
volumes: {data: }
"""


@pytest.fixture(scope="module")
def engine() -> Iterator[Podman]:
    with podman() as running:
        yield running


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    return bash_image(tmp_path_factory.mktemp("image"))


@pytest.fixture(params=["own", "helper"], autouse=True)
def way(engine: Podman, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", engine.url)
    if request.param == "helper":
        monkeypatch.setenv("PIER_DOCKER_HELPER", "1")


async def test_services_find_one_another(tmp_path: Path, image: Image) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "one").write_text("1\n")
    async with running_services(tmp_path, SERVICES, image) as services:
        assert "pid 1\n" in services.log("side")
        assert await services.told("main", "wget -qO- http://side/page") == "served"
        assert "bad address" in await services.told("main", "wget -qO- http://refused.test/")
        assert (
            await services.told("side", "cat /proc/1/comm /files/one; touch /data/w /fast/w && echo w") == "httpd\n1\nw"
        )


async def test_a_container_alone_asks_the_policy_for_names(image: Image) -> None:
    with Lease() as lease:
        async with open_backend("docker", lease) as backend:
            spec = SandboxSpec(image, network=NetworkPolicy("allowlist", ("allowed.test",)))
            async with await backend.start(spec) as sandbox:
                result = await sandbox.exec("nslookup refused.test", timeout=60)
        assert lease.held() == []
    assert "NXDOMAIN" in result.text
